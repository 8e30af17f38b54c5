"""Prompts select their keys by bounds where that is faster: the selection is the exact one."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ess.kernels.reference.keys import write_keys
from ess.layout import IndexCodec
from ess.units import PAGE_ROWS, div_ceil
from tests.kernels.sets import cpu, reference

COUNT = 70  # queries of one prompt: more than a run holds


def prompt(form: str, heads: int, dim: int, length: int, *, seed: int = 0, spread: float = 1.0):
    """Queries, weights, pages in shuffled places, their table, lengths one behind the other."""
    made = torch.Generator().manual_seed(seed)
    codec = IndexCodec(form=form, key_dim=dim, head_count=heads)
    page_count = div_ceil(length, PAGE_ROWS)
    pages = torch.full((page_count + 3, codec.page_bytes), 0xFF, dtype=torch.uint8)
    table = torch.randperm(page_count + 3, generator=made)[:page_count].int()
    at = torch.arange(length)
    row_ids = table[at // PAGE_ROWS].long() * PAGE_ROWS + at % PAGE_ROWS
    values = torch.randn(length, dim, generator=made) * spread + torch.randn(dim, generator=made)
    write_keys(pages, row_ids, reference.encode_keys(values, codec), codec)
    queries = torch.randn(COUNT, heads, dim, generator=made)
    weights = torch.randn(COUNT, heads, generator=made)
    lengths = torch.arange(length - COUNT, length, dtype=torch.int32) + 1
    if form == "fp8":
        queries = queries.bfloat16()
    return codec, queries, weights, pages, table.expand(COUNT, -1), lengths


def by_logits(codec, queries, weights, pages, table, lengths, k: int) -> torch.Tensor:
    logits = cpu.index_logits(queries, weights, pages, table, lengths, codec)
    return cpu.top_k(logits, lengths, k=k)


def selected(codec, *call, k: int, threads: int = 1) -> torch.Tensor:
    return cpu.index_top_k(*call, codec, k=k, threads=threads)


@pytest.mark.parametrize("form", ["fp8", "f32"])
@pytest.mark.parametrize(
    ("heads", "dim", "length", "k"),
    [
        (8, 128, 4099, 16),
        (1, 64, 1000, 3),
        (3, 64, 2050, 7),
        (20, 128, 3000, 33),
        (64, 256, 640, 9),
    ],
)
def test_it_is_the_top_k_of_the_logits(form, heads, dim, length, k):
    call = prompt(form, heads, dim, length)
    wanted = by_logits(*call, k=k)
    for threads in (1, 2):
        assert torch.equal(selected(*call, k=k, threads=threads), wanted)


@pytest.mark.parametrize("form", ["fp8", "f32"])
def test_a_slow_sum_agrees(form):
    """Where float32 sums may rank two keys the other way, they are nearly tied."""
    codec, *call = prompt(form, 4, 64, 1100)
    got, logits = selected(codec, *call, k=8), reference.index_logits(*call, codec)
    least = logits.gather(1, got.long()).amin(1)
    assert (logits.topk(8).values[:, -1] - least < 1e-3).all()


@pytest.mark.parametrize("form", ["fp8", "f32"])
def test_equal_keys_go_to_the_lowest_position(form):
    """No bound can tell them apart, and no list can hold them."""
    codec, *call = prompt(form, 8, 128, 6000, spread=0.0)
    got = selected(codec, *call, k=16)
    assert torch.equal(got, by_logits(codec, *call, k=16))
    assert torch.equal(got, torch.arange(16, dtype=torch.int32).expand(COUNT, -1))


@pytest.mark.parametrize("form", ["fp8", "f32"])
@pytest.mark.parametrize("broken", ["query", "weight", "keys", "infinite", "huge", "zero"])
def test_numbers_that_break_bounds(form, broken):
    codec, queries, weights, pages, table, lengths = prompt(form, 8, 128, 4099)
    if broken == "query":
        queries[5, 2, 7] = torch.nan
    elif broken == "weight":
        weights[5, 2] = torch.nan
    elif broken == "infinite":
        queries[5, 2, 7], weights[6, 1] = torch.inf, -torch.inf
    elif broken == "huge":
        weights *= 1e37
    elif broken == "zero":
        queries[:40], weights[40:] = 0, 0
    else:
        values = pages[table[0].long(), : PAGE_ROWS * codec.value_bytes]
        values[3, :300] = 0xFF
        pages[table[0].long(), : PAGE_ROWS * codec.value_bytes] = values
    call = queries, weights, pages, table, lengths
    assert torch.equal(selected(codec, *call, k=16), by_logits(codec, *call, k=16))


@pytest.mark.parametrize("form", ["fp8", "f32"])
def test_who_else_asks_changes_nothing(form):
    codec, queries, weights, pages, table, lengths = prompt(form, 8, 128, 4099)
    whole = selected(codec, queries, weights, pages, table, lengths, k=16)
    for first, last in ((0, 1), (3, 12), (11, 64), (1, 70)):
        some = slice(first, last)
        part = queries[some], weights[some], pages, table[some], lengths[some]
        assert torch.equal(selected(codec, *part, k=16), whole[some])
    apart = torch.empty(COUNT, 11, 2 * codec.key_dim, dtype=queries.dtype)[:, :8, : codec.key_dim]
    apart.copy_(queries)
    for _ in range(20):
        again = selected(codec, apart, weights, pages, table, lengths, k=16)
        assert torch.equal(again, whole)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_no_screen_takes_has_the_logits_of_few_queries_in_memory():
    """Where a table is wide, queries come in long runs, for a screen; those of shorter contexts do
    not, or each thread would keep the logits of all of them."""
    k, length = 16_384, 131_000
    codec, queries, weights, pages, table, lengths = prompt("f32", 1, 64, length)
    assert 12 * 4 * length < 8 << 20 < 32 << 20 < COUNT * 4 * length
    call = codec, queries, weights, pages, F.pad(table, (0, 9)), lengths
    before = resident_bytes()
    selected(*call, k=k)
    assert resident_bytes() - before < (16 << 20) + COUNT * k * 4
