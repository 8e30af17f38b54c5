"""Index logits and top-k at size: against float64 and the sort, and bits that stay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels import backend
from ess.kernels.ops import Ops
from ess.layout import IndexCodec
from tests.kernels.sets import SETS, op_set, reference, says_so
from tests.kernels.test_attend import Recorded
from tests.kernels.test_rows import another_thread_runs_during
from tests.support.built import needs_native

FORMS = {
    "fp8 under fp8": ("fp8", torch.float8_e4m3fn),
    "fp8 under bf16": ("fp8", torch.bfloat16),
    "fp8 under f32": ("fp8", torch.float32),
    "f32 under f32": ("f32", torch.float32),
    "f32 under bf16": ("f32", torch.bfloat16),
}
HEADS = (1, 3, 4, 8, 11, 16, 33, 64)
LENGTHS = (0, 1, 64, 300, 4097)
PAGES = 90


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


@dataclass
class Case:
    codec: IndexCodec
    queries: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor

    def run(self, op: Any, **changes: Any) -> torch.Tensor:
        names = ("queries", "weights", "pages", "table", "lengths")
        options = {name: value for name, value in changes.items() if name not in names}
        return op(*(changes.get(n, getattr(self, n)) for n in names), self.codec, **options)


def make(form: str, *, heads: int = 5, key_dim: int = 128, seed: int = 0) -> Case:
    """Five queries over shared pages in no order; pages have gaps, and what is not written or lies
    behind the greatest length of its page is 0xFF."""
    key_form, dtype = FORMS[form]
    codec = IndexCodec(form=key_form, key_dim=key_dim, head_count=heads)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.full((PAGES, codec.page_bytes + 12), 0xFF, dtype=torch.uint8)
    pages = whole[:, 4 : 4 + codec.page_bytes]
    dense = torch.full((PAGES, codec.page_bytes), 0xFF, dtype=torch.uint8)
    order = torch.randperm(PAGES, generator=generator)[: -(-max(LENGTHS) // 64)]
    position = torch.arange(max(LENGTHS))
    plain = torch.randn(len(position), key_dim, generator=generator)
    row_ids = order[position // 64] * 64 + position % 64
    reference.write_keys(dense, row_ids, reference.encode_keys(plain, codec), codec)
    pages.copy_(dense)
    table = torch.full((len(LENGTHS), len(order) + 2), -1, dtype=torch.int32)
    for q, length in enumerate(LENGTHS):
        used = -(-length // 64)
        table[q, :used] = order[:used]
    queries = torch.randn(len(LENGTHS), heads, key_dim, generator=generator).to(dtype)
    weights = torch.randn(len(LENGTHS), heads, generator=generator)
    return Case(codec, queries, weights, pages, table, torch.tensor(LENGTHS, dtype=torch.int32))


def exact(case: Case) -> torch.Tensor:
    want = torch.full((len(LENGTHS), case.table.shape[1] * 64), -math.inf, dtype=torch.float64)
    for q, length in enumerate(LENGTHS):
        position = torch.arange(length)
        row_ids = case.table[q].long()[position // 64] * 64 + position % 64
        keys = reference.read_keys(case.pages.contiguous(), row_ids, case.codec)
        form = torch.float32 if case.codec.form == "f32" else torch.float8_e4m3fn
        dots = case.queries[q].double() @ keys.values.view(form).double().T
        total = (case.weights[q].double()[:, None] * dots.clamp(min=0)).sum(dim=0)
        want[q, :length] = total * keys.scales.double()
    return want


def same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    assert torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


@pytest.mark.parametrize("form", FORMS)
def test_logits_agree(ops: Ops, form: str) -> None:
    for heads, key_dim in [(heads, 128) for heads in HEADS] + [(3, 4), (8, 36), (5, 64)]:
        case = make(form, heads=heads, key_dim=key_dim)
        want = exact(case)
        great = want[want.isfinite()].abs().max().item()
        ours = case.run(ops.index_logits).double()
        torch.testing.assert_close(ours, want, atol=1e-6 * great, rtol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", [3, 8, 33])
def test_bits_depend_on_the_query_and_its_keys_alone(ops: Ops, form: str, heads: int) -> None:
    case = make(form, heads=heads)
    want = case.run(ops.index_logits)
    for _ in range(20 if ops is not reference and heads == 3 else 2):
        same_bits(case.run(ops.index_logits), want)
    for threads in (2, 7):
        same_bits(case.run(ops.index_logits, threads=threads), want)
    turn = torch.tensor([4, 2, 0, 1, 3])
    names = ("queries", "weights", "table", "lengths")
    turned = {name: getattr(case, name)[turn] for name in names}
    same_bits(case.run(ops.index_logits, **turned), want[turn])
    at = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))
    moved = torch.empty_like(case.pages)
    moved[at] = case.pages
    table = torch.where(case.table < 0, -1, at[case.table.long()]).int()
    same_bits(case.run(ops.index_logits, pages=moved, table=table), want)
    wide = torch.full((5, want.shape[1] + 9), 7.0)
    out = wide[:, 3 : 3 + want.shape[1]]
    assert case.run(ops.index_logits, out=out) is out
    same_bits(out, want)
    assert (wide[:, :3] == 7).all()
    assert (wide[:, -6:] == 7).all()


def crowd(form: str, heads: int, *, key_dim: int = 128) -> Case:
    """Queries of several requests, as steps and prompt chunks ask them: their own lengths in any
    order, also across the end of a page, over equal tables, or some that part in a later page."""
    case = make(form, heads=heads, key_dim=key_dim)
    order = case.table[-1, :65]
    parted, last = order[:9].clone(), order[:9].clone()
    parted[3], last[8] = order[20], order[30]
    asked = [(order, range(300, 330)), (order[:9], [64, 0, 1, 63, 65, 128, 129]), (order, [513])]
    asked += [(parted, [513, 512]), (last, [513, 512]), (order, [513, 4097, 4096, 4095])]
    rows = [(table, length) for table, lengths in asked for length in lengths]
    table = torch.full((len(rows), 66), -1, dtype=torch.int32)
    for q, (pages, length) in enumerate(rows):
        used = -(-length // 64)
        table[q, :used] = pages[:used]
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(len(rows), heads, key_dim, generator=generator)
    return Case(
        codec=case.codec,
        queries=queries.to(FORMS[form][1]),
        weights=torch.randn(len(rows), heads, generator=generator),
        pages=case.pages,
        table=table,
        lengths=torch.tensor([length for _, length in rows], dtype=torch.int32),
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "key_dim"), [(3, 128), (8, 36), (8, 128), (33, 64)])
def test_a_query_among_others_gets_the_bits_that_it_gets_alone(
    ops: Ops, form: str, heads: int, key_dim: int
) -> None:
    case = crowd(form, heads, key_dim=key_dim)
    names = ("queries", "weights", "table", "lengths")
    alone = [
        {name: getattr(case, name)[q : q + 1] for name in names} for q in range(len(case.table))
    ]
    want = torch.cat([case.run(ops.index_logits, **each) for each in alone])
    assert (want.isneginf().sum(dim=1) == want.shape[1] - case.lengths).all()
    has_threads = ops is not reference
    for threads in (1, 3) if has_threads else (1,):
        same_bits(case.run(ops.index_logits, threads=threads), want)
    wide = case.queries.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]
    same_bits(case.run(ops.index_logits, queries=wide), want)
    for threads in (1, 3, 16) if has_threads else (1,):
        chosen = case.run(ops.index_top_k, k=300, threads=threads)
        assert torch.equal(chosen, ops.top_k(want, case.lengths, k=300))


@pytest.mark.parametrize("form", ["fp8 under fp8", "fp8 under f32"])
def test_every_code_of_a_key_counts_for_what_it_is(ops: Ops, form: str) -> None:
    """A query that looks at one value of the keys reads it; NaN spoils only its key."""
    codec = IndexCodec(form="fp8", key_dim=128, head_count=1)
    codes = (torch.arange(64 * 128) % 256).to(torch.uint8)
    codes[(codes & 127) == 127] = 1
    page = torch.cat([codes, torch.ones(64).view(torch.uint8)])
    broken = page.clone()
    broken[[5 * 128 + 7, 40 * 128]] = torch.tensor([127, 255], dtype=torch.uint8)
    looks = torch.cat([torch.eye(128), -torch.eye(128)])[:, None]
    table = torch.zeros(256, 1, dtype=torch.int32)
    given = (looks.to(FORMS[form][1]), torch.ones(256, 1), torch.stack([page, broken]))
    lengths = torch.full((256,), 64, dtype=torch.int32)
    values = codes.view(torch.float8_e4m3fn).float().view(64, 128).T
    want = torch.cat([values, -values]).clamp(min=0)
    assert torch.equal(ops.index_logits(*given, table, lengths, codec), want)
    want[:, [5, 40]] = math.nan
    ours = ops.index_logits(*given, table + 1, lengths, codec)
    torch.testing.assert_close(ours, want, atol=0, rtol=0, equal_nan=True)


@needs_native
def test_equal_rows_of_a_table_are_one_row() -> None:
    ops, case = backend.ops("cpu"), crowd("fp8 under bf16", 8)
    table = case.table[-3:-2].expand(len(case.table), -1)
    want = case.run(ops.index_logits, table=table.contiguous())
    same_bits(case.run(ops.index_logits, table=table), want)


@pytest.mark.parametrize("form", FORMS)
def test_both_in_one_are_one_after_the_other(ops: Ops, form: str) -> None:
    case = make(form)
    logits = case.run(ops.index_logits)
    for k in (1, 64, 300, 2048, 5000):
        want = ops.top_k(logits, case.lengths, k=k)
        for threads in (1, 3, 9):
            assert torch.equal(case.run(ops.index_top_k, k=k, threads=threads), want)
    chosen, scores = case.run(ops.index_scored, k=64)
    assert torch.equal(chosen, ops.top_k(logits, case.lengths, k=64))
    same_bits(scores.where(logits > -math.inf, logits), logits)
    out = torch.empty_like(want)
    assert case.run(ops.index_top_k, k=5000, out=out, lengths=case.lengths.long()) is out
    assert torch.equal(out, want)


def test_index_bad_input(ops: Ops) -> None:
    case = make("fp8 under fp8")
    out, chosen = torch.full((5, 67 * 64), 7.0), torch.full((5, 9), 7, dtype=torch.int32)
    outside = case.table.clone()
    outside[3, 2] = PAGES
    for changes, says in (
        ({"table": outside}, rf"page_table holds \d+..{PAGES}, outside 0..{PAGES - 1}"),
        ({"lengths": case.lengths * 2}, "lengths holds 0..8194, outside 0..4288"),
        ({"lengths": case.lengths - 1}, "lengths holds -1..4096"),
        ({"queries": case.queries[:, :4]}, r"weights has shape \(5, 5\), must be \(5, 4\)"),
    ):
        if not says_so(ops, says):
            continue
        with pytest.raises(BadInput, match=says):
            case.run(ops.index_logits, out=out, **changes)
        with pytest.raises(BadInput, match=says):
            case.run(ops.index_top_k, k=9, out=chosen, **changes)
    with pytest.raises(BadInput, match=r"out has shape \(5, 4224\), must be \(5, 4288\)"):
        case.run(ops.index_logits, out=out[:, :-64])
    with pytest.raises(BadInput, match=r"out has shape \(5, 9\), must be \(5, 8\)"):
        case.run(ops.index_top_k, k=8, out=chosen)
    with pytest.raises(BadInput, match="k is 0"):
        case.run(ops.index_top_k, k=0)
    assert (out == 7).all()
    assert (chosen == 7).all()


# ---- top-k at size ----


def hard_lists(count: int) -> dict[str, np.ndarray]:
    """What could mislead a guess from a sample, a histogram of bits, or a comparison of floats."""
    rng = np.random.default_rng(count)
    normal = rng.standard_normal(count, dtype=np.float32)
    hidden = normal - np.float32(1000) * (np.arange(count) % 7 == 3)
    seen = normal.copy()
    seen[np.arange(1024) * count // 1024] += 1000  # what a sample in even steps looks at
    unseen = normal + 1000
    unseen[np.arange(1024) * count // 1024] -= 2000
    specials = normal.copy()
    specials[rng.integers(0, count, count // 50 + 1)] = np.nan
    specials[rng.integers(0, count, count // 50 + 1)] = np.inf
    specials[rng.integers(0, count, count // 9 + 1)] = -np.inf
    bits = rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    zeros = np.copysign(np.zeros(count, np.float32), normal)
    tiny = (rng.integers(-3, 4, count) * np.float32(1e-45)).astype(np.float32)
    return {
        "normal": normal, "few levels": np.round(normal * 2), "equal": np.full_like(normal, 3),
        "rising": np.sort(normal), "falling": -np.sort(normal), "hidden": hidden, "seen": seen,
        "unseen": unseen, "specials": specials, "bits": bits, "zeros": zeros, "tiny": tiny,
        "near": 1 + normal * np.float32(1e-6), "nan": np.full_like(normal, np.nan),
    }  # fmt: skip


def greatest(values: np.ndarray, k: int) -> np.ndarray:
    """By sorting: NaN first, then by value, then by position."""
    is_nan = np.isnan(values)
    order = np.lexsort((np.arange(len(values)), -np.where(is_nan, 0, values), ~is_nan))
    return np.sort(order[:k])


@pytest.mark.parametrize(
    "count", [17, 1000, 4096, 20_011, pytest.param(131_072, marks=pytest.mark.slow)]
)
def test_top_k_is_exact_for_hard_lists(ops: Ops, count: int) -> None:
    lists = hard_lists(count)
    logits = torch.from_numpy(np.stack([*lists.values()]))
    lengths = torch.full((len(lists),), count, dtype=torch.int32)
    for k in {1, count // 64 + 1, min(2048, count - 1), count - 1, count, count + 5}:
        ours = ops.top_k(logits, lengths, k=k)
        for (name, values), row in zip(lists.items(), ours.numpy(), strict=True):
            assert np.array_equal(row[: min(k, count)], greatest(values, k)), (name, k)
            assert (row[count:] == -1).all()
    assert torch.equal(ops.top_k(logits, lengths, k=k, threads=4), ours)


@needs_native
def test_top_k_shapes() -> None:
    ops = backend.ops("cpu")
    logits = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([400, 0, 33])
    want = reference.top_k(logits, lengths, k=50)
    wide = torch.zeros(6, 450)
    wide[::2, 20:420] = logits
    assert torch.equal(ops.top_k(wide[::2, 20:420], lengths, k=50), want)
    assert torch.equal(ops.top_k(logits.T.contiguous().T, lengths, k=50), want)
    out = torch.full((3, 50), 7, dtype=torch.int32)
    for bad, says in ((out.long(), "out has type"), (torch.cat([out, out], 1)[:, ::2], "out")):
        with pytest.raises(BadInput, match=says):
            ops.top_k(logits, lengths, k=50, out=bad)
    with pytest.raises(BadInput, match="threads is -1"):
        ops.top_k(logits, lengths, k=50, threads=-1)
    with pytest.raises(BadInput, match=r"lengths holds 1\.\.401, outside"):
        ops.top_k(logits, lengths.int() + 1, k=50, out=out)
    assert (out == 7).all()
    assert ops.top_k(logits, lengths, k=50, out=out) is out
    assert torch.equal(out, want)


@needs_native
def test_native_with_room_given_torch_makes_nothing() -> None:
    ops, case = backend.ops("cpu"), make("fp8 under fp8")
    logits = case.run(ops.index_logits)
    chosen = ops.top_k(logits, case.lengths, k=40)
    with Recorded() as recorded:
        case.run(ops.index_logits, out=logits)
        ops.top_k(logits, case.lengths, k=40, out=chosen)
        case.run(ops.index_top_k, k=40, out=chosen)
    assert recorded.calls == []


@needs_native
def test_native_lets_the_gil_go() -> None:
    ops, case = backend.ops("cpu"), make("fp8 under fp8", heads=64)
    assert another_thread_runs_during(lambda: case.run(ops.index_top_k, k=2048))
