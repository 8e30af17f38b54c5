"""Locality: what is recorded is what the model selects; known traces give known numbers."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from ess.bench.harness.output import plots
from ess.bench.locality import on_text
from ess.bench.locality.analysis import Locality, analyse, slots_for
from ess.bench.locality.on_text import TextRecording
from ess.bench.locality.record_trace import record
from ess.bench.prediction.sim_vs_engine import twin_row
from ess.bench.worker.drawn import QUERIES, Drawn
from ess.errors import BadInput, Unavailable
from ess.kernels.backend import ops
from ess.kernels.calls import Backend
from ess.kernels.ops import Ops
from ess.layout import IndexCodec
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceWriter
from tests.unit.bench.test_bench_step import build, ids

KEYS = 16


def test_recorded_selections_are_ascending_positions_of_the_past(tmp_path: Path) -> None:
    prefix = build(320, distinct=1)
    record(tmp_path / "a", prefix, ids(), query_count=64, mtp=2)
    with TraceReader(tmp_path / "a") as reader:
        assert len(reader) == 32
        assert reader.header.context == 384
        for number, step in enumerate(reader):
            [one] = step.requests
            assert one.length == 320 + 2 * number
            for group in range(reader.header.group_count):
                for query, picked in enumerate(step.selection(group)):
                    assert len(np.unique(picked)) == 256
                    assert (np.diff(picked) > 0).all()
                    assert picked[-1] <= one.length + query
        others = [step.selection(2).copy() for step in reader]
    record(tmp_path / "b", build(352, distinct=1), ids(), query_count=32, mtp=1)
    with TraceReader(tmp_path / "b") as reader:
        later = np.concatenate([step.selection(2) for step in reader])
    same = [
        len(np.intersect1d(a, b)) for a, b in zip(later, np.concatenate(others)[32:], strict=True)
    ]
    assert np.mean(same) > 0.8 * 256, "the same words behind the same words select the same rows"
    with pytest.raises(BadInput, match="multiples of 32"):
        record(tmp_path / "c", prefix, ids(), query_count=40, mtp=2)
    with pytest.raises(BadInput, match="are read"):
        record(tmp_path / "c", prefix, ids()[:330], query_count=64, mtp=2)


def write(path: Path, selections: list[list[list[int]]], context: int) -> None:
    """selections[step][group] of one query."""
    groups = len(selections[0])
    header = TraceHeader(layout="known", group_count=groups, top_k=KEYS, mtp=1, context=context)
    with TraceWriter(path, header=header) as writer:
        for number, step in enumerate(selections):
            for group, picked in enumerate(step):
                writer.write_group(group, np.array([picked], np.int32))
            one = RequestStep(request=0, length=context - 100 + number, query_count=1, accepted=1)
            writer.commit_step(number, [one])


def test_numbers_of_a_trace_that_is_known(tmp_path: Path) -> None:
    """Group 0 picks the same rows for ever; group 1 shifts by half of them at every step."""
    still = list(range(KEYS))
    moving = [[still, [8 * step + key for key in range(KEYS)]] for step in range(60)]
    write(tmp_path / "known", moving, context=700)
    with TraceReader(tmp_path / "known") as reader:
        locality = analyse(reader, context=600, ratios=[0.2, 1.0])
    assert locality.within == [1.0, 0.5]
    assert locality.between[0] < 0.1
    assert locality.lru[0] == [0.0, 8.0], "warmed by 32 windows: only what is new is missed"
    assert locality.least[0] == [0.0, 8.0]
    assert locality.cold[0] == 16.0
    assert locality.warm[0] == 4.0
    assert slots_for(0.2, 600) == 64


def test_the_benchmark_has_its_rows() -> None:
    plan = TextRecording(context=320, queries=64, ratios=(0.5,), segment=320, steps=2)
    rows = {row.name: row for row in on_text.rows_of(plan, folder=None)}
    least = rows["misses per layer and step at ratio 0.5, LRU"]
    assert least.baseline_value is not None
    assert least.value >= least.baseline_value > 0
    assert 0 < rows["similarity to the token before (intra-layer)"].value < 1
    assert rows["tokens accepted per step, greedy"].value >= 1


def test_the_laboratory_misses_what_the_engine_misses() -> None:
    row = twin_row(build(704, distinct=1), ratio=0.83, mtp=2, steps=12)
    assert row.met
    assert row.value == row.baseline_value
    assert row.value > 50
    pairs = [pair.split("/") for pair in row.config["by_layer"].split()]
    assert len(pairs) == 7
    assert all(ours == theirs for ours, theirs in pairs)
    with pytest.raises(BadInput, match="less than a step selects"):
        twin_row(build(320, distinct=1), ratio=0.2, mtp=2, steps=2)


def test_plots_are_drawn_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locality = Locality(
        context=100,
        mtp=2,
        top_k=8,
        ratios=[0.1, 0.2],
        within=[0.5, 0.4, 0.3],
        between=[0.2, 0.1],
        lru=[[3, 2, 1], [2, 1, 1]],
        least=[[2, 1, 1], [1, 1, 0]],
        warm=[3, 2],
        cold=[8, 2],
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install 'ess\[plot\]'"):
        plots.check_folder(tmp_path)
    monkeypatch.undo()
    pytest.importorskip("matplotlib", reason="the plots need the extra ess[plot]")
    plots.draw_locality(locality, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("misses-by-layer.png", "hit-ratio.png", "warm-up.png", "similarity.png")
    }


def test_drawn_selections_take_the_place_of_scored_ones_too() -> None:
    """Their logits are the greatest, or eviction by score would follow random weights."""
    draws, codec = torch.Generator().manual_seed(0), IndexCodec(form="f32", key_dim=8, head_count=2)
    keys = torch.randn(3 * 64, 8, generator=draws)
    pages = keys.view(torch.uint8).view(3, codec.page_bytes)
    lengths = torch.tensor([0, 40, 130, 192], dtype=torch.int32)
    of_each = [torch.randperm(192, generator=draws)[:16].sort().values for _ in range(QUERIES)]
    drawn = torch.stack(of_each).int()
    kernels = ops("cpu")
    backend = cast(Backend, Drawn(kernels.backend, {pages.data_ptr(): drawn}))
    ours = Ops(kernels.name, backend)
    call = (
        *(torch.randn(4, 2, 8, generator=draws), torch.randn(4, 2, generator=draws), pages),
        *(torch.arange(3, dtype=torch.int32).expand(4, 3), lengths, codec),
    )
    wanted = drawn[lengths.remainder(QUERIES).long()]
    wanted = wanted.where(wanted < lengths[:, None], torch.tensor(-1, dtype=torch.int32))
    assert torch.equal(ours.index_top_k(*call, k=16), wanted)
    chosen, logits = ours.index_scored(*call, k=16)
    assert torch.equal(chosen, wanted)
    for query, count in enumerate(lengths.tolist()):
        seen = set(wanted[query].tolist()) - {-1}
        assert set(logits[query, :count].topk(len(seen)).indices.tolist()) == seen
