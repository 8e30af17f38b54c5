"""The table of shapes, the cut of small batches, and the sweep that judges them, all made small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import IndexCodec, RowCodec
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
            shapes = candidates(form=form, heads=heads, is_half=True, generation=generation)
            assert shapes[0].heads >= min(heads, most)
            assert len({shape.name for shape in shapes}) == len(shapes) > 1
        [little] = candidates(form=form, heads=heads, is_half=True, generation=8, has_little=True)
        assert little.heads == (16 if heads <= 16 else 32)
    [exact] = candidates(form=form, heads=128, is_half=False, generation=9)
    assert exact.name == "exact"


class Launched:
    """In the place of a kernel: the stages that launches ask for."""

    def __init__(self) -> None:
        self.stages: list[int] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, num_stages=1, **more: self.stages.append(num_stages)


@pytest.mark.parametrize(("shared_bytes", "most"), [(227 << 10, 6), (99 << 10, 2)])
def test_launches_ask_for_the_stages_that_fit(
    shared_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ess.kernels.cuda.triton import attend, grouped, index, linear
    from ess.kernels.cuda.triton.launch import Place

    kernels = {"logits": index, "products": grouped, "linear": linear, "attend": attend}
    launched = Launched()
    for name, module in kernels.items():
        monkeypatch.setattr(module, "place", lambda _: Place(132, False, 9, shared_bytes))
        monkeypatch.setattr(module.device, name, launched)
    monkeypatch.setattr(attend.shares, "lay_out", Launched())
    monkeypatch.setattr(linear, "quantise", lambda values: (values, values))
    half, codes = torch.zeros(1, 64, 128, dtype=torch.bfloat16), torch.zeros(1, 128, 128).char()
    ends, rows = torch.ones(1, dtype=torch.int32), torch.zeros(64, 656, dtype=torch.uint8)
    scales, weight = torch.ones(1, 1), codes[0].view(torch.float8_e4m3fn)
    pages = torch.zeros(1, IndexCodec().page_bytes, dtype=torch.uint8)
    index.logits_into(half, half, pages, ends[None], ends, IndexCodec(), out=torch.empty(1, 64))
    grouped.products_into(half[0], ends, half.new_zeros(1, 128, 128), out=half.new_empty(64, 128))
    linear.linear_into(half[0, :1], weight, scales, torch.empty(1, 128))
    into = Partial(torch.empty(1, 16, 512), torch.empty(1, 16))
    asked, lists = half.new_zeros(1, 16, 576), attend.Lists(ends[None], ends)
    attend.attend_lists(asked, rows, lists, RowCodec(), scale=1.0, into=into)
    assert launched.stages == [min(most, stages) for stages in (3, 4, 6, 3)]


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
