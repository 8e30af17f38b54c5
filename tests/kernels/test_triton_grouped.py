"""What the Triton products of experts have beyond the op: shapes, grids. On a GPU or interpreted.

Small whole numbers make every sum exact, so that equal bits are asked of any shape.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ess.errors import BadInput
from ess.kernels.ops import Ops
from tests.kernels import test_grouped
from tests.kernels.sets import SETS, op_set, reference
from tests.kernels.test_triton_ops import device

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(params=SETS[2:])
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def whole(counts: list[int], weight: torch.dtype) -> test_grouped.Case:
    case = test_grouped.make(counts, torch.bfloat16, weight, width=260, depth=150)
    generator = torch.Generator().manual_seed(1)
    shapes = (sum(counts), 150), case.weights.shape
    numbers = [torch.randint(-4, 5, shape, generator=generator).float() for shape in shapes]
    case.tokens[: sum(counts)] = numbers[0].bfloat16()
    scales = None if case.scales is None else case.scales.mul(4).ceil()
    out = torch.full(case.out.shape, test_grouped.POISON)
    return case._replace(weights=numbers[1].to(weight), scales=scales, out=out)


@pytest.mark.parametrize("weight", [torch.bfloat16, test_grouped.FP8])
def test_every_shape_gives_the_same(ops: Ops, weight: torch.dtype) -> None:
    from ess.kernels.cuda.triton.grouped import CANDIDATES, products_into

    case = whole([0, 3, 70, 0, 16, 1], weight)
    want = case.run(reference).clone()
    there = {
        name: each if each is None else each.to(device()) for name, each in case._asdict().items()
    }
    used = {shape for shapes in CANDIDATES.values() for shape in shapes}
    for shape in sorted(used):
        there["out"] = torch.full(case.out.shape, test_grouped.POISON, device=device())
        assert torch.equal(products_into(**there, shape=shape).cpu(), want), shape.name


def test_bits_do_not_depend_on_the_grid(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    from ess.kernels.cuda.triton.launch import Place

    case = test_grouped.make([2, 0, 30], torch.bfloat16, test_grouped.FP8, width=300)
    want = case.run(ops).clone()
    for programs in (1, 5):
        monkeypatch.setattr(Place, "programs", lambda *_, programs=programs: programs)
        case.out.fill_(test_grouped.POISON)
        assert torch.equal(case.run(ops), want)


def test_the_shape_follows_the_tokens_of_an_expert() -> None:
    from ess.kernels.cuda.triton.grouped import EXACT, candidates

    for count, experts, tokens in ((1, 8, 16), (128, 8, 16), (129, 8, 64), (600, 8, 128)):
        for weight in (torch.bfloat16, test_grouped.FP8):
            used, *others = candidates(count, experts, weight, is_half=True)
            assert used.tokens == tokens
            assert used not in others
    assert candidates(5, 8, torch.float32, is_half=False) == (EXACT,)


def test_weights_with_gaps_are_refused(ops: Ops) -> None:
    case = test_grouped.make([2, 1], torch.float32, torch.float32)
    with pytest.raises(BadInput, match=r"weights with strides \(60000, 400, 2\) has gaps"):
        case._replace(weights=case.weights.repeat_interleave(2, 2)[..., ::2]).run(ops)


def timed(work: Callable[[], object]) -> list[float]:
    work()
    return [1000.0]


def test_the_benchmark_counts_the_weights_of_experts_with_tokens(ops: Ops) -> None:
    from ess.bench.gpu.experts import Point, point_rows, routed

    point = Point(tokens=3, experts=64, width=128, depth=64)
    counts = routed(point)
    assert counts.shape == (64,)
    rows = list(point_rows(point, timed, None, device=torch.device(device())))
    by_name = {(row["name"], row["unit"]): row["value"] for row in rows}
    touched = int((counts > 0).sum()) * 128 * 64
    assert 0 < touched < 64 * 128 * 64
    assert by_name["experts: ours, fp8", "GB/s"] == touched / 1e6
    assert by_name["experts: ours, bf16", "GB/s"] == 2 * touched / 1e6
    assert by_name["experts: torch, bf16", "TFLOP/s"] == 2 * int(counts.sum()) * 128 * 64 / 1e9
    assert [row["met"] for row in rows if row["name"].startswith("experts in use")] == [True]


def test_the_benchmark_measures_others_where_they_take_so_many(ops: Ops) -> None:
    from ess.bench.gpu.experts import SMALL, point_rows

    class Theirs:
        limit = 100

        def expert_products(self, tokens: torch.Tensor, *_: object, **__: object) -> None:
            if len(tokens) > self.limit:
                raise BadInput(f"{len(tokens)} are too many")

    theirs, names = Theirs(), []
    for theirs.limit in (100, 1):
        rows = point_rows(SMALL, timed, theirs, device=torch.device(device()))
        names.append({row["name"] for row in rows})
    assert names[0] - names[1] == {"experts: DeepGEMM, fp8"}
    assert names[1] < names[0]
