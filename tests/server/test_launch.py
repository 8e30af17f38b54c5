"""What a server refuses before it listens, or before its engine starts: by the checkpoint's key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ess.errors import BadInput
from ess.kernels.cpu import native
from ess.models.chat.messages import Conversation, Message
from ess.models.chat.styles import TemplateStyle, style_of
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start import banner
from ess.server.commands.start.begin import serve_flags
from ess.server.commands.start.files.checkpoint import read_checkpoint, read_entries
from ess.server.commands.start.files.words import chat_template, read_words
from ess.server.commands.start.resolving import check_kept, layout_of, noting_disk, planned
from ess.server.commands.start.settings import resolve

NOBODY = 65534


def folder_with(folder: Path, **changed: Any) -> Path:
    """The model in the box with another configuration, and without weights."""
    config = json.loads((EMBEDDED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    return folder


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"index_head_dim": 96}, "index_head_dim 96 is not a power of two"),
        ({"index_head_dim": 66}, "index_head_dim 66 is not a multiple of 4"),
        ({"kv_lora_rank": 500}, "kv_lora_rank 500 is not a multiple of 128"),
        ({"n_routed_experts": 520}, "n_routed_experts"),
        ({"eos_token_id": 4096}, "eos_token_id 4096 is outside of vocab_size 4096"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling has no factor"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changed: dict[str, Any], says: str
) -> None:
    folder = folder_with(tmp_path, **changed)
    shutil.copy(EMBEDDED / "model.safetensors", folder)
    with pytest.raises(BadInput, match=rf"^config\.json of deepseek_v32: .*{says}"):
        serve_flags({"model": str(folder), "port": 0}, config=None, json=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("end", [-1, 4096, 1 << 40])
def test_an_end_id_that_no_request_can_have(end: int) -> None:
    resolved, checkpoint = resolve({}, environment={}), read_checkpoint("")
    wrong = msgspec.structs.replace(checkpoint, eos_ids=(1, end))
    with pytest.raises(BadInput, match=f"eos_token_id {end} of config.json or generation_config"):
        read_words(resolved.settings, wrong)


def refused(folder: Path, capsys: pytest.CaptureFixture[str], **flags: Any) -> str:
    """Before anything is printed, so before anything is listened to or started."""
    with pytest.raises(BadInput) as caught:
        serve_flags({"model": str(folder), "port": 0, **flags}, config=None, json=False)
    assert capsys.readouterr().out == ""
    return str(caught.value)


def test_weights_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_with(tmp_path)
    whole = (EMBEDDED / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    said = refused(tmp_path, capsys)
    assert said.startswith(f"model.safetensors is cut short: it has {len(whole) - 1000:,} bytes")
    assert said.endswith("fetch it again")


def test_a_name_of_the_hub_is_not_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="`hf download deepseek-ai/V3`, then `ess serve d"):
        read_checkpoint("deepseek-ai/V3")
    with pytest.raises(BadInput, match=r"no name for the model in the box$"):
        read_checkpoint("/no/folder")
    with pytest.raises(BadInput, match=r"did you mean smollm2\?$"):
        read_checkpoint("smolm2")


def test_a_wrong_instruction_set_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    native._library.cache_clear()
    try:
        with monkeypatch.context() as asked:
            asked.setenv(native.ISA, "scalar")
            said = refused(EMBEDDED, capsys)
    finally:
        native._library.cache_clear()
    assert said == "ESS_ISA is 'scalar', must be one of portable, avx2, avx512, avx512_bf16"
    assert native.available()


def test_a_wrong_way_to_copy_rows_is_refused_before_the_engine_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESS_ROWS", "fast")
    said = refused(EMBEDDED, capsys)
    assert said.startswith("ESS_ROWS is 'fast', must be one of unmeasured, requests, plain, ")


@pytest.mark.parametrize("meets", [{}, {"peers": "10.0.0.1:8998"}, {"fake_prefill": True}])
def test_a_decode_worker_without_peers_says_so(meets: dict[str, Any]) -> None:
    given = {"role": "decode", "peer_secret": "s" * 16, **meets}
    lines = banner._title(resolve(given, environment={}).settings)
    assert any("knows no prefill worker" in line for line in lines) == (not meets)


def test_variables_that_kernels_read_are_no_settings() -> None:
    named = {"ESS_ROWS": "plain", "ESS_ISA": "avx2", "ESS_CACHE_DIR": "/var/cache"}
    assert set(resolve({}, environment=named).origins.values()) == {"default"}


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no config\.json: give the folder"):
        read_checkpoint(str(tmp_path))
    with pytest.raises(BadInput, match=r"config.json' is a file: give its folder$"):
        read_checkpoint(str(EMBEDDED / "config.json"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for given in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(BadInput, match="is in GGUF: give the folder of the original checkpoi"):
            read_checkpoint(str(given))


def test_a_name_of_the_hub_is_found_where_it_was_fetched_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the cache is a link to its blob. The clients' name is that of the hub, by whichever
    word the folder is named."""
    home = tmp_path / "hub" / "models--some-org--a--model"
    snapshot = home / "snapshots" / "0123abcd"
    for folder in (snapshot, home / "blobs", home / "refs"):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(EMBEDDED.iterdir())):
        shutil.copy(file, home / "blobs" / f"{number:040x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number:040x}")
    (home / "refs" / "main").write_text("0123abcd")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for word in ("some-org/a--model", str(snapshot)):
        checkpoint = read_checkpoint(word)
        assert (checkpoint.path, checkpoint.name) == (str(snapshot), "some-org/a--model")
        assert checkpoint.weight_bytes == read_checkpoint("").weight_bytes
        assert read_entries(Path(checkpoint.path)).keys() == read_entries(EMBEDDED).keys()
        assert len(Tokenizer(checkpoint.path)) == len(Tokenizer(EMBEDDED))
    (home / "refs" / "main").write_text("../../../etc")
    with pytest.raises(BadInput, match="hf download"):
        read_checkpoint("some-org/a--model")


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("model.safetensors", "neither model.safetensors.index.json nor model.safetensors: fetch"),
        ("model-2.safetensors", "names 2 files; missing: 1, first 'model-2.safetensors'"),
    ],
)
def test_weights_that_were_not_all_fetched(
    lacks: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_with(tmp_path)
    if lacks != "model.safetensors":
        shutil.copy(EMBEDDED / "model.safetensors", tmp_path / "model-1.safetensors")
        names = sorted(read_entries(EMBEDDED))
        placed = {name: f"model-{1 + (name == names[0])}.safetensors" for name in names}
        index = json.dumps({"weight_map": placed})
        (tmp_path / "model.safetensors.index.json").write_text(index)
    assert says in refused(tmp_path, capsys)


def test_a_pointer_of_git_lfs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder_with(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 23899608\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    assert "pointer of Git LFS" in refused(tmp_path, capsys)


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        "",
        '{"decoder": {"type": "ByteLevel"}, "model": {',
        '{"decoder": {"type": "WordPiece"}}',
    ],
)
def test_a_broken_tokenizer_is_refused_before_the_server_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: str | None
) -> None:
    folder_with(tmp_path)
    shutil.copy(EMBEDDED / "model.safetensors", tmp_path)
    if tokenizer is not None:
        (tmp_path / "tokenizer.json").write_text(tokenizer)
    for flags in ({}, {"dp_size": 2}):
        assert "tokenizer.json" in refused(tmp_path, capsys, **flags)


@pytest.mark.parametrize(
    "name", ["body_bytes", "host_bytes", "graph_bytes", "max_model_len", "prefix_cache_disk"]
)
def test_what_is_no_size_is_refused_before_the_server_listens(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    said = refused(EMBEDDED, capsys, **{name: "8 apples"})
    assert said == f"{name}: '8 apples' is not a size; write 4096, 128k, 64MiB or 1.5GiB"


@pytest.mark.parametrize(
    ("given", "how"),
    [({"form": "f32"}, "in f32, with the copies"), ({"engine": "paced"}, "made without a model")],
)
def test_the_start_says_how_weights_are_held(
    capsys: pytest.CaptureFixture[str], given: dict[str, str], how: str
) -> None:
    resolved, checkpoint = resolve(given, environment={}), read_checkpoint("")
    plan = planned(resolved.settings, checkpoint, layout_of(resolved.settings, checkpoint))
    banner.greet(resolved, plan, url="http://here", json=False)
    [line] = [line for line in capsys.readouterr().out.splitlines() if "weights " in line]
    assert how in line


def test_a_folder_of_pages_that_cannot_be_is_refused_before_the_server_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for given, says in ((file, "is no folder"), (file / "x", "cannot be made: Not a directory")):
        said = refused(EMBEDDED, capsys, prefix_cache_dir=str(given))
        assert said == f"prefix_cache_dir {given} {says}"
    user = os.geteuid()
    os.seteuid(user or NOBODY)
    try:
        with pytest.raises(BadInput, match=r"^prefix_cache_dir / cannot be written by user \d+$"):
            check_kept("/")
    finally:
        os.seteuid(user)


def test_a_disk_with_less_room_than_pages_may_take_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that are there already are room too, also those of a stage. A slab of another process
    may be gone once it is looked at."""

    def notes(room: str) -> tuple[str, ...]:
        given = {"prefix_cache_dir": str(tmp_path), "prefix_cache_disk": room}
        return noting_disk(resolve(given, environment={})).notes

    (tmp_path / "gone.slab").symlink_to(tmp_path / "nowhere")
    assert (notes("1MiB"), noting_disk(resolve({}, environment={})).notes) == ((), ())
    [note] = notes("1000TiB")
    assert note.startswith(f"prefix_cache_dir {tmp_path} has room for ")
    assert "less than prefix_cache_disk, 1000.00 TiB" in note
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert len(notes("1MiB")) == 1
    stage = tmp_path / "layers-0-3"
    stage.mkdir()
    (stage / "pages.slab").write_bytes(b"x" * (2 << 20))
    assert notes("1MiB") == ()


def test_certificates_are_checked_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    gone = refused(EMBEDDED, capsys, tls_cert="/no/file", tls_key=str(junk))
    assert gone == "tls_cert /no/file cannot be read: No such file or directory"
    wrong = refused(EMBEDDED, capsys, tls_cert=str(junk), tls_key=str(junk))
    assert wrong.startswith(
        f"tls_cert {junk} and tls_key {junk} are not a certificate and a key in PEM"
    )
    made = [certificate(tmp_path, name) for name in ("a", "b")]
    mixed = refused(EMBEDDED, capsys, tls_cert=f"{made[0]}.crt", tls_key=f"{made[1]}.key")
    assert mixed == "tls_key is not the key of tls_cert"


def certificate(folder: Path, name: str) -> Path:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates")
    made = folder / name
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x"]
    files = ["-keyout", f"{made}.key", "-out", f"{made}.crt"]
    subprocess.run([openssl, *words, *files], check=True, capture_output=True)
    return made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('no') }}", "no"),
        ("{{ messages[7].content }}", "UndefinedError"),
    ],
)
def test_a_wrong_chat_template_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    path = tmp_path / "chat.jinja"
    gone = refused(EMBEDDED, capsys, chat_template=str(path))
    assert gone == f"chat_template {path} cannot be read: No such file or directory"
    path.write_text(text)
    said = refused(EMBEDDED, capsys, chat_template=str(path))
    assert said.startswith(f"chat_template {path}: ")
    assert says in said


def test_a_given_chat_template_comes_before_the_checkpoint_s(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    settings = resolve({"chat_template": str(path)}, environment={}).settings
    style = style_of(EMBEDDED, Tokenizer(EMBEDDED), template=chat_template(settings))
    assert isinstance(style, TemplateStyle)
    asked = Conversation([Message(role="user", content="Hi")], thinking=False)
    assert style.encode(asked) == "<user>Hi"
    style.close()
