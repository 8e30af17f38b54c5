"""Sparse attention over encoded rows: every form and count against float64, and bits that stay."""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ess.errors import BadInput
from ess.kernels import backend
from ess.kernels.cpu import native
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import RowCodec
from tests.kernels.sets import ISAS, SETS, is_refused, op_set, reference, says_so
from tests.kernels.test_rows import another_thread_runs_during
from tests.support.built import needs_native

CODECS = {
    "656": RowCodec(),
    "264": RowCodec(latent_dim=256, rope_dim=0),
    "584": RowCodec(rope_dim=28),
    "published V4": RowCodec(form="fp8_64", rope_dim=0, plain_dim=64),
    "byte-168": RowCodec(form="fp8_64", latent_dim=146, rope_dim=0, plain_dim=18),
    "1152": RowCodec(form="bf16"),
    "bf16-24": RowCodec(form="bf16", latent_dim=9, rope_dim=3),
    "2304": RowCodec(form="f32"),
    "f32-28": RowCodec(form="f32", latent_dim=5, rope_dim=2),
}
HEADS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 64, 128)
KEYS = (1, 2, 7, 63, 64, 65, 129, 200)
HALF = 2**-8 + 4e-6


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


@dataclass
class Case:
    codec: RowCodec
    values: torch.Tensor
    queries: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    placed: torch.Tensor
    scale: float = 0.0

    def run(self, ops: Ops, **changes: Any) -> Partial:
        given = {"queries": self.queries, "rows": self.rows, "slots": self.slots}
        options = {"placed": self.placed, "scale": self.scale}
        for name, value in changes.items():
            (given if name in given else options)[name] = value
        return ops.attend(*given.values(), self.codec, **options)


def slab(values: torch.Tensor, codec: RowCodec, places: torch.Tensor, count: int) -> torch.Tensor:
    """Rows at `places` of a matrix with gaps between its rows; all else is 0xFF, which is NaN."""
    whole = torch.full((count, codec.row_bytes + 20), 0xFF, dtype=torch.uint8)
    rows = whole[:, 4 : 4 + codec.row_bytes]
    dense = torch.empty(len(places), codec.row_bytes, dtype=torch.uint8)
    rows[places] = reference.encode_rows(values, codec, dense)
    return rows


def make(
    codec: RowCodec,
    *,
    heads: int = 4,
    keys: int = 70,
    queries: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Every query names `keys` of 150 rows, 2 of them twice, a third of them in place, in an order
    of its own; about a quarter of the list is pads."""
    generator = torch.Generator().manual_seed(seed)
    dim, count = codec.latent_dim + codec.rope_dim, 150
    values = torch.randn(count, dim, generator=generator)
    is_placed = torch.arange(count) % 3 == 0
    at = torch.randperm(2 * count, generator=generator)[:count]
    rows = slab(values[~is_placed], codec, at[~is_placed], 2 * count)
    placed = slab(values[is_placed], codec, at[is_placed], 2 * count)
    codes = torch.where(is_placed, -2 - at, at).int()
    slots = torch.full((queries, keys + keys // 3 + 1), -1, dtype=torch.int32)
    for q in range(queries):
        chosen = torch.randint(count, (keys,), generator=generator)
        chosen[: keys // 20] = chosen[-1]
        where = torch.randperm(slots.shape[1], generator=generator)[:keys].sort().values
        slots[q, where] = codes[chosen]
    asked = torch.randn(queries, heads, dim, generator=generator).to(dtype)
    return Case(codec, values, asked, rows, slots, placed, scale=dim**-0.5)


def exact(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64 over the rows as they decode, in words that share nothing with the reference."""
    out, lse = [], []
    for query, slots in zip(case.queries.double(), case.slots.tolist(), strict=True):
        named = [case.rows[s] if s >= 0 else case.placed[-2 - s] for s in slots if s != -1]
        keys = torch.empty(len(named), case.queries.shape[2])
        reference.decode_rows(torch.stack(named), case.codec, keys)
        logits = torch.einsum("hd,nd->hn", query, keys.double()) * case.scale
        top = logits.amax(dim=1, keepdim=True)
        weights = torch.exp(logits - top)
        total = weights.sum(dim=1, keepdim=True)
        out.append(weights / total @ keys.double()[:, : case.codec.latent_dim])
        lse.append((total.log() + top)[:, 0])
    return torch.stack(out), torch.stack(lse)


def close(ours: Partial, want: tuple[torch.Tensor, torch.Tensor], out: float, lse: float) -> None:
    assert ours.out.dtype == ours.lse.dtype == torch.float32
    torch.testing.assert_close(ours.out.double(), want[0], atol=out, rtol=0)
    torch.testing.assert_close(ours.lse.double(), want[1], atol=lse, rtol=0)


def same_bits(one: Partial, other: Partial) -> None:
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def tolerance(codec: RowCodec, dtype: torch.dtype) -> tuple[float, float]:
    """Weights are rounded to bf16 only where queries and rows are bf16 by nature; the CPU's lse is
    that of weights as rounded, each by up to 2^-8 of itself."""
    is_half = dtype == torch.bfloat16 and codec.form != "f32"
    return (6e-3, HALF) if is_half else (4e-6, 4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_agrees_for_every_form(ops: Ops, codec: RowCodec, dtype: torch.dtype) -> None:
    if is_refused(ops, codec):
        return
    for heads, keys in ((4, 70), (17, 129)):
        case = make(codec, heads=heads, keys=keys, dtype=dtype)
        close(case.run(ops), exact(case), *tolerance(codec, dtype))


@pytest.mark.parametrize(("codec", "dtype"), [("656", torch.bfloat16), ("f32-28", torch.float32)])
def test_agrees_for_every_count(ops: Ops, codec: str, dtype: torch.dtype) -> None:
    sizes = [(heads, 65) for heads in HEADS] + [(3, keys) for keys in KEYS]
    for heads, keys in sizes:
        case = make(CODECS[codec], heads=heads, keys=keys, queries=2, dtype=dtype, seed=keys)
        close(case.run(ops), exact(case), *tolerance(case.codec, dtype))


@pytest.mark.parametrize(
    ("codec", "bound"),
    [("656", 0.12), ("264", 0.15), ("published V4", 0.12), ("1152", 8e-3), ("2304", 4e-6)],
)
def test_near_the_rows_that_were_meant(ops: Ops, codec: str, bound: float) -> None:
    """Against the values before they were encoded: what a form costs is bounded."""
    if is_refused(ops, CODECS[codec]):
        return
    case = make(CODECS[codec], keys=140)
    ours = case.run(ops)
    plain = RowCodec(form="f32", latent_dim=case.codec.latent_dim, rope_dim=case.codec.rope_dim)
    meant = make(plain, keys=140)
    assert torch.equal(case.slots, meant.slots)
    close(ours, exact(meant), bound, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["656", "published V4", "1152", "2304", "f32-28"])
@pytest.mark.parametrize("heads", [3, 8, 33])
def test_bits_depend_on_the_rows_and_their_order_alone(
    ops: Ops, codec: str, heads: int, dtype: torch.dtype
) -> None:
    if is_refused(ops, CODECS[codec]):
        return
    case = make(CODECS[codec], heads=heads, dtype=dtype, queries=4)
    want = case.run(ops)
    for _ in range(20 if heads == 3 else 2):
        same_bits(case.run(ops), want)
    for threads in (2, 5, 16):
        same_bits(case.run(ops, threads=threads), want)
    order = torch.tensor([2, 0, 3, 1])
    turned = case.run(ops, queries=case.queries[order], slots=case.slots[order])
    same_bits(turned, Partial(want.out[order], want.lse[order]))
    for q in range(4):
        one = slice(q, q + 1)
        alone = case.run(ops, queries=case.queries[one], slots=case.slots[one], threads=3)
        same_bits(alone, Partial(want.out[one], want.lse[one]))
    same_bits(case.run(ops, **elsewhere(case)), want)
    same_bits(case.run(ops, slots=without_pads(case.slots)), want)


def elsewhere(case: Case) -> dict[str, torch.Tensor]:
    """All rows in one dense matrix, shuffled, none in place: what RESIDENT is to NONE."""
    both = torch.cat([case.rows, case.placed])
    at = torch.randperm(len(both), generator=torch.Generator().manual_seed(5))
    moved = torch.empty_like(both)
    moved[at] = both
    code = torch.where(case.slots >= 0, case.slots, len(case.rows) - 2 - case.slots).long()
    return {"rows": moved, "slots": torch.where(case.slots == -1, -1, at[code.clamp(min=0) % 600])}


def without_pads(slots: torch.Tensor) -> torch.Tensor:
    """The same names, closed up to the right."""
    closed = torch.full_like(slots, -1)
    for row, named in zip(closed, slots, strict=True):
        kept = named[named != -1]
        row[len(row) - len(kept) :] = kept
    return closed


@pytest.mark.parametrize("codec", ["656", "1152", "2304"])
def test_nothing_named_is_empty(ops: Ops, codec: str) -> None:
    case = make(CODECS[codec], heads=5)
    case.slots[1] = -1
    mixed = case.run(ops)
    assert torch.equal(mixed.out[1], torch.zeros(5, 512))
    assert torch.equal(mixed.lse[1], torch.full((5,), -math.inf))
    assert mixed.lse[[0, 2]].isfinite().all()
    for slots in (case.slots[:, :0], torch.full((3, 9), -1)):
        empty = case.run(ops, slots=slots, placed=None)
        assert torch.equal(empty.out, torch.zeros(3, 5, 512))
        assert torch.equal(empty.lse, torch.full((3, 5), -math.inf))
    none = case.run(ops, queries=case.queries[:0], slots=case.slots[:0])
    assert none.out.shape == (0, 5, 512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["656", "1152", "2304"])
def test_one_key_returns_its_value(ops: Ops, codec: str, dtype: torch.dtype) -> None:
    case = make(CODECS[codec], keys=1, heads=3, dtype=dtype)
    value = exact(case)[0]
    torch.testing.assert_close(case.run(ops).out.double(), value, atol=1e-6, rtol=0)
    twice = torch.cat([case.slots, case.slots], dim=1)
    torch.testing.assert_close(case.run(ops, slots=twice).out.double(), value, atol=1e-6, rtol=0)


@needs_native
@pytest.mark.parametrize("codec", ["656", "1152", "2304"])
def test_a_split_changes_the_order_of_sums_alone(codec: str) -> None:
    """What rows weigh does not depend on those that share their partial, also where it is rounded
    to bf16: two partials merge to what one pass gives, far within a unit of bf16."""
    ops = backend.ops("cpu")
    for seed, steeper in itertools.product(range(4), (1, 4, 16)):
        case = make(CODECS[codec], heads=8, keys=140, dtype=torch.bfloat16, seed=seed)
        case.scale *= steeper
        whole, count = case.run(ops), case.slots.shape[1]
        for cut in (1, count // 3, count - 40):
            parts = (case.slots[:, :cut], case.slots[:, cut:])
            made = ops.merge(*(case.run(ops, slots=part.contiguous()) for part in parts))
            torch.testing.assert_close(made.out, whole.out, atol=2e-5, rtol=0)
            torch.testing.assert_close(made.lse, whole.lse, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["656", "f32-28"])
def test_rows_are_added_to_a_partial_over_others(ops: Ops, codec: str, dtype: torch.dtype) -> None:
    """Query 0 has rows on both sides, 1 in the partial only, 2 behind it only, 3 nowhere."""
    case = make(CODECS[codec], heads=5, keys=61, queries=4, dtype=dtype)
    out, lse = exact(case)
    case.slots[3], out[3], lse[3] = -1, 0.0, -math.inf
    is_held = torch.arange(case.slots.shape[1]) % 3 > 0
    is_held = torch.stack([is_held, torch.ones_like(is_held), torch.zeros_like(is_held)] * 2)[:4]
    held = case.run(ops, slots=case.slots.where(is_held, -1))
    into, slots = Partial(*(side.clone() for side in held)), case.slots.where(~is_held, -1)
    ours = case.run(ops, slots=slots, into=into, adds=True, spares=True, balanced=True)
    assert ours.out is into.out
    close(ours, (out, lse), *tolerance(case.codec, dtype))
    for query in (1, 3):
        same_bits(*(Partial(side.out[query], side.lse[query]) for side in (ours, held)))
    with pytest.raises(BadInput, match="adds without the partial"):
        case.run(ops, slots=slots, adds=True)
    if says_so(ops, "slots holds"):
        with pytest.raises(BadInput, match="slots"):
            case.run(ops, slots=slots.clamp(min=300), into=held, adds=True)
        same_bits(held, case.run(ops, slots=case.slots.where(is_held, -1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["656", "2304"])
def test_great_logits_do_not_overflow(ops: Ops, codec: str, dtype: torch.dtype) -> None:
    """Up to logits where only one key has weight, or two equal weights where a key is named
    twice."""
    for scale, bound in ((20.0, 0.03), (1e30, 1e-6)):
        case = make(CODECS[codec], keys=140, dtype=dtype)
        case.scale = scale
        ours, want = case.run(ops), exact(case)
        torch.testing.assert_close(ours.out.double(), want[0], atol=bound, rtol=0)
        atol = HALF if dtype == torch.bfloat16 and codec != "2304" else 0
        torch.testing.assert_close(ours.lse.double(), want[1], atol=atol, rtol=2e-6)


def test_a_broken_row_that_is_named_is_seen(ops: Ops) -> None:
    for codec, heads in itertools.product(("656", "1152", "2304"), (3, 17)):
        for dtype in (torch.float32, torch.bfloat16):
            case = make(CODECS[codec], heads=heads, keys=67, dtype=dtype)
            case.slots[1, case.slots[1] >= 0] = case.slots[1].max()
            case.slots[1, 30] = 299 if 299 not in case.slots else 298
            case.rows[case.slots[1, 30]] = 0xFF
            case.slots[2, 5:] = -1  # of what query 1 leaves in memory little is overwritten
            ours = case.run(ops, threads=1)
            assert ours.out[1].isnan().all()
            assert ours.lse[1].isnan().all()
            assert ours.out[[0, 2]].isfinite().all()


def test_layouts_in_memory(ops: Ops) -> None:
    case = make(CODECS["656"], heads=6, queries=4)
    want = case.run(ops)
    turned = case.queries.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    wide = torch.zeros(8, 12, 600)
    wide[::2, ::2, :576] = case.queries
    for queries in (turned, wide[::2, ::2, :576]):
        same_bits(case.run(ops, queries=queries), want)
    for slots in (case.slots.long(), case.slots.T.contiguous().T):
        same_bits(case.run(ops, slots=slots), want)
    into = Partial(torch.full((4, 6, 512), 7.0), torch.full((4, 6), 7.0))
    given_back = case.run(ops, into=into)
    assert given_back.out is into.out
    same_bits(into, want)


@needs_native
def test_rows_past_four_gibibytes() -> None:
    """Addresses beyond 32 bits, in matrices that are almost all untouched."""
    codec, count = CODECS["2304"], 2_000_000
    rows, placed = (torch.from_numpy(np.zeros((count, 2304), np.uint8)) for _ in range(2))
    rows[-1].view(torch.float32).fill_(3.0)
    placed[-1].view(torch.float32).fill_(5.0)
    queries = torch.zeros(2, 2, 576)
    slots = torch.tensor([[count - 1], [-1 - count]], dtype=torch.int32)
    ours = backend.ops("cpu").attend(queries, rows, slots, codec, placed=placed, scale=1.0)
    assert (ours.out[0] == 3).all()
    assert (ours.out[1] == 5).all()


def test_bad_input_changes_nothing(ops: Ops) -> None:
    case = make(CODECS["656"])
    into = Partial(torch.full((3, 4, 512), 7.0), torch.full((3, 4), 7.0))
    high, low = case.slots.clone(), case.slots.clone()
    high[2, 5], low[2, 5] = 300, -302
    for changes, says in (
        ({"slots": high}, r"slots holds -\d+..300, outside -301..299"),
        ({"slots": low}, r"slots holds -302..\d+, outside -301..299"),
        ({"slots": case.slots.long() + (1 << 33)}, "slots holds"),
        ({"placed": None}, r"outside -1..299"),
        ({"slots": case.slots[:2]}, r"slots has shape \(2, 94\), must be \(3, any\)"),
        ({"slots": case.slots.float()}, "slots has type torch.float32"),
        ({"rows": case.rows[:, :655]}, r"rows has shape \(300, 655\), must be \(any, 656\)"),
        ({"placed": case.placed.view(torch.int8)}, "placed has type torch.int8"),
        ({"queries": case.queries[:, :, :575]}, r"queries has shape \(3, 4, 575\)"),
        ({"into": Partial(into.out[:, :3], into.lse)}, r"into.out has shape \(3, 3, 512\)"),
    ):
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                case.run(ops, **{"into": into, **changes})
    case.codec = RowCodec(form="opaque", opaque_bytes=656)
    with pytest.raises(BadInput, match="opaque"):
        case.run(ops, into=into)
    assert (into.out == 7).all()
    assert (into.lse == 7).all()


def test_memory_that_kernels_could_not_read(ops: Ops) -> None:
    case = make(CODECS["656"])
    gaps = torch.empty(3, 4, 1024)[:, :, ::2]
    turned = case.rows.expand(300, 656).T.contiguous().T
    odd = torch.zeros(300, 658, dtype=torch.uint8)
    for changes, says in (
        ({"threads": 0}, "threads is 0"),
        ({"rows": turned}, "rows steps 300 elements within a row"),
        ({"placed": turned}, "placed steps 300 elements within a row"),
        ({"rows": odd[:, :656]}, "rows has rows 658 bytes apart"),
        (
            {"placed": odd.view(-1)[2 : 2 + 656].view(1, 656)},
            "placed has rows 656 bytes apart from",
        ),
        ({"into": Partial(gaps, torch.empty(3, 4))}, "into.out with strides .* has gaps"),
    ):
        with pytest.raises(BadInput, match=says):
            case.run(ops, **changes)


def test_the_cpu_does_not_reach_a_device() -> None:
    case = make(CODECS["656"])
    with pytest.raises(BadInput, match="queries is on meta: the cpu ops do not reach it"):
        case.run(backend.ops("cpu"), queries=case.queries.to("meta"))


class Recorded(TorchDispatchMode):
    """Everything that torch does meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, function: Any, *rest: Any) -> Any:
        self.calls.append(str(function))
        return function(*rest[1], **(rest[2] or {}))


@needs_native
def test_with_room_given_torch_makes_nothing() -> None:
    ops, case = backend.ops("cpu"), make(CODECS["656"], dtype=torch.bfloat16)
    into = case.run(ops)
    with Recorded() as recorded:
        case.run(ops, into=into)
        ops.merge(into, into, into=into)
    assert recorded.calls == []


@needs_native
def test_the_gil_is_free_meanwhile() -> None:
    ops, case = backend.ops("cpu"), make(CODECS["656"], heads=128, keys=140)
    assert another_thread_runs_during(lambda: case.run(ops))


@needs_native
def test_native_set_is_the_one_that_was_asked_for() -> None:
    asked = os.environ.get("ESS_ISA")
    assert native.kernels() in ((asked,) if asked else (*ISAS, "avx512_bf16"))
