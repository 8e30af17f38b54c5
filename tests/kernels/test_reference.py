"""The reference ops against loops over Python floats, and every other backend against both."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ess.errors import BadInput
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import IndexCodec
from tests.kernels.sets import SETS, op_set, plain_attention, reference, says_so

NAN, INF = math.nan, math.inf


@pytest.fixture(params=SETS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return op_set(request.param)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# ---- attention ----


def attention_by_loops(
    queries: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, latent_dim: int, scale: float
) -> tuple[list[list[list[float]]], list[list[float]]]:
    outs, lses = [], []
    for query, named in zip(queries.tolist(), slots.tolist(), strict=True):
        keys = [rows[slot].tolist() for slot in named if slot >= 0]
        outs.append([attend_one(head, keys, latent_dim, scale)[0] for head in query])
        lses.append([attend_one(head, keys, latent_dim, scale)[1] for head in query])
    return outs, lses


def attend_one(
    head: list[float], keys: list[list[float]], latent_dim: int, scale: float
) -> tuple[list[float], float]:
    if not keys:
        return [0.0] * latent_dim, -INF
    weights = [math.exp(scale * math.fsum(map(float.__mul__, head, key))) for key in keys]
    total = math.fsum(weights)
    columns = zip(*keys, strict=True)
    out = [math.fsum(map(float.__mul__, weights, column)) / total for column in columns]
    return out[:latent_dim], math.log(total)


def attention_case(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Five queries: full, ragged, one key, none, and pads in between."""
    queries = torch.randn(5, 2, 12, generator=generator(seed))
    rows = torch.randn(30, 12, generator=generator(seed + 1))
    slots = torch.stack([torch.randperm(30, generator=generator(seed + q))[:9] for q in range(5)])
    slots[1, 5:] = slots[2, 1:] = slots[3] = slots[4, ::2] = -1
    return queries, rows, slots.int()


@pytest.mark.parametrize("seed", range(4))
def test_attention_is_the_loop(ops: Ops, seed: int) -> None:
    queries, rows, slots = attention_case(seed)
    ours = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    out, lse = attention_by_loops(queries, rows, slots, 8, 0.3)
    torch.testing.assert_close(ours.out, torch.tensor(out), atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.lse, torch.tensor(lse), atol=2e-6, rtol=0)
    assert ours.out.dtype == ours.lse.dtype == torch.float32


def test_rows_that_are_not_named_may_hold_anything(ops: Ops) -> None:
    queries, rows, slots = attention_case(7)
    want = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    named = slots[slots >= 0].unique().long()
    for poison in (NAN, INF):
        poisoned = torch.full_like(rows, poison)
        poisoned[named] = rows[named]
        same = plain_attention(ops, queries, poisoned, slots, latent_dim=8, scale=0.3)
        assert torch.equal(same.out, want.out)
        assert torch.equal(same.lse, want.lse)


def test_a_broken_row_that_is_named_is_seen(ops: Ops) -> None:
    queries, rows, slots = attention_case(7)
    rows[slots[1, 2]] = NAN
    ours = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    hit = (slots == slots[1, 2]).any(dim=1)
    assert ours.out[hit].isnan().all()
    assert ours.lse[hit].isnan().all()
    assert ours.out[~hit].isfinite().all()


def test_nothing_selected_is_an_empty_partial(ops: Ops) -> None:
    for rows, slots in (
        (torch.full((4, 12), NAN), torch.full((2, 3), -1)),
        (torch.zeros(4, 12), torch.zeros(2, 0, dtype=torch.int32)),
        (torch.zeros(0, 12), torch.full((2, 3), -1)),
    ):
        empty = plain_attention(ops, torch.ones(2, 2, 12), rows, slots, latent_dim=8, scale=1.0)
        assert torch.equal(empty.out, torch.zeros(2, 2, 8))
        assert torch.equal(empty.lse, torch.full((2, 2), -INF))


def test_one_key_returns_its_value(ops: Ops) -> None:
    queries, rows, _ = attention_case(3)
    slots = torch.arange(5, dtype=torch.int32)[:, None]
    ours = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    assert torch.equal(ours.out, rows[:5, None, :8].expand(5, 2, 8))
    want = 0.3 * torch.einsum("qhd,qd->qh", queries.double(), rows[:5].double())
    torch.testing.assert_close(ours.lse, want.float(), atol=0 if ops is reference else 1e-6, rtol=0)


def test_great_logits_do_not_overflow(ops: Ops) -> None:
    queries, rows, slots = attention_case(3)
    ours = plain_attention(ops, queries * 1e4, rows * 1e3, slots, latent_dim=8, scale=1.0)
    assert ours.out.isfinite().all()
    assert ours.lse[[0, 1, 2, 4]].isfinite().all()


def test_order_of_slots_and_layout_in_memory_do_not_matter(ops: Ops) -> None:
    queries, rows, slots = attention_case(11)
    want = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    shuffled = slots[:, torch.randperm(9, generator=generator(0))]
    wide_rows = torch.full((60, 14), NAN)
    wide_rows[::2, 1:13] = rows
    turned = queries.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    columns = shuffled.T.contiguous().T.long()
    ours = plain_attention(ops, turned, wide_rows[::2, 1:13], columns, latent_dim=8, scale=0.3)
    torch.testing.assert_close(ours.out, want.out, atol=1e-6, rtol=0)
    torch.testing.assert_close(ours.lse, want.lse, atol=1e-6, rtol=0)


def test_queries_do_not_see_each_other(ops: Ops) -> None:
    queries, rows, slots = attention_case(5)
    together = plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)
    for q in range(5):
        one = slice(q, q + 1)
        alone = plain_attention(ops, queries[one], rows, slots[one], latent_dim=8, scale=0.3)
        torch.testing.assert_close(alone.out, together.out[one], atol=1e-6, rtol=0)


def test_attention_bad_input(ops: Ops) -> None:
    queries, rows, slots = attention_case(0)
    for bad, says in (
        ((queries, rows, slots.masked_fill(slots == -1, 30)), r"slots holds 4..30, outside -1..29"),
        ((queries, rows, slots - 1), r"slots holds -2"),
        ((queries, rows, slots.float()), "slots has type torch.float32"),
        ((queries, rows, slots[:4]), r"slots has shape \(4, 9\), must be \(5, any\)"),
        ((queries, rows[:, :11], slots), r"queries has shape \(5, 2, 12\), must be \(any, any, 11"),
    ):
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                plain_attention(ops, *bad, latent_dim=8, scale=1.0)


# ---- index logits ----

INDEX_CODECS = {
    "ue8m0": IndexCodec(key_dim=8, head_count=3),
    "f32-scale": IndexCodec(key_dim=8, head_count=3, scale_format="f32"),
    "f32": IndexCodec(form="f32", key_dim=8, head_count=3),
}
LENGTHS = [0, 1, 64, 65, 150]


class IndexCase:
    """Five queries over pages in no order; what no query may see is 0xFF, which is NaN."""

    def __init__(self, codec: IndexCodec) -> None:
        self.codec = codec
        self.table = torch.full((5, 3), -1, dtype=torch.int32)
        free = iter(torch.randperm(12, generator=generator(2)).tolist())
        self.pages = torch.full((12, codec.page_bytes), 0xFF, dtype=torch.uint8)
        self.lengths = torch.tensor(LENGTHS)
        self.plain = [torch.randn(n, codec.key_dim, generator=generator(n)) for n in LENGTHS]
        for q, length in enumerate(LENGTHS):
            for page in range(-(-length // 64)):
                self.table[q, page] = next(free)
            position = torch.arange(length)
            row_ids = self.table[q].long()[position // 64] * 64 + position % 64
            keys = reference.encode_keys(self.plain[q], codec)
            reference.write_keys(self.pages, row_ids, keys, codec)
        queries = torch.randn(5, 3, codec.key_dim, generator=generator(8))
        self.queries = queries if codec.form == "f32" else queries.to(torch.float8_e4m3fn)
        self.weights = torch.randn(5, 3, generator=generator(9))

    def run(self, ops: Ops) -> torch.Tensor:
        return ops.index_logits(
            self.queries, self.weights, self.pages, self.table, self.lengths, self.codec
        )

    def by_loops(self) -> torch.Tensor:
        want = torch.full((5, 192), -INF)
        for q, length in enumerate(LENGTHS):
            for position in range(length):
                want[q, position] = self.one(q, position)
        return want

    def one(self, q: int, position: int) -> float:
        keys = reference.encode_keys(self.plain[q][position : position + 1], self.codec)
        form = torch.float32 if self.codec.form == "f32" else torch.float8_e4m3fn
        key = keys.values.view(form).float()[0].tolist()
        total = 0.0
        heads = self.queries[q].float().tolist()
        for query, weight in zip(heads, self.weights[q].tolist(), strict=True):
            total += weight * max(0.0, math.fsum(map(float.__mul__, query, key)))
        return total * float(keys.scales[0])


@pytest.fixture(params=INDEX_CODECS.values(), ids=INDEX_CODECS)
def case(request: pytest.FixtureRequest) -> IndexCase:
    return IndexCase(request.param)


def test_index_logits_are_the_loop(ops: Ops, case: IndexCase) -> None:
    torch.testing.assert_close(case.run(ops), case.by_loops(), atol=1e-6, rtol=1e-6)


def test_index_logits_are_near_the_keys_that_were_meant(ops: Ops, case: IndexCase) -> None:
    """Against the exact keys: what quantising costs is bounded, so scales are not swapped."""
    case_logits = case.run(ops)[4, :150]
    dots = (case.queries[4].float() @ case.plain[4].T).relu()
    exact = (case.weights[4][:, None] * dots).sum(dim=0)
    bound = 1e-6 if case.codec.form == "f32" else 0.06 * exact.abs().max().item() + 0.06
    torch.testing.assert_close(case_logits, exact, atol=bound, rtol=0)


def test_a_broken_key_in_sight_is_seen(ops: Ops, case: IndexCase) -> None:
    case.pages[case.table[2, 0], : case.codec.value_bytes] = 0xFF
    logits = case.run(ops)
    assert logits[2, 0].isnan()
    assert logits.isnan().sum() == 1


def test_index_bad_input(ops: Ops, case: IndexCase) -> None:
    for last, page, says in (
        (193, 0, r"lengths holds 0..193, outside 0..192"),
        (192, -1, r"page_table holds -1..\d+, outside 0..11"),
    ):
        case.lengths, case.table[4, 2] = torch.tensor([0, 1, 64, 65, last]), page
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                case.run(ops)
    case.weights = case.weights[:, :2]
    with pytest.raises(BadInput, match=r"weights has shape \(5, 2\), must be \(5, 3\)"):
        case.run(ops)


# ---- top-k ----


def top_k_by_sorting(logits: torch.Tensor, lengths: torch.Tensor, k: int) -> list[list[int]]:
    selection = []
    for row, length in zip(logits.tolist(), lengths.tolist(), strict=True):
        ranked = sorted(range(length), key=lambda position: (-row[position], position))[:k]
        selection.append(sorted(ranked) + [-1] * (k - len(ranked)))
    return selection


@pytest.mark.parametrize("k", [1, 2, 7, 20, 21, 50])
@pytest.mark.parametrize("levels", [1, 2, 3, 1000])
def test_top_k_is_the_sort(ops: Ops, k: int, levels: int) -> None:
    """Few levels make ties, a level of -inf among them; beyond the length lies the greatest."""
    rng = np.random.default_rng(k * levels)
    lengths = torch.tensor([0, 1, 2, 6, 7, 8, 19, 20, 20])
    logits = torch.from_numpy(rng.integers(0, levels, (9, 20)).astype(np.float32))
    logits[logits == 0] = -INF
    for q, length in enumerate(lengths.tolist()):
        logits[q, length:] = INF if q % 2 else NAN
    ours = ops.top_k(logits, lengths, k=k)
    assert ours.dtype == torch.int32
    assert ours.tolist() == top_k_by_sorting(logits, lengths, k)


def test_top_k_by_hand(ops: Ops) -> None:
    logits = torch.tensor([[3.0, 5.0, 3.0, 1.0, 5.0, 3.0, -0.0, 0.0]])
    for k, want in ((1, [1]), (2, [1, 4]), (3, [0, 1, 4]), (4, [0, 1, 2, 4])):
        assert ops.top_k(logits, torch.tensor([8]), k=k).tolist() == [want]
    assert ops.top_k(logits, torch.tensor([3]), k=5).tolist() == [[0, 1, 2, -1, -1]]
    zeros = ops.top_k(logits[:, 6:], torch.tensor([2]), k=1)
    assert zeros.tolist() == [[0]]


def test_top_k_large_with_ties(ops: Ops) -> None:
    logits = torch.randn(3, 5000, generator=generator(1)).mul(4).round()
    lengths = torch.tensor([5000, 3000, 2048])
    ours = ops.top_k(logits, lengths, k=2048)
    assert ours.tolist() == top_k_by_sorting(logits, lengths, 2048)
    strided = torch.stack([logits, logits], dim=2)[:, :, 0]
    assert torch.equal(ops.top_k(strided, lengths.int(), k=2048), ours)


def test_nan_in_sight_is_selected(ops: Ops) -> None:
    logits = torch.tensor([[1.0, 2.0, NAN, 3.0]])
    assert ops.top_k(logits, torch.tensor([4]), k=2).tolist() == [[2, 3]]


def test_top_k_bad_input(ops: Ops) -> None:
    logits = torch.zeros(2, 8)
    for lengths, k, says in (
        (torch.tensor([8, 9]), 2, r"lengths holds 8..9, outside 0..8"),
        (torch.tensor([8, -1]), 2, "lengths holds -1..8"),
        (torch.tensor([8]), 2, r"lengths has shape \(1,\), must be \(2\)"),
        (torch.tensor([8, 8]), 0, "k is 0"),
    ):
        if says_so(ops, says):
            with pytest.raises(BadInput, match=says):
                ops.top_k(logits, lengths, k=k)


def test_selection_attention_and_merge_join(ops: Ops) -> None:
    """A selection split into hits and misses, attended apart and merged, is the selection."""
    queries, rows, _ = attention_case(21)
    logits = torch.randn(5, 30, generator=generator(4))
    selection = ops.top_k(logits, torch.tensor([30, 12, 5, 1, 0]), k=10)
    resident = selection % 3 == 0

    def attend(slots: torch.Tensor) -> Partial:
        return plain_attention(ops, queries, rows, slots, latent_dim=8, scale=0.3)

    parts = [attend(selection.where(keep, -1)) for keep in (resident, ~resident)]
    merged, whole = ops.merge(*parts), attend(selection)
    torch.testing.assert_close(merged.out, whole.out, atol=1e-6, rtol=0)
    torch.testing.assert_close(merged.lse, whole.lse, atol=2e-6, rtol=0)
