"""A layer's Triton kernels in a captured graph, over memory that changes between replays."""

from __future__ import annotations

import math

import pytest
import torch

from ess.kernels.merge import Partial
from ess.layout import IndexCodec, RowCodec
from tests.kernels.sets import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

ROWS, KEYS = RowCodec(), IndexCodec(head_count=8)
QUERIES, HEADS, K, PAGES = 6, 16, 128, 40
REPLAYS = 1000


class Step:
    """Selection, then attention over resident and placed rows apart, then the merge."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        count, width = PAGES * 64, ROWS.latent_dim + ROWS.rope_dim
        values = torch.randn(count, width, generator=generator)
        rows = torch.empty(count, ROWS.row_bytes, dtype=torch.uint8)
        self.host = reference.encode_rows(values, ROWS, rows).pin_memory()
        self.slab = torch.full((count, ROWS.row_bytes), 0xFF, dtype=torch.uint8, device="cuda")
        self.pages = torch.zeros(PAGES, KEYS.page_bytes, dtype=torch.uint8)
        keys = reference.encode_keys(torch.randn(count, 128, generator=generator), KEYS)
        reference.write_keys(self.pages, torch.arange(count), keys, KEYS)
        self.pages = self.pages.cuda()
        self.table = torch.arange(PAGES, dtype=torch.int32).repeat(QUERIES, 1).cuda()
        self.lengths = torch.zeros(QUERIES, dtype=torch.int32, device="cuda")
        self.asked = torch.zeros(QUERIES, 8, 128, device="cuda").to(torch.float8_e4m3fn)
        self.weights = torch.zeros(QUERIES, 8, device="cuda")
        shape = QUERIES, HEADS, width
        self.queries = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.slot_of = torch.zeros(count, dtype=torch.int32, device="cuda")
        self.logits = torch.empty(QUERIES, count, device="cuda")
        self.selection = torch.empty(QUERIES, K, dtype=torch.int32, device="cuda")
        self.slots = torch.empty_like(self.selection)
        self.sides = [
            Partial(
                torch.empty(QUERIES, HEADS, ROWS.latent_dim, device="cuda"),
                torch.empty(QUERIES, HEADS, device="cuda"),
            )
            for _ in range(2)
        ]

    def change(self, seed: int) -> None:
        """Other queries and lengths; other rows resident, the rest named where the host has it."""
        generator = torch.Generator().manual_seed(seed)
        self.lengths.copy_(torch.randint(0, PAGES * 64 + 1, (QUERIES,), generator=generator))
        asked = torch.randn(QUERIES, 8, 128, generator=generator).to(torch.float8_e4m3fn)
        self.asked.view(torch.uint8).copy_(asked.view(torch.uint8))
        self.weights.copy_(torch.rand(QUERIES, 8, generator=generator))
        self.queries.copy_(torch.randn(self.queries.shape, generator=generator))
        row = torch.arange(PAGES * 64)
        is_resident = torch.rand(len(row), generator=generator) < 0.8
        at = torch.randperm(len(row), generator=generator)
        self.slot_of.copy_(torch.where(is_resident, at, -2 - row))
        self.slab.fill_(0xFF)
        self.slab[at[is_resident].cuda()] = self.host[is_resident].cuda()

    def run(self) -> None:
        from ess.kernels.cuda.triton.attend import attend_lists, close_up, merge_into
        from ess.kernels.cuda.triton.index import logits_into, top_k_into

        logits_into(
            self.asked, self.weights, self.pages, self.table, self.lengths, KEYS, out=self.logits
        )
        top_k_into(self.logits, self.lengths, out=self.selection)
        at = self.selection.clamp(min=0).long()
        rows = self.table.gather(1, at // 64) * 64 + at % 64
        self.slots.copy_(torch.where(self.selection < 0, -1, self.slot_of[rows]))
        for side, keep in zip(self.sides, (self.slots >= 0, self.slots < -1), strict=True):
            attend_lists(
                self.queries,
                self.slab,
                close_up(torch.where(keep, self.slots, -1)),
                ROWS,
                scale=0.05,
                placed=self.host,
                into=side,
                spare_sms=2,
            )
        merge_into(self.sides[0], self.sides[1], self.sides[0])

    def by_reference(self) -> Partial:
        logits = reference.index_logits(
            self.asked.cpu(), self.weights.cpu(), self.pages.cpu(), self.table.cpu(),
            self.lengths.cpu(), KEYS,
        )  # fmt: skip
        seen, ours = logits > -torch.inf, self.logits.cpu()
        torch.testing.assert_close(ours[seen], logits[seen], atol=1e-4, rtol=1e-5)
        selection = reference.top_k(self.logits.cpu(), self.lengths.cpu(), k=K)
        assert torch.equal(self.selection.cpu(), selection)
        queries = self.queries.cpu()
        return reference.attend(queries, self.host, selection, ROWS, scale=0.05)


def test_a_thousand_replays_follow_what_changes() -> None:
    step = Step()
    step.change(0)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for turn in range(REPLAYS):
        step.change(turn)
        graph.replay()
        if turn % 50 == 0:
            ours, want = step.sides[0], step.by_reference()
            torch.testing.assert_close(ours.out.cpu(), want.out, atol=6e-3, rtol=0)
            torch.testing.assert_close(ours.lse.cpu(), want.lse, atol=1e-5, rtol=1e-6)
    torch.cuda.synchronize()


def test_twenty_runs_are_the_same_bits() -> None:
    step = Step()
    step.change(7)
    step.run()
    first = [tensor.clone() for tensor in (*step.sides[0], step.selection, step.slots)]
    for _ in range(20):
        for side in step.sides:
            side.out.fill_(math.nan)
            side.lse.fill_(math.nan)
        step.run()
        again = (*step.sides[0], step.selection, step.slots)
        for each, other in zip(first, again, strict=True):
            assert torch.equal(each.view(torch.int32), other.view(torch.int32))


def test_rows_past_four_gibibytes() -> None:
    """Slots, host rows and the distance between the two matrices beyond 32 bits of bytes."""
    from ess.kernels import backend

    codec, count = RowCodec(form="f32"), 2_000_000
    rows = torch.zeros(count, codec.row_bytes, dtype=torch.uint8, device="cuda")
    placed = torch.zeros(count, codec.row_bytes, dtype=torch.uint8, pin_memory=True)
    rows[-1].view(torch.float32).fill_(3.0)
    placed[-1].view(torch.float32).fill_(5.0)
    queries = torch.zeros(2, 2, 576, device="cuda")
    slots = torch.tensor([[count - 1], [-1 - count]], dtype=torch.int32, device="cuda")
    ours = backend.ops("cuda").attend(queries, rows, slots, codec, placed=placed, scale=1.0)
    assert (ours.out[0] == 3).all()
    assert (ours.out[1] == 5).all()
