"""What the Triton kernels have beyond the ops: cuts, grids, epilogues. On a GPU or interpreted."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import RowCodec
from tests.kernels import test_attend, test_index, test_merge
from tests.kernels.sets import SETS, op_set, reference

pytest.importorskip("triton", reason="triton is not installed")


@pytest.fixture(params=SETS[2:])
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def attend_lists(
    case: test_attend.Case, *, onto: Partial | None = None, **options: object
) -> Partial:
    """The launch behind the door, with everything where the kernel wants it."""
    from ess.kernels.cuda.triton import attend

    queries, rows, slots = (t.to(device()) for t in (case.queries, case.rows, case.slots))
    placed = case.placed.to(device())
    shape = queries.shape[:2]
    out = torch.full((*shape, case.codec.latent_dim), 7.0, device=device())
    into = Partial(out, torch.full(shape, 7.0, device=device()))
    if onto is not None:
        into, options["adds"] = Partial(*(side.clone().to(device()) for side in onto)), True
    lists = attend.close_up(slots)
    attend.attend_lists(
        queries, rows, lists, case.codec, scale=case.scale, placed=placed, into=into, **options
    )
    return Partial(into.out.cpu(), into.lse.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_of_the_lists_agrees(ops: Ops, dtype: torch.dtype) -> None:
    """Cuts that leave splits empty, full, and partly full; one query has nothing at all."""
    case = test_attend.make(RowCodec(), heads=5, keys=90, dtype=dtype)
    case.slots[1, case.slots[1].argsort()[40:]] = -1
    want = test_attend.exact(case)
    for split_keys in (16, 45, 90, 1000):
        ours = attend_lists(case, split_keys=split_keys)
        test_attend.close(ours, want, *test_attend.tolerance(case.codec, dtype))
    case.slots[1] = -1
    empty = attend_lists(case, split_keys=45)
    assert (empty.out[1] == 0).all()
    assert (empty.lse[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_a_partial(ops: Ops, dtype: torch.dtype) -> None:
    """Query 0 has rows on both sides, 1 on the first only, 2 on the second only, 3 nowhere."""
    case = test_attend.make(test_attend.CODECS["264"], heads=3, keys=60, queries=4, dtype=dtype)
    case.slots[3] = -1
    want = case.run(reference)
    is_first = torch.arange(case.slots.shape[1]) % 3 > 0
    is_first = torch.stack([is_first, torch.ones_like(is_first), torch.zeros_like(is_first)] * 2)
    sides = [case.slots.where(keep[:4], -1) for keep in (is_first, ~is_first)]
    case.slots = sides[0]
    first = attend_lists(case)
    case.slots = sides[1]
    ours = attend_lists(case, onto=first)
    out, lse = test_attend.tolerance(case.codec, dtype)
    torch.testing.assert_close(ours.out, want.out, atol=out, rtol=0)
    torch.testing.assert_close(ours.lse, want.lse, atol=lse, rtol=0)
    for query in (1, 3):
        test_attend.same_bits(
            Partial(*(side[query] for side in ours)), Partial(*(side[query] for side in first))
        )
    with pytest.raises(BadInput, match="cut by split_keys 9 cannot be added"):
        attend_lists(case, onto=first, split_keys=9)


def test_bits_do_not_depend_on_the_grid(ops: Ops) -> None:
    case = test_attend.make(test_attend.CODECS["264"], heads=17, keys=40)
    for split_keys in (None, 20):
        want = attend_lists(case, split_keys=split_keys)
        for spare_sms in (1, 2):
            ours = attend_lists(case, split_keys=split_keys, spare_sms=spare_sms)
            test_attend.same_bits(ours, want)
    with pytest.raises(BadInput, match="spare_sms is -1, outside 0"):
        attend_lists(case, spare_sms=-1)
    with pytest.raises(BadInput, match="spare_sms is 100000"):
        attend_lists(case, spare_sms=100_000)


def test_lists_close_up_in_their_order(ops: Ops) -> None:
    from ess.kernels.cuda.triton.attend import close_up

    slots = torch.randint(-4, 9, (5, 1500), generator=torch.Generator().manual_seed(0)).int()
    slots[3], slots[4] = -1, 5
    lists = close_up(slots.to(device()))
    for row, named, count in zip(slots, lists.named.cpu(), lists.counts.tolist(), strict=True):
        kept = row[row != -1]
        assert count == len(kept)
        assert torch.equal(named[:count], kept)


def test_long_lists_are_searched_by_a_sample_and_short_of_it(ops: Ops) -> None:
    """Longer than the room for candidates, so all three ways of a search are taken."""
    lists = test_index.hard_lists(9000)
    names = ("normal", "equal", "hidden", "seen", "unseen", "specials")
    logits = torch.from_numpy(np.stack([lists[name] for name in names]))
    lengths = torch.full((len(names),), 9000, dtype=torch.int32)
    for k in (5, 2048):
        ours = ops.top_k(logits, lengths, k=k).numpy()
        for name, row in zip(names, ours, strict=True):
            assert np.array_equal(row, test_index.greatest(lists[name], k)), (name, k)


def test_positions_become_slots(ops: Ops) -> None:
    from ess.kernels.cuda.triton.index import Placement, top_k_into

    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 320, generator=generator)
    lengths = torch.tensor([320, 100, 7], dtype=torch.int32)
    table = torch.stack([torch.randperm(40, generator=generator)[:5] for _ in range(3)]).int()
    slot_of = torch.randperm(40 * 64, generator=generator).int()
    slot_of[::5] = -1
    there = [one.to(device()) for one in (logits, lengths, table, slot_of)]
    out = torch.full((3, 50), 7, dtype=torch.int32, device=device())
    slots = torch.full_like(out, 7)
    placement = Placement(slot_of=there[3], table=there[2], slots=slots)
    top_k_into(there[0], there[1], out=out, placement=placement)
    want = reference.top_k(logits, lengths, k=50)
    assert torch.equal(out.cpu(), want)
    row_ids = table.gather(1, want.clamp(min=0).long() // 64) * 64 + want % 64
    assert torch.equal(slots.cpu(), torch.where(want < 0, -1, slot_of[row_ids]))


def test_rows_are_copied_as_far_as_the_count(ops: Ops) -> None:
    from ess.kernels.cuda.triton.copy import copy_rows

    generator = torch.Generator().manual_seed(5)
    source = torch.randint(0, 256, (90, 656), dtype=torch.uint8, generator=generator)
    slab = torch.full((70, 680), 0xA5, dtype=torch.uint8)
    rows = torch.randint(90, (40,), generator=generator).int()
    places = torch.randperm(70, generator=generator)[:40].int()
    want = slab.clone()
    want[places[:33].long(), 8:664] = source[rows[:33].long()]
    there = [one.to(device()) for one in (rows, slab, places, torch.tensor([33]).int())]
    pinned = source.pin_memory() if torch.cuda.is_available() else source
    for programs in (1, 3):
        target = there[1].clone()
        copy_rows(pinned, there[0], target[:, 8:664], there[2], there[3], programs=programs)
        assert torch.equal(target.cpu(), want)
    with pytest.raises(BadInput, match="source rows of 660 bytes are not words of 8"):
        copy_rows(torch.zeros(2, 660, dtype=torch.uint8), *there)


def test_the_merge_keeps_its_algebra(ops: Ops) -> None:
    first, second = test_merge.wild_partial(1, 200), test_merge.wild_partial(2, 200)
    merged = ops.merge(first, second)
    test_merge.same_bits(merged, ops.merge(second, first))
    test_merge.same_bits(ops.merge(first, test_merge.empty_like(first)), first)
    assert torch.all(merged.lse >= torch.maximum(first.lse, second.lse))
    want = reference.merge(first, second)
    great = torch.maximum(first.out.abs(), second.out.abs())
    assert torch.all((merged.out - want.out).abs() <= great * 2**-20)
    torch.testing.assert_close(merged.lse, want.lse, atol=1e-6, rtol=1e-6)
    for check in (
        test_merge.test_by_hand,
        test_merge.test_into_may_be_a_side,
        test_merge.test_strided_sides,
        test_merge.test_plus_infinity_is_loud,
        test_merge.test_outs_near_the_end_of_float32_do_not_overflow,
        test_merge.test_bad_input,
    ):
        check(ops.merge)
