"""Same tokens: every pair of settings meets in some case, and what must be bitwise is bitwise."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from ess.bench.engine.precision import forced_logits
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.flashtrans import InlineLane, WorkerLane
from ess.kernels.streams import Lane
from ess.models.load import EMBEDDED, load_model
from ess.models.model import Model
from ess.models.plain import Plain
from tests.families import test_covered
from tests.model import grid
from tests.support.few import few
from tests.support.pairwise import all_pairs, pairs_of, pairwise

CASES = pairwise(grid.FACTORS)
TRAINED = [case for case in CASES if case["checkpoint"] == "embedded"]
"""All settings of the model in the box. Two settings, and a setting and a random model, meet in
`tests/families/test_covered.py`."""


def test_every_pair_of_settings_meets():
    met = set().union(*(pairs_of(case) for case in CASES))
    assert met == all_pairs(grid.FACTORS)
    assert len(CASES) < 35
    elsewhere = set().union(*map(pairs_of, (*TRAINED, *test_covered.WAYS)))
    assert elsewhere >= met


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", few(TRAINED, all_of=CASES), ids=lambda case: "-".join(case.values())
)
def test_the_tokens_are_those_of_the_plain_model(case):
    assert grid.differences(case) == []


# ---- what is bitwise; what is gated is in test_precision

START, STOP = 260, 300
FORMS = {"f32": ("f32", "f32"), "bf16": ("bf16", "fp8"), "fp8": ("fp8", "fp8")}
AMPLE, TIGHT = 24, 4


def line(shift: int = 0, stop: int = STOP) -> list[int]:
    return grid.text("embedded")[shift : shift + stop]


@functools.cache
def weights(form: str) -> Model:
    return load_model(EMBEDDED, form="f32" if form == "f32" else "bf16")


def engine(form: str, mode: str, chunks: int, lane: Lane, **changes: object) -> Engine:
    row, index = FORMS[form]
    made = weights(form)
    layout = made.config.layout(row=row, index=index, has_mtp=False)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * chunks,
        host_bytes=16 * layout.host_page_bytes,
        length_max=1024,
        slot_floor=64,
        lane=lane,
        poison=True,
    )
    return Engine(made, offload, EngineConfig(modes=mode, **changes))


def logits(
    form: str,
    mode: str,
    chunks: int,
    *,
    lane: Lane | None = None,
    shifts: tuple[int, ...] = (0, 40),
    stop: int = STOP,
) -> list[Tensor]:
    eng = engine(form, mode, chunks, lane or InlineLane())
    made = forced_logits(eng, [line(shift, stop) for shift in shifts], start=START)
    missed = int(eng.offload.stats().miss_count.sum() + eng.offload.stats().place_count.sum())
    assert (missed > 0) == (chunks == TIGHT and mode != "resident"), (mode, chunks, missed)
    eng.offload.close()
    return made


@functools.cache
def resident_logits(form: str) -> list[Tensor]:
    return logits(form, "resident", AMPLE)


@pytest.mark.parametrize("form", ["f32", pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
def test_resident_and_none_are_bitwise_equal(form):
    for chunks in (AMPLE, TIGHT):
        for ours, theirs in zip(logits(form, "none", chunks), resident_logits(form), strict=True):
            assert torch.equal(ours, theirs), f"none with {chunks} chunks a group"


@pytest.mark.slow
@pytest.mark.parametrize("stop", [START + 12, pytest.param(STOP, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mode", "lane", "count"),
    [
        ("none", WorkerLane, 10),
        ("da", InlineLane, 3),
        pytest.param("none", WorkerLane, 40, marks=pytest.mark.long),
        pytest.param("da", InlineLane, 20, marks=pytest.mark.long),
    ],
)
def test_repeats_are_bitwise_equal(mode, lane, count, stop):
    """DA attends what has landed first, so its rounding follows the copies' timing; NONE's does
    not. The real lane for the one, often, since its timing differs; for the other a lane without
    timing."""
    first = logits("fp8", mode, TIGHT, lane=lane(), stop=stop)
    for _ in range(count - 1):
        again = logits("fp8", mode, TIGHT, lane=lane(), stop=stop)
        for ours, theirs in zip(again, first, strict=True):
            assert torch.equal(ours, theirs)


def test_the_gate_s_reference_is_exact_in_fp32():
    resident = resident_logits("f32")[0]
    plain = Plain(weights("f32")).run(line()).logits[START:]
    assert (resident - plain).abs().max() < 1e-3
    [offloaded] = logits("f32", "da", TIGHT, shifts=(0,))
    assert (offloaded - plain).abs().max() < 1e-3
