"""The table of shapes, the cut of small batches, and the sweep that judges them, all made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ess.kernels.ops import Ops
from tests.kernels.sets import SETS, op_set
from tests.kernels.test_triton_ops import device

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(params=SETS[2:])
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_every_count_of_heads_has_a_shape(form: Any) -> None:
    from ess.kernels.cuda.triton.shapes import candidates

    for heads in (1, 16, 17, 32, 33, 64, 128):
        for generation, most in ((9, 64), (10, 32)):
            found = candidates(form=form, heads=heads, is_half=True, generation=generation)
            assert found[0].heads >= min(heads, most)
            assert len({shape.name for shape in found}) == len(found) > 1
        [little] = candidates(form=form, heads=heads, is_half=True, generation=8, has_little=True)
        assert little.heads == (16 if heads <= 16 else 32)
    [exact] = candidates(form=form, heads=128, is_half=False, generation=9)
    assert exact.name == "exact"


def timed(work: Callable[[], Any]) -> list[float]:
    work()
    return [1.0]


def test_the_sweep_runs_and_judges(ops: Ops) -> None:
    from ess.bench.gpu.shapes import Point, attention_rows, logits_rows, top_k_rows

    point = Point(batch=1, mtp=1, heads=4, form="fp8", k=200, slab_rows=64)
    rows = list(attention_rows(point, timed, device=device()))
    assert rows[-1]["name"] == "attention in use: narrow, even shares"
    assert len(rows) == 7
    assert rows[-1]["met"]
    assert [row["met"] for row in top_k_rows(1, 600, timed, device=device(), k=5)][-1]
    *_, last = logits_rows(1, 2, 64, timed, device=device())
    assert last["value"] == 1 or device() == "cpu"


def test_what_falls_behind_names_what_does_not() -> None:
    from ess.bench.gpu.shapes import verdict

    *_, last = verdict("x", {"used": [10.0], "other": [9.0]}, {})
    assert last["met"] is False
    assert last["baseline"] == "best: other"
