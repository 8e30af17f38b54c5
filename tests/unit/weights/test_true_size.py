"""The true DeepSeek-V3.2, 689 GB in 163 shards, as sparse files: true headers over holes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.models.registry import read_config as parse_config
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.expected.dry_run import read_config
from ess.models.weights.expected.shapes import Spec, expected_tensors, scale_shape
from ess.models.weights.expected.split import Split
from ess.models.weights.files.header import DTYPE_BYTES
from ess.models.weights.rank import RankWeights

SHARDS = 163


def stored_form(spec: Spec) -> list[tuple[str, str, tuple[int, ...]]]:
    if spec.role == "linear":
        scale = (spec.scale_name, "F32", scale_shape(spec.shape))
        return [(spec.name, "F8_E4M3", spec.shape), scale]
    return [(spec.name, "BF16" if spec.role == "table" else "F32", spec.shape)]


def write_holes(folder: Path) -> int:
    """All shards and the index; returns the bytes of all tensors."""
    config = read_config("deepseek-v3.2")
    (folder / "config.json").write_text(json.dumps(config))
    tensors = [t for spec in expected_tensors(parse_config(config)) for t in stored_form(spec)]
    placed: dict[str, str] = {}
    total = 0
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        header, at = {}, 0
        for name, dtype, shape in tensors[shard::SHARDS]:
            size = DTYPE_BYTES[dtype]
            for side in shape:
                size *= side
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            placed[name] = file
            at += size
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(raw).to_bytes(8, "little") + raw)
            out.truncate(8 + len(raw) + at)
        total += at
    index = {"metadata": {"total_size": 1_370_793_842_752}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


@pytest.mark.slow
def test_the_true_checkpoint_opens(tmp_path: Path) -> None:
    try:
        total = write_holes(tmp_path)
    except OSError as error:
        pytest.skip(f"this file system has no room for sparse files: {error}")
    assert total == 689_471_107_200
    with Checkpoint(tmp_path) as checkpoint:
        weights = RankWeights(checkpoint, split=Split(ep=32, ep_rank=31), form="stored")
        assert weights.tensor("model.layers.61.eh_proj.weight").shape == (7168, 14336)
        last = "model.layers.60.mlp.experts.255.up_proj.weight"
        assert weights.tensor(last).nbytes == 2048 * 7168
        with pytest.raises(BadInput, match=r"the scale 0\.0 at block \[0, 0\]"):
            weights.scale(last)
        with pytest.raises(BadInput, match="cut a 128-wide quantisation block"):
            RankWeights(checkpoint, split=Split(tp=128))
