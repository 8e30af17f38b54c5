"""Checkpoints from strangers: each lie is refused by a sentence that names file and tensor."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ess.errors import BadInput
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.files.header import Entry, renamed
from ess.models.weights.rank import RankWeights
from tests.support.own_python import python

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NAME = "model.layers.1.self_attn.q_b_proj.weight"
Written = tuple[Path, dict[str, torch.Tensor]]
Lie = Callable[[Any], object]


@pytest.fixture
def copy(written: Written, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    shutil.copytree(written[0], folder)
    return folder


def load(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        for _ in RankWeights(checkpoint).stream():
            pass


def refused(folder: Path, *parts: str) -> None:
    with pytest.raises(BadInput) as caught:
        load(folder)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def edit(path: Path, lie: Lie) -> None:
    document = json.loads(path.read_text())
    lie(document)
    path.write_text(json.dumps(document))


def edit_header(path: Path, lie: Lie, *, dumps: Callable[[Any], str] = json.dumps) -> None:
    raw = path.read_bytes()
    count = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + count])
    lie(header)
    text = dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + count :])


@pytest.mark.parametrize(
    ("claim", "says"),
    [(0, "not readable JSON"), (10**9, "claims a header"), (2**64 - 1, "claims a header")],
)
def test_the_header_lies_about_its_size(copy: Path, claim: int, says: str) -> None:
    raw = (copy / FIRST).read_bytes()
    (copy / FIRST).write_bytes(claim.to_bytes(8, "little") + raw[8:])
    refused(copy, FIRST, says)


def test_a_huge_header_is_not_read(copy: Path) -> None:
    with (copy / FIRST).open("r+b") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate((1 << 40) + 4096)
    refused(copy, FIRST, "the bound is")


def _set(name: str, key: str, value: object) -> Lie:
    return lambda header: header[name].update({key: value})


def _shift(header: Any) -> None:
    begin, end = header["lm_head.weight"]["data_offsets"]
    header["lm_head.weight"]["data_offsets"] = [begin - 64, end - 64]


@pytest.mark.parametrize(
    ("lie", "says"),
    [
        (_set("lm_head.weight", "dtype", "F32"), "needs 98,304 bytes"),
        (_set("lm_head.weight", "dtype", "F4"), "unknown dtype 'F4'"),
        (_set("lm_head.weight", "dtype", 7), "unknown dtype '7'"),
        (_set("lm_head.weight", "shape", [96, 257]), "needs 49,344 bytes"),
        (_set("lm_head.weight", "shape", [96, 255]), "needs 48,960 bytes"),
        (_set("lm_head.weight", "shape", [-96, -256]), "not a whole number"),
        (_set("lm_head.weight", "shape", [96.0, 256]), "not a whole number"),
        (_set("lm_head.weight", "shape", [True, 24576]), "not a whole number"),
        (_set("lm_head.weight", "shape", [2**63, 2]), "not a whole number"),
        (_set("lm_head.weight", "shape", "96"), "not a list"),
        (_set("lm_head.weight", "shape", [1] * 9), "9 dimensions"),
        (_set("lm_head.weight", "data_offsets", [10**12, 10**12 + 49152]), "begins 49,152"),
        (_set("lm_head.weight", "extra", 1), "not described by"),
        (_shift, "overlaps the tensor before it by 64 bytes"),
        (lambda header: header.update({"lm_head.weight": []}), "not described by"),
    ],
)
def test_the_header_lies_about_a_tensor(copy: Path, lie: Lie, says: str) -> None:
    edit_header(copy / FIRST, lie)
    tiling = says.startswith(("begins", "overlaps"))
    refused(copy, FIRST, "tensor" if tiling else "'lm_head.weight'", says)


def test_a_name_twice(copy: Path) -> None:
    def twice(header: Any) -> str:
        entry = json.dumps(header["lm_head.weight"])
        return json.dumps(header)[:-1] + f', "lm_head.weight": {entry}}}'

    edit_header(copy / FIRST, lambda header: None, dumps=twice)
    refused(copy, FIRST, "'lm_head.weight' appears twice")


def test_two_names_that_are_read_as_one():
    entries = {
        name: Entry(file="f", name=name, dtype="U8", shape=(1,), begin=8, end=9) for name in "ab"
    }
    assert renamed(entries, (("a", "c"),)).keys() == {*"bc"}
    with pytest.raises(BadInput, match="f: tensor 'b' and f: tensor 'a' are both read as 'b'"):
        renamed(entries, (("a", "b"),))


def test_tensors_that_are_not_aligned(copy: Path, written: Written) -> None:
    """Legal, if unkind: such tensors are copied instead of viewed."""
    for odd in (0, 1, 3):
        pad = " " * odd
        edit_header(copy / FIRST, lambda header: None, dumps=lambda h, pad=pad: json.dumps(h) + pad)
        with Checkpoint(copy) as checkpoint:
            for name in ("lm_head.weight", NAME, "model.layers.0.input_layernorm.weight"):
                got, want = checkpoint.stored(name), written[1][name]
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_bytes_that_belong_to_nobody(copy: Path) -> None:
    with (copy / SECOND).open("ab") as file:
        file.write(b"tail")
    refused(copy, SECOND, "4 bytes that belong to no tensor")


def test_a_truncated_file(copy: Path) -> None:
    os.truncate(copy / SECOND, (copy / SECOND).stat().st_size - 1)
    refused(copy, SECOND, "is cut short: it has")


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 200_000, '{"a":' * 50_000, '{"a": NaN}', "[]", "", "\xff"),
        *('{"model_type": "\\ud800"}', '{"weight_map": {"\\uDC00": "a"}}'),
    ],
)
def test_json_that_is_none(copy: Path, text: str) -> None:
    for name in ("config.json", INDEX):
        kept = (copy / name).read_bytes()
        (copy / name).write_bytes(text.encode("latin-1"))
        refused(copy, name)
        (copy / name).write_bytes(kept)


def test_json_that_would_grow(copy: Path) -> None:
    (copy / "config.json").write_text('{"a": [' + "0," * 3_000_000 + "0]}")
    refused(copy, "config.json", "more than 2,000,000 JSON values")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("../secret.safetensors", "is a path"),
        ("/etc/passwd", "is a path"),
        ("a/b.safetensors", "is a path"),
        ("..", "is a path"),
        ("x\0.safetensors", "is a path"),
        ("", "not a file name"),
        (["a"], "not a file name"),
        ("y" * 300 + ".safetensors", "not a file name"),
        ("model.bin", "pickled weights"),
        ("model.pt", "pickled weights"),
        ("model.npz", "only .safetensors"),
        ("absent.safetensors", "names 3 files; missing: 1, first 'absent.safetensors'"),
    ],
)
def test_the_index_points_elsewhere(copy: Path, file: object, says: str) -> None:
    edit(copy / INDEX, lambda index: index["weight_map"].update({NAME: file}))
    refused(copy, INDEX, says)


@pytest.mark.parametrize("inside", [False, True])
def test_a_link_is_not_followed(copy: Path, tmp_path: Path, inside: bool) -> None:
    home = copy if inside else tmp_path
    (copy / FIRST).rename(home / "elsewhere.safetensors")
    (copy / FIRST).symlink_to(home / "elsewhere.safetensors")
    refused(copy, FIRST, "is a symbolic link")


def test_a_hub_cache_is_read(copy: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "rev", tmp_path / "hub" / "blobs"
    shutil.move(copy, snapshot)
    blobs.mkdir()
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"b{number}")
        path.symlink_to(f"../../blobs/b{number}")
    with Checkpoint(snapshot) as checkpoint:
        assert checkpoint.stored(NAME).shape == (512, 128)
    (blobs / "b0").unlink()
    (blobs / "b0").symlink_to("/etc/passwd")
    with pytest.raises(BadInput, match=re.escape("cannot be opened")):
        Checkpoint(snapshot)


def test_a_pipe_does_not_hang(copy: Path) -> None:
    (copy / FIRST).unlink()
    os.mkfifo(copy / FIRST)
    refused(copy, FIRST, "not a regular file")


def test_index_and_files_disagree(copy: Path) -> None:
    edit(copy / INDEX, lambda index: index["weight_map"].pop(NAME))
    refused(copy, NAME, "is not placed in this file")
    edit(copy / INDEX, lambda index: index["weight_map"].update({NAME: FIRST, "ghost": SECOND}))
    refused(copy, INDEX, "'ghost'", "not there")
    edit(copy / INDEX, lambda index: index.update(weight_map={}))
    refused(copy, "no weight_map")


def test_pickle_alone_is_refused(copy: Path) -> None:
    for path in copy.glob("*.safetensors*"):
        path.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(copy, "pytorch_model.bin", "can run code")
    (copy / "pytorch_model.bin").unlink()
    refused(copy, "neither")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (NAME, None, "lacks tensor"),
        (NAME + "_scale_inv", None, "lacks tensor"),
        ("model.layers.1.stranger.weight", torch.zeros(2), "not in the shape formula"),
        (NAME, torch.zeros(512, 127).bfloat16(), "the configuration says [512, 128]"),
        (NAME, torch.zeros(512, 128).long(), "is I64"),
        ("lm_head.weight", torch.zeros(96, 256).to(torch.float8_e4m3fn), "is F8_E4M3"),
        (NAME + "_scale_inv", torch.ones(4, 2), "has [4, 1] blocks"),
        (NAME + "_scale_inv", torch.ones(4, 1).bfloat16(), "is BF16"),
        (NAME + "_scale_inv", torch.full((4, 1), torch.nan), "the scale nan at block [0, 0]"),
        (NAME + "_scale_inv", torch.tensor([[1.0], [0.0], [1.0], [1.0]]), "block [1, 0]"),
        (NAME + "_scale_inv", torch.tensor([[1.0], [1.0], [-2.0], [1.0]]), "the scale -2.0"),
        (NAME + "_scale_inv", torch.full((4, 1), torch.inf), "(4 such blocks)"),
        (NAME + "_scale_inv", torch.full((4, 1), 255, dtype=torch.uint8), "the scale nan"),
        ("model.layers.1.mlp.up_proj.weight_packed", torch.zeros(2), "compressed-tensors"),
    ],
)
def test_a_wrong_tensor(
    written: Written, copy: Path, name: str, value: torch.Tensor | None, says: str
) -> None:
    tensors = dict(written[1])
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    for path in copy.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, copy / "model.safetensors")
    refused(copy, name, says)


def test_many_missing_are_counted(written: Written, copy: Path) -> None:
    for path in copy.glob("*.safetensors*"):
        path.unlink()
    kept = {name: t for name, t in written[1].items() if "layers.3." not in name}
    save_file(kept, copy / "model.safetensors")
    refused(copy, "lacks 35 tensors:", "layers.3.", "and 31 more")
    with Checkpoint(copy, mtp=False) as checkpoint:
        assert NAME in checkpoint.specs


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("auto_map", {"AutoModel": "evil.Model"}, "runs code from the checkpoint"),
        ("model_type", "mamba", "not supported"),
        ("model_type", None, "not supported"),
        ("hidden_size", 10**30, "hidden_size"),
        ("hidden_size", "256", "Expected `int`"),
        ("hidden_size", True, "Expected `int`"),
        ("hidden_size", None, "missing required field `hidden_size`"),
        ("num_hidden_layers", -1, ">= 1"),
        ("num_hidden_layers", 10**9, "<= 4096"),
        ("n_routed_experts", 8, "the configuration says"),
        ("n_routed_experts", 513, "<= 512"),
        ("num_nextn_predict_layers", 0, "not in the shape formula"),
        ("num_nextn_predict_layers", 17, "<= 1"),
        ("moe_layer_freq", 2, "moe_layer_freq"),
        ("attention_bias", True, "attention_bias true is not supported"),
        ("mlp_layer_types", ["dense"], "1 entries for 3 layers"),
        ("mlp_layer_types", ["dense", "sparse", "odd"], "'odd'"),
        ("indexer_types", ["shared", "full", "full"], "layer 0 must have an indexer"),
        ("index_topk_pattern", "FSX", "'X'"),
        ("index_topk_freq", 0, ">= 1"),
        ("quantization_config", 3, "not an object"),
        ("quantization_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ("quantization_config", {"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        (
            "quantization_config",
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            "[64, 64]",
        ),
    ],
)
def test_a_wrong_configuration(copy: Path, key: str, value: object, says: str) -> None:
    edit(copy / "config.json", lambda config: config.update({key: value}))
    refused(copy, says)


def test_layers_times_experts_are_bounded(copy: Path) -> None:
    edit(
        copy / "config.json",
        lambda config: config.update(num_hidden_layers=1024, n_routed_experts=512),
    )
    refused(copy, "config.json asks for", "tensors; the bound is")


def campaign(case_count: int, seed: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("damage.py")
    done = python(script, case_count, seed, tmp_path, timeout_s=240)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{case_count} cases" in done.stdout


def test_100_damaged_checkpoints(tmp_path: Path) -> None:
    campaign(100, 1, tmp_path)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 22))
def test_10_000_damaged_checkpoints(seed: int, tmp_path: Path) -> None:
    """In parts, each of which takes less than the limit of a test on a busy machine too."""
    campaign(500, seed, tmp_path)
