"""What the policy chooses on a device that was measured: one H100, a layer of DeepSeek-V3.2.

The rows of bench/results/gpu-h100.json that a step's counters would bring (misses, the link's rate,
times of stages) go in; the rows of NONE, DA and DBA, which no step can compare, judge the choice.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ess.cost import exposed
from ess.engine.step.tuning import Tuning
from ess.layout import ModelLayout
from ess.overlap import policy
from ess.overlap.policy import PATIENCE, Mode, Observation
from tests.support.manual_clock import ManualClock

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ROOT / "bench" / "results" / "gpu-h100.json"
LAYOUT = ModelLayout(name="v3.2", layer_count=1, groups=((0,),), top_k=2048, head_count=128)
MODES = (Mode.NONE, Mode.DA, Mode.DBA)
LOSES_MAX = 1.03


def points() -> list[tuple[dict[str, Any], dict[str, float]]]:
    """The 30 batches that were measured: what each is, and its rows."""
    measured: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    for row in json.loads(MEASURED.read_text())["rows"]:
        if row["name"].startswith("layer: "):
            measured[tuple(sorted(row["config"].items()))][row["name"][7:]] = row["value"]
    return [(dict(key), rows) for key, rows in measured.items()]


def chosen(point: dict[str, Any], rows: dict[str, float], began: Mode) -> Mode:
    """After as many observations as a change takes, of a device's own tuning."""
    offload: Any = SimpleNamespace(layout=LAYOUT, clock=ManualClock(), stopwatch=None)
    tuning, queries = Tuning(offload, "layerwise", asks_first=True), point["batch"] * point["mtp"]
    times = {"pre_attn": 0.0, "attend_all": rows["attend all"]}
    times["select"] = rows["resident"] - rows["attend all"]
    for stage, us in times.items():
        tuning.timeline.took(stage, 1, round(1e3 * us))
    seen = Observation(
        misses=(point["misses"],),
        request_count=point["batch"],
        bytes_per_us=1e3 * rows["copy rate"],
        hiding=tuning._windows(queries, min(1.0, point["misses"] / point["mtp"] / LAYOUT.top_k)),
    )
    assert seen.hiding is not None
    state = policy.start(
        misses=seen.misses,
        request_count=seen.request_count,
        row_bytes=LAYOUT.row_bytes,
        bytes_per_us=1e3 * rows["copy rate"],
        hiding=seen.hiding,
    )
    state = dataclasses.replace(state, vector=(began,))
    for _ in range(PATIENCE):
        state = policy.advance(state, seen)
    return state.vector[0]


@pytest.mark.parametrize("began", MODES)
def test_it_chooses_what_was_as_good_as_the_fastest(began: Mode) -> None:
    everything = points()
    assert len(everything) == 30
    for point, rows in everything:
        taken = {mode: rows[mode.name.lower()] for mode in MODES}
        mode = chosen(point, rows, began)
        assert taken[mode] <= LOSES_MAX * min(taken.values()), (point, mode.name, taken)
        if point["batch"] == 1:
            assert mode is Mode.NONE, point
        if taken[Mode.NONE] > 1.05 * taken[Mode.DA]:
            assert mode is Mode.DA, (point, taken)


def test_the_counts_that_hold_this_are_not_all_alike() -> None:
    """Both modes are right somewhere, so a policy with one answer fails."""
    right = {min(MODES, key=lambda mode: rows[mode.name.lower()]) for _, rows in points()}
    assert right == {Mode.NONE, Mode.DA}


@pytest.mark.parametrize(("on_device", "ahead_us"), [(True, 30.0), (False, 0.0)])
def test_a_device_fetches_beside_pre_attention_in_front_of_whole_lists(
    on_device: bool, ahead_us: float
) -> None:
    """So a fetch that is no longer shows nothing there, and no split can pay."""
    offload: Any = SimpleNamespace(layout=LAYOUT, clock=ManualClock(), stopwatch=None)
    tuning = Tuning(offload, "layerwise", asks_first=on_device)
    for stage, us in (("pre_attn", 30), ("attend_all", 900), ("select", 500)):
        tuning.timeline.took(stage, 1, 1000 * us)
    hiding = tuning._windows(16, 0.05)
    assert hiding is not None
    assert hiding.ahead_us == ahead_us
    shown = exposed(29.0, hiding)
    assert shown.none == max(0.0, 29.0 - ahead_us)
    assert shown.da == hiding.da_cost_us
    assert shown.dba >= shown.da
