"""Products of experts as a decode step and a prompt ask for them: ours, torch's and DeepGEMM's.

DeepSeek-V3.2 has 256 experts a layer, of which a rank holds a few; a uniform router sends each
token to eight of all. Few tokens make the weights' bytes the limit, so a row tells how many of them
went by in a second, those of experts with tokens alone, and another the products. A library that is
not there is left out, and a line on stderr says why.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ess.bench.gpu.rig import Row, rate_row, row
from ess.bench.gpu.shapes import Timed, on_device, once, verdict
from ess.errors import BadInput, Unavailable
from ess.kernels.cuda.adapters import deep_gemm_experts
from ess.kernels.cuda.adapters.deep_gemm_experts import DeepGemmExperts
from ess.kernels.cuda.triton.grouped import candidates, products_into
from ess.units import div_ceil

ALL_EXPERTS: Final = 256
PER_TOKEN: Final = 8


class Point(NamedTuple):
    """Tokens before the router, the rank's experts, and the sides of their weights."""

    tokens: int
    experts: int
    width: int
    depth: int


GATE_UP: Final = (4096, 7168)
DOWN: Final = (7168, 2048)
POINTS: Final = (
    *(Point(160, experts, *GATE_UP) for experts in (8, 32)),
    *(Point(160, experts, *DOWN) for experts in (8, 32)),
    *(Point(tokens, 32, *GATE_UP) for tokens in (16, 64, 1024, 4096)),
    *(Point(tokens, 32, *DOWN) for tokens in (16, 64, 1024, 4096)),
)
SMALL: Final = Point(40, 8, 256, 384)


class ExpertInputs(NamedTuple):
    """What every arm multiplies, once in e4m3 with scales and once in bfloat16."""

    tokens: Tensor
    ends: Tensor
    coded: Tensor
    scales: Tensor
    plain: Tensor


def experts_kernels() -> None:
    for _ in experts_benchmark(smoke=False, timed=once):
        pass


def experts_benchmark(*, smoke: bool, timed: Timed = on_device) -> Iterator[Row]:
    device = torch.device("cuda")
    try:
        theirs = deep_gemm_experts.load(device)
    except Unavailable as reason:
        print(f"experts: DeepGEMM is not measured, {reason}", file=sys.stderr)
        theirs = None
    for point in (SMALL,) if smoke else POINTS:
        yield from point_rows(point, timed, theirs, device=device)


def point_rows(
    point: Point, timed: Timed, theirs: DeepGemmExperts | None, *, device: torch.device
) -> Iterator[Row]:
    counts = routed(point)
    given = draw(point, counts, device)
    config = point._asdict() | {"routed": int(counts.sum())}
    taken, out = ours(given, timed)
    yield from verdict("experts", taken, config)
    plain = torch.empty_like(out)
    arms: dict[str, tuple[list[float], int]] = {
        "torch, bf16": (timed(lambda: torch_products(given)), 2),
        "ours, bf16": (timed(lambda: products_into(*given[:2], given.plain, out=plain)), 2),
        "ours, fp8": (next(iter(taken.values())), 1),
    }
    us = None if theirs is None else others(theirs, given, out, timed)
    if us is not None:
        arms["DeepGEMM, fp8"] = us, 1
    touched = int((counts > 0).sum()) * point.width * point.depth
    products = 2 * int(counts.sum()) * point.width * point.depth
    rival = "torch, bf16"
    known = rival, products / statistics.median(arms[rival][0]) / 1e6
    for name, (taken_us, width) in arms.items():
        yield rate_row(f"experts: {name}", taken_us, touched * width, **config)
        rates = [products / us / 1e6 for us in taken_us]
        baseline = None if name == rival else known
        yield row(f"experts: {name}", "TFLOP/s", rates, baseline=baseline, higher=True, **config)


def ours(given: ExpertInputs, timed: Timed) -> tuple[dict[str, list[float]], Tensor]:
    """Weights in e4m3, by every shape for this number of tokens; the first shape is in use."""
    tokens, ends, coded, scales, _ = given
    out = torch.zeros(len(tokens), coded.shape[1], dtype=torch.bfloat16, device=tokens.device)
    taken = {}
    for shape in candidates(len(tokens), len(coded), coded.dtype, is_half=True):

        def work(shape: Any = shape) -> Tensor:
            return products_into(tokens, ends, coded, out=out, scales=scales, shape=shape)

        taken[shape.name] = timed(work)
    return taken, out


def torch_products(given: ExpertInputs) -> Tensor:
    weights = given.plain.transpose(1, 2)
    return torch.nn.functional.grouped_mm(given.tokens, weights, offs=given.ends)


def others(
    theirs: DeepGemmExperts, given: ExpertInputs, out: Tensor, timed: Timed
) -> list[float] | None:
    """None where the library does not take this many tokens."""
    tokens, ends, coded, scales, _ = given

    def work() -> Tensor:
        return theirs.expert_products(tokens, ends, coded, scales=scales, out=out)

    try:
        return timed(work)
    except BadInput as reason:
        print(f"experts: DeepGEMM is not measured, {reason}", file=sys.stderr)
        return None


def routed(point: Point) -> Tensor:
    """How many tokens come to each of the rank's experts."""
    scores = torch.rand(point.tokens, ALL_EXPERTS, generator=torch.Generator().manual_seed(0))
    chosen = scores.topk(PER_TOKEN, dim=1).indices.flatten()
    return torch.bincount(chosen, minlength=ALL_EXPERTS)[: point.experts]


def draw(point: Point, counts: Tensor, device: torch.device) -> ExpertInputs:
    shape = point.experts, point.width, point.depth
    blocks = point.experts, div_ceil(point.width, 128), div_ceil(point.depth, 128)
    codes = torch.randint(0, 0x70, shape, dtype=torch.uint8, device=device)
    kind: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    return ExpertInputs(
        torch.randn(int(counts.sum()), point.depth, **kind),
        counts.cumsum(0).int().to(device),
        codes.view(torch.float8_e4m3fn),
        torch.full(blocks, 2.0**-8, device=device),
        torch.empty(shape, **kind).uniform_(-1, 1),
    )
