"""`ess-bench step`: what it decodes behind, what it compares with, and that all ways agree."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from ess.bench import cli
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.engine.step import RESIDENT, WHOLE, take_turns
from ess.bench.harness import prefix as prefixes
from ess.bench.harness.lists import modes, policies, shares, size, sizes
from ess.bench.harness.prefix import Prefix, build_prefix
from ess.bench.harness.text import token_ids
from ess.errors import BadInput
from ess.kernels.backend import ops
from ess.models.layers import Rotation
from ess.models.load import load_model
from ess.models.model import Model

SEGMENT = 192


@functools.cache
def model() -> Model:
    return load_model()


@functools.cache
def ids() -> list[int]:
    return token_ids()[0]


def build(length: int, *, distinct: int = SEGMENT, folder: Path | None = None) -> Prefix:
    layout = model().config.layout(name="ess-embedded")
    return build_prefix(
        model(),
        layout,
        ids(),
        length=length,
        text="the reference",
        segment=SEGMENT,
        distinct=distinct,
        folder=folder,
    )


class Moved(Model):
    """The same model, for a text that begins later."""

    def __init__(self, model: Model, start: int) -> None:
        self.__dict__.update(model.__dict__)
        self._start = start

    def rotation(self, positions: torch.Tensor) -> Rotation:
        return super().rotation(positions + self._start)


def test_a_moved_segment_is_what_the_model_makes_there() -> None:
    prefix = build(2 * SEGMENT)
    layout = prefix.layout
    there = prefixes._make(Moved(model(), SEGMENT), layout, ids()[: SEGMENT + 1])
    rows, keys = prefix.rows(0, 2 * SEGMENT)[SEGMENT:], prefix.keys(0, 2 * SEGMENT)[SEGMENT:]
    codec = layout.row
    split = codec.row_bytes - 2 * codec.rope_dim
    assert torch.equal(rows[:, :split], there.rows[0][:, :split]), "the latent part moved"
    turned, expected = (
        part[:, split:].contiguous().view(torch.bfloat16).float() for part in (rows, there.rows[0])
    )
    unmoved = prefix.rows(0, SEGMENT)[:, split:].contiguous().view(torch.bfloat16).float()
    assert (turned - expected).abs().max() < 2**-6 * expected.abs().max()
    assert (unmoved - expected).abs().max() > 0.3 * expected.abs().max()
    assert _cosine(keys, there.keys[0]) > 0.995
    assert _cosine(prefix.keys(0, SEGMENT), there.keys[0]) < 0.9


def _cosine(keys: torch.Tensor, others: torch.Tensor) -> float:
    values = [k[:, :128].contiguous().view(torch.float8_e4m3fn).float() for k in (keys, others)]
    plain = [ops("cpu").hadamard(each) for each in values]
    return float(torch.nn.functional.cosine_similarity(*plain).mean())


def test_a_prefix_says_its_shortcut_and_repeats_its_segments() -> None:
    assert "prefilled whole" in build(SEGMENT).shortcut
    two = build(4 * SEGMENT, distinct=2 * SEGMENT)
    assert "2 segments of 192" in two.shortcut
    assert "laid 2.0 times" in two.shortcut
    assert two.tokens(4 * SEGMENT) == ids()[: 2 * SEGMENT] * 2
    with pytest.raises(BadInput, match=r"has 131.* tokens, the prefix needs"):
        build(1 << 20, distinct=1 << 20)


def test_snapshots_are_read_again_and_damaged_ones_are_made_again(tmp_path: Path) -> None:
    first = build(SEGMENT, folder=tmp_path)
    [path] = tmp_path.iterdir()
    again = build(SEGMENT, folder=tmp_path)
    assert again.seconds < first.seconds
    path.write_bytes(path.read_bytes()[:-1000])
    mended = build(SEGMENT, folder=tmp_path)
    for layer in range(first.layout.layer_total):
        assert torch.equal(first.rows(layer, SEGMENT), again.rows(layer, SEGMENT))
        assert torch.equal(first.rows(layer, SEGMENT), mended.rows(layer, SEGMENT))
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_all_ways_write_the_same_text_and_the_counts_add_up() -> None:
    prefix = build(2 * SEGMENT)
    shape = DecodeWork(context=2 * SEGMENT, batch=2, mtp=2, steps=8)
    arms = [
        DecodeArm(prefix, shape, way)
        for way in (WHOLE, RESIDENT, DecodeWay(name="none", mode="none", ratio=0.2))
    ]
    take_turns(arms, 8)
    for arm in arms:
        assert arm.outputs == arms[0].outputs, arm.way.name
        assert len(arm.taken.seconds) == len(arm.taken.misses) == 5
        assert min(arm.taken.tokens) >= shape.batch
    assert sum(missed.sum() for missed in arms[1].taken.misses) == 0
    assert sum(missed.sum() for missed in arms[2].taken.misses) > 0
    assert arms[0].offload.stats().fetched_bytes.sum() == 0
    assert {len(each.prompt) for each in arms[0].requests} == {385, 321}
    for arm in arms:
        arm.offload.check()
        arm.close()


def test_lists_and_ranges() -> None:
    assert sizes("--batch", "1-16*2,3") == [1, 2, 4, 8, 16, 3]
    assert shares("--ratio", "0.1,0.2,0.1") == [0.1, 0.2]
    assert size("--ctx", "4k") == 4096
    assert modes("--mode", "none, da") == ["none", "da"]
    with pytest.raises(BadInput, match="--mode fast: choose from layerwise"):
        modes("--mode", "none,fast")
    assert policies("--evict", "score,lru") == ["lru", "score"]
    with pytest.raises(BadInput, match="--evict fifo: choose from lru, sieve, score"):
        policies("--evict", "fifo")
    with pytest.raises(BadInput, match="--ctx 4k,8k: one value, not 2"):
        size("--ctx", "4k,8k")
    for bad in ("0", "4-8*1", "1-99999", "x", "1,,2"):
        with pytest.raises(BadInput):
            sizes("--batch", bad)
    for bad in ("0", "1.5", "much"):
        with pytest.raises(BadInput):
            shares("--ratio", bad)


def test_the_command_runs_small(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ("--ctx", "256", "--batch", "1", "--steps", "3", "--evict", "lru,sieve", "--json")
    assert cli.main(["step", *small, "--snapshots", str(tmp_path)]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    named = {row["name"]: row for row in rows}
    assert named["decode, LAYERWISE at 0.2"]["baseline"] == "no offload"
    assert named["decode, LAYERWISE at 0.2"]["config"]["ctx"] == 256
    assert named["decode, LAYERWISE at 0.2, sieve"]["config"]["same_text"] == "1/1"
    assert named["decode, RESIDENT"]["target"] == 0.99
    assert len(named["decode, RESIDENT"]["samples"]) == 3
    assert cli.main(["step", "--batch", "0"]) == 2
    assert "--batch 0: every value must be 1 or more" in capsys.readouterr().err


def test_a_grid_of_steps_is_predicted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["own-grid", "--smoke", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    steps = [row for row in rows if row["baseline"] == "measured"]
    assert [(row["config"]["batch"], row["config"]["chunk"]) for row in steps] == [
        (1, 0),
        (2, 0),
        (1, 64),
    ]
    assert all(row["config"]["ctx"] == 704 and row["config"]["mtp"] == 2 for row in steps)
    assert steps[-1]["baseline_value"] > steps[0]["baseline_value"], "a chunk makes a step longer"
    off = sorted(abs(row["value"] / row["baseline_value"] - 1) * 100 for row in steps)
    assert max(row["value"] for row in rows if "error of" in row["name"]) == pytest.approx(off[-1])
