"""What the Triton kernels have beyond the ops: cuts, grids, sums. On a GPU or interpreted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from ess.errors import BadInput, Unavailable
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


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """How many multiprocessors to spare for so many programs, each of at least one block."""
    from ess.kernels.cuda.triton import attend, launch

    monkeypatch.setattr(attend, "PIECE_KEYS_MIN", 1)
    monkeypatch.setattr(launch, "INTERPRETED_SMS", 40)
    sm_count = launch.place(torch.empty(0, device=device())).sm_count
    return {programs: sm_count - programs for programs in (1, 2, 3, 7, 40)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_of_the_lists_agrees(ops: Ops, grids: dict[int, int], dtype: torch.dtype) -> None:
    """Lists in one piece, in two, and in as many as they have blocks; one query has little, one
    nothing at all, and heads fill more than a block."""
    case = test_attend.make(RowCodec(), heads=19, keys=90, queries=4, dtype=dtype)
    case.slots[1, case.slots[1].argsort()[40:]] = -1
    out, lse = test_attend.exact(case)
    out[2], lse[2] = 0.0, -math.inf
    case.slots[2] = -1
    for spare_sms in grids.values():
        ours = attend_lists(case, balanced=True, spare_sms=spare_sms)
        test_attend.close(ours, (out, lse), *test_attend.tolerance(case.codec, dtype))
        assert (ours.out[2] == 0).all()


SHARED = (
    # queries, programs, head blocks, blocks of a piece at least, keys of a list at most
    (9, 4, 2, 1, 130),
    (1, 7, 1, 2, 130),
    (3, 40, 1, 1, 600),
    (1100, 5, 1, 1, 130),
    (40, 7, 2, 2, 20),
    (8, 40, 1, 8, 40),
)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(("query_count", "programs", "head_blocks", "least", "longest"), SHARED)
def test_every_key_is_in_one_piece_and_shares_are_even(
    ops: Ops,
    is_cut: bool,
    query_count: int,
    programs: int,
    head_blocks: int,
    least: int,
    longest: int,
) -> None:
    """Of lists of any length: none, less than a block, many; of few programs and of more than
    there are blocks. A list counts as two blocks more where no program is without one."""
    from ess.kernels.cuda.triton.attend import pieces_max

    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, longest, (query_count,), generator=generator).int()
    counts[::3] = 0
    cuts, pieces = laid_out(counts, programs, head_blocks, least, is_cut)
    lists, blocks = query_count * head_blocks, head_blocks * block_count(0, counts).sum()
    most, seen, sizes = pieces_max(lists, int(blocks), programs, least), {}, []
    for program, (first, block, count, _) in enumerate(cuts.tolist()):
        assert count <= most
        mine = pieces[:count, program].tolist()
        begun = sum(start == 0 for _, start, _, _ in mine)
        sizes.append((begun, sum(int(block_count(*piece[1:3])) for piece in mine)))
        for number, (task, start, end, part) in enumerate(mine):
            seen.setdefault(task, []).append((start, end))
            whole = (start, end) == (0, int(counts[task // head_blocks]))
            assert part == (-1 if whole else 2 * program + (number > 0))
        if count:
            assert mine[0][:2] == [first, 16 * block]
    for task in range(lists):
        spans = sorted(seen.pop(task))
        assert (spans[0][0], spans[-1][1]) == (0, int(counts[task // head_blocks]))
        assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
        assert is_cut or len(spans) == 1
    assert not seen
    live = min(programs, max(int(blocks) // least, lists))
    counted = 2 if lists >= live else 0
    shares = [counted * begun + size for begun, size in sizes if size]
    assert not is_cut or (len(shares) == live and max(shares) - min(shares) <= 1 + 2 * counted)


def block_count(start: int, end: int | torch.Tensor) -> torch.Tensor:
    return (torch.as_tensor(end) - start + 15).div(16, rounding_mode="floor").clamp(min=1)


def laid_out(
    counts: torch.Tensor, programs: int, head_blocks: int, least: int, is_cut: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from ess.kernels.cuda.triton.device.shares import lay_out

    cuts = torch.full((programs, 4), 99, dtype=torch.int32, device=device())
    room = len(counts) * head_blocks + 1
    pieces = torch.full((room, programs, 4), 99, dtype=torch.int32, device=device())
    given = counts.to(device()), cuts, pieces, len(counts), head_blocks
    lay_out[(programs,)](*given, KEYS=16, BLOCKS_MIN=least, IS_CUT=is_cut)
    return cuts.cpu(), pieces.cpu()


@pytest.mark.parametrize(
    ("strides", "shift", "bytes_at_once"),
    [((656, 656), 0, 16), ((656, 656), 8, 8), ((656, 660), 16, 4), ((584, 656), 16, 8)],
)
def test_rows_are_loaded_as_widely_as_all_of_them_allow(
    strides: tuple[int, int], shift: int, bytes_at_once: int
) -> None:
    from ess.kernels.cuda.triton.attend import aligned

    memory = torch.empty(1 << 12, dtype=torch.uint8)
    rows, elsewhere = (
        memory[at:].as_strided((2, 512), (stride, 1))
        for at, stride in zip((0, shift), strides, strict=True)
    )
    assert aligned(rows, elsewhere) == bytes_at_once


def test_lists_of_a_block_each_are_whole_and_on_a_program_each(ops: Ops) -> None:
    """As the misses of a small batch are: nothing is left to join, and none waits for another."""
    cuts, pieces = laid_out(torch.tensor([16, 3, 0, 9]).int(), 40, 2, 8, is_cut=True)
    assert cuts[:, :3].tolist() == [[task, 0, 1] for task in range(8)] + [[8, 0, 0]] * 32
    assert pieces[0, :8, 3].tolist() == [-1] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_added_to_a_partial(ops: Ops, grids: dict[int, int], dtype: torch.dtype) -> None:
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
    out, lse = test_attend.tolerance(case.codec, dtype)
    for spare_sms in (0, grids[3], grids[7]):
        for balanced in (False, True):
            ours = attend_lists(case, onto=first, balanced=balanced, spare_sms=spare_sms)
            torch.testing.assert_close(ours.out, want.out, atol=out, rtol=0)
            torch.testing.assert_close(ours.lse, want.lse, atol=lse, rtol=0)
            for query in (1, 3):
                test_attend.same_bits(
                    Partial(*(side[query] for side in ours)),
                    Partial(*(side[query] for side in first)),
                )


def test_lists_that_are_not_cut_have_their_bits_in_any_batch(
    ops: Ops, grids: dict[int, int]
) -> None:
    """Those of a deterministic engine. Where lists may be cut, the batch is within rounding."""
    case = test_attend.make(test_attend.CODECS["264"], heads=3, keys=150, queries=3)
    together = case.run(ops)
    for query in range(3):
        one = slice(query, query + 1)
        alone = case.run(ops, queries=case.queries[one], slots=case.slots[one])
        test_attend.same_bits(alone, Partial(*(side[one] for side in together)))
    balanced = case.run(ops, balanced=True)
    assert not torch.equal(balanced.out, together.out)
    test_attend.close(
        balanced, test_attend.exact(case), *test_attend.tolerance(case.codec, torch.float32)
    )


def test_bits_do_not_depend_on_the_grid(ops: Ops, grids: dict[int, int]) -> None:
    case = test_attend.make(test_attend.CODECS["264"], heads=17, keys=40)
    want = attend_lists(case)
    for spare_sms in grids.values():
        test_attend.same_bits(attend_lists(case, spare_sms=spare_sms), want)
    cut = attend_lists(case, balanced=True)
    for _ in range(3):
        test_attend.same_bits(attend_lists(case, balanced=True), cut)
    with pytest.raises(BadInput, match="spare_sms is -1, outside 0"):
        attend_lists(case, spare_sms=-1)
    with pytest.raises(BadInput, match="spare_sms is 100000"):
        attend_lists(case, spare_sms=100_000)


def test_a_shape_that_does_not_fit_gives_way(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    from ess.kernels.cuda.triton import attend
    from ess.kernels.cuda.triton.shapes import EXACT

    case, tried = test_attend.make(test_attend.CODECS["264"], heads=3, keys=20), []
    launch = attend.device.attend
    shapes = [EXACT._replace(name=name) for name in ("too large", "fits", "never asked")]
    monkeypatch.setattr(attend, "candidates", lambda **_: shapes)

    class Refusing:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def run(*given: object, **constants: object) -> None:
                tried.append(grid)
                if len(tried) == 1:
                    raise attend.OutOfResources(240_000, 232_448, "shared memory")
                launch[grid](*given, **constants)

            return run

    monkeypatch.setattr(attend.device, "attend", Refusing())
    test_attend.close(attend_lists(case), test_attend.exact(case), 1e-5, 1e-5)
    assert len(tried) == 2
    tried.clear()
    with pytest.raises(Unavailable, match="no shape of attention over fp8 rows fits this device"):
        attend_lists(case, shape=shapes[0])


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
        test_merge.test_two_sides_merge_as_by_hand,
        test_merge.test_into_may_be_a_side,
        test_merge.test_strided_sides_give_the_same_bits,
        test_merge.test_plus_infinity_is_loud,
        test_merge.test_outs_near_the_end_of_float32_do_not_overflow,
        test_merge.test_wrong_sides_are_refused_and_change_nothing,
    ):
        check(ops.merge)
