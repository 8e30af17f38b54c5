"""Rows of four tokens each: `ess.Offload` against plain selection attention.

A token brings the row that it is the last token of. Drafts bring some too, of which none to all
stay.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ess
from ess.errors import BadInput, BadState
from ess.kernels.backend import ops

RATE, DIM, TOP_K, HEADS, LAYERS = 4, 32, 12, 3, 2
ARENAS = {"smallest": 2 * 64, "tight": 2 * 128, "ample": 2 * 448}
LAYOUT = ess.ModelLayout(
    name="rows apart",
    layer_count=LAYERS,
    groups=((0,), (1,)),
    row=ess.RowCodec(form="f32", latent_dim=DIM, rope_dim=0),
    index=None,
    top_k=TOP_K,
    slot_floor=16,
    row_tokens=RATE,
)


class Line:
    """A sequence, beside it all its rows, and how many of its tokens are accepted."""

    def __init__(self, offload: ess.Offload, seed: int) -> None:
        self.noise = torch.Generator().manual_seed(seed)
        self.sequence = offload.open([0], reuse_max=0)
        self.rows = torch.empty(LAYERS, 0, DIM)
        self.length = 0

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.noise)

    def seen(self, count: int) -> list[int]:
        held = self.length // RATE
        return [(self.length + n + 1) // RATE - held for n in range(count)]

    def chosen(self, count: int) -> Tensor:
        """Some entries for each query among those that it may select, ascending."""
        selection = torch.full((count, TOP_K), -1, dtype=torch.int32)
        for query, seen in enumerate(self.seen(count)):
            there = self.length // RATE + seen
            picked = torch.randperm(there, generator=self.noise)[:TOP_K].sort().values
            selection[query, : len(picked)] = picked.int()
        return selection


def attend(queries: Tensor, rows: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    return ops("cpu").attend(queries, rows, codes, LAYOUT.row, scale=DIM**-0.5)


def expected(queries: Tensor, rows: Tensor, selection: Tensor) -> Tensor:
    held = rows.contiguous().view(torch.uint8)
    return attend(queries, held, selection)[0]


Way = Callable[[ess.Offload, ess.Step, int, Tensor, Tensor], Tensor]


def in_one_pass(
    offload: ess.Offload, step: ess.Step, layer: int, queries: Tensor, selection: Tensor
) -> Tensor:
    """NONE: wait, then attend all of it; of rows in place by their codes."""
    where, memory = step.resolve(layer, selection, waits=True).wait(), offload.memory(layer)
    return ops("cpu").attend(
        queries, memory.slots, where.slots, LAYOUT.row, placed=memory.host, scale=DIM**-0.5
    )[0]


def in_two_passes(
    offload: ess.Offload, step: ess.Step, layer: int, queries: Tensor, selection: Tensor
) -> Tensor:
    """DA: what is here, then what was fetched."""
    return _merged(offload, step, layer, queries, selection, range(len(queries)))


def in_parts(
    offload: ess.Offload, step: ess.Step, layer: int, queries: Tensor, selection: Tensor
) -> Tensor:
    """DBA: the batch in two parts."""
    middle = (len(queries) + 1) // 2
    parts = [range(middle), range(middle, len(queries))]
    outs = [_merged(offload, step, layer, queries, selection, part) for part in parts if len(part)]
    return torch.cat(outs)


def located(
    offload: ess.Offload, step: ess.Step, layer: int, queries: Tensor, selection: Tensor
) -> Tensor:
    """RESIDENT, where all of it is; else as NONE."""
    slots = step.locate_all(layer, selection)
    if slots is None:
        return in_one_pass(offload, step, layer, queries, selection)
    return attend(queries, offload.memory(layer).slots, slots)[0]


def _merged(
    offload: ess.Offload,
    step: ess.Step,
    layer: int,
    queries: Tensor,
    selection: Tensor,
    part: range,
) -> Tensor:
    mine, memory = queries[part.start : part.stop], offload.memory(layer)
    where = step.resolve(layer, selection[part.start : part.stop].contiguous(), queries=part)
    hit, placed = attend(mine, memory.slots, where.hit), attend(mine, memory.host, where.place)
    return ess.merge(hit, placed, attend(mine, memory.slots, where.wait().miss)).out


WAYS: dict[str, Way] = {
    "resident": located,
    "none": in_one_pass,
    "da": in_two_passes,
    "dba": in_parts,
}


def opened(arena: str) -> ess.Offload:
    return ess.Offload.create(
        LAYOUT,
        slot_bytes=ARENAS[arena] * LAYOUT.row_bytes,
        host_bytes="1MiB",
        length_max=2048,
        poison=True,
    )


def advance(
    offload: ess.Offload, lines: list[Line], counts: list[int], kept: list[int], way: Way
) -> None:
    """One step; `kept` tokens of each line stay."""
    rows = [line.seen(count)[-1] for line, count in zip(lines, counts, strict=True)]
    step = offload.begin([line.sequence for line in lines], query_counts=counts)
    assert [*step.row_counts] == rows
    places = [range(line.length, line.length + n) for line, n in zip(lines, counts, strict=True)]
    assert step.positions.tolist() == [place for each in places for place in each]
    made = [line.drawn(LAYERS, count, DIM) for line, count in zip(lines, rows, strict=True)]
    for layer in range(LAYERS):
        step.append(layer, torch.cat([each[layer] for each in made]).view(torch.uint8))
        queries = [line.drawn(count, HEADS, DIM) for line, count in zip(lines, counts, strict=True)]
        chosen = [line.chosen(count) for line, count in zip(lines, counts, strict=True)]
        out = way(offload, step, layer, torch.cat(queries), torch.cat(chosen))
        want = [
            expected(asked, torch.cat((line.rows[layer], new[layer])), picked)
            for asked, line, new, picked in zip(queries, lines, made, chosen, strict=True)
        ]
        assert float((out - torch.cat(want)).abs().max()) < 1e-5
    offload.check()
    accepted = [
        (line.length + tokens) // RATE - line.length // RATE
        for line, tokens in zip(lines, kept, strict=True)
    ]
    step.commit(accepted=kept)
    for line, new, rows_kept, tokens in zip(lines, made, accepted, kept, strict=True):
        line.rows = torch.cat((line.rows, new[:, :rows_kept]), 1)
        line.length += tokens
        assert line.sequence.length == line.length // RATE == line.rows.shape[1]
        assert line.sequence.text_length == line.length


@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("way", WAYS)
def test_rows_counted_apart_are_attended_and_kept(way: str, arena: str) -> None:
    """A prompt in odd pieces, single tokens, drafts of which none to all stay; two sequences at
    different offsets of their windows."""
    with opened(arena) as offload:
        lines = [Line(offload, 1), Line(offload, 2)]
        advance(offload, lines[:1], [3], [3], WAYS[way])
        for first, second in ((37, 50), (41, 6), (60, 61), (29, 88), (90, 1)):
            advance(offload, lines, [first, second], [first, second], WAYS[way])
        for number in range(24):
            counts, kept = [1 + number % 6, 1], [1 + number % (1 + number % 6), 1]
            advance(offload, lines, counts, kept, WAYS[way])
        fork = Line(offload, 3)
        fork.sequence.close()
        fork.sequence, fork.rows, fork.length = (
            lines[0].sequence.fork(),
            lines[0].rows.clone(),
            lines[0].length,
        )
        lines[1].sequence.preempt()
        for _ in range(5):
            advance(offload, [lines[0], fork], [2, 3], [2, 1], WAYS[way])
        lines[1].sequence.resume()
        advance(offload, [*lines, fork], [4, 4, 4], [4, 4, 4], WAYS[way])
        if arena == "smallest":
            assert int(offload.stats().evicted_count.sum()) > 50
        stored = int(offload.stats().stored_bytes.sum())
        assert stored <= LAYERS * LAYOUT.row_bytes * sum(line.length for line in (*lines, fork))
        for line in (*lines, fork):
            line.sequence.close()
        offload.check()


def test_what_does_not_fit_is_refused() -> None:
    with opened("tight") as offload:
        line = offload.open([0], length_max=9)
        for count in (0, 10):
            with pytest.raises(
                BadInput, match=f"{count} tokens after 0, must be at least 1 and end"
            ):
                offload.begin([line], query_counts=[count])
        step = offload.begin([line], query_counts=[6])
        with pytest.raises(BadInput, match=r"rows has shape \[6, 128\], must be \[1, 128\]"):
            step.append(0, torch.zeros(6, 128, dtype=torch.uint8))
        with pytest.raises(BadState, match="layer 0 has rows of 0 of 1"):
            step.commit(accepted=[4])
        with pytest.raises(BadInput, match=r"accepted is 7, must be 0\.\.6"):
            step.commit(accepted=[7])
        step.commit(accepted=[3])
        assert (line.length, line.text_length) == (0, 3)
        with pytest.raises(BadInput, match="7 tokens after 3, must be at least 1 and end within 9"):
            offload.begin([line], query_counts=[7])
        line.close()
        offload.check()


def test_rejected_drafts_take_no_room_before_the_host_learns() -> None:
    """The last row of a sequence is brought twice, by two steps under way: its page is full."""
    with opened("tight") as offload:
        line = offload.open([0], length_max=64 * RATE, reuse_max=0)
        row = torch.ones(1, 4 * DIM, dtype=torch.uint8)
        before = offload.begin([line], query_counts=[63 * RATE])
        for layer in range(LAYERS):
            before.append(layer, row.expand(63, -1).contiguous())
        before.commit(accepted=[63 * RATE])
        steps, free = [], offload.stats().free_index_page_count
        for count, kept in ((4, 1), (3, 3)):
            steps.append(step := offload.begin([line], query_counts=[count]))
            for layer in range(LAYERS):
                step.append(layer, row)
            step.seal(accepted=[kept])
        for step, kept in zip(steps, (1, 3), strict=True):
            step.learn(accepted=[kept])
        assert (line.length, line.text_length) == (64, 64 * RATE)
        assert offload.stats().free_index_page_count == free
        line.close()
        offload.check()
