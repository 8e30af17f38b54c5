"""Which part of a pack a rank runs, where a team of ranks runs it together.

A pack's tokens are cut into one contiguous slice for each rank. Token by token work (projections,
rows, index keys, the output projection, the experts) is done by the rank that has the token, and
only by it, so no two ranks write the same row. Rows and keys go to memory that all ranks see.

    ByTokens   the indexer and the attention too run for the rank's own tokens; weights are whole.
               The ranks meet once per layer: no rank reads before all rows are there.
    ByHeads    the indexer runs for the rank's own tokens, the attention for its own heads and all
               tokens. Low-rank queries and selections are gathered, values change hands.

Why no rank reads a row before it is written, or after its page went to another text: in a layer a
rank writes, meets the others (`stored`), and only then reads this layer; the next layer is other
memory. Behind the last layer the ranks meet again (`done`), so when the owner goes on to close a
sequence, or starts a chunk that may reuse its pages, no rank still reads them. Rows count as stored
when the owner marks them, behind the meeting; nothing is published or sent before.

With ByTokens the last slice of a chunk sees the longest context. Of a chunk of n tokens behind s
others, shared by T ranks, the last rank scores (s + n - n / 2T) / (s + n / 2) times the mean number
of keys: 1.75 for T = 4 where a prompt begins, 1.08 behind four chunks, 1.01 behind 32. Only the
indexer feels it, and attention where s is below top-k; there both are a small part of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ess.engine.layers.batch import values
from ess.engine.prompt.pack import Computer, Pack, Span, packed
from ess.models.decoder import DecoderLayer
from ess.pool.warmup import WINDOW_MAX

if TYPE_CHECKING:
    from ess.comm.team import Team


@dataclass(frozen=True, slots=True)
class Work:
    """`spans` are run by all ranks together. This rank makes the rows of `mine`, of which `own[i]`
    belong to span i, and attends for the queries of `asked`."""

    spans: tuple[Span, ...]
    mine: Pack
    own: tuple[slice, ...]
    asked: Pack


class Share(Protocol):
    def work(self, computer: Computer, spans: Sequence[Span]) -> Work: ...

    def stored(self, work: Work, layer: int) -> None:
        """Returns when the layer's rows and keys of all spans are there."""

    def gathered(self, own: Tensor) -> Tensor:
        """From a line per token of `mine` to a line per token of `asked`."""

    def exchanged(self, work: Work, layer: DecoderLayer, attended: Tensor) -> Tensor:
        """From what was attended for the queries of `asked` to what the layer's output takes for
        the tokens of `mine`."""

    def windows(self, work: Work) -> list[Tensor]:
        """The windows of each span, int32 [groups, windows, k]."""

    def done(self) -> None:
        """Returns when no rank reads what the spans have."""


class Whole:
    """For a rank on its own. Rows that a sequence imports are marked at once."""

    def work(self, computer: Computer, spans: Sequence[Span]) -> Work:
        pack = packed(computer, spans)
        return Work(tuple(spans), pack, pack.places, pack)

    def stored(self, work: Work, layer: int) -> None:
        return

    def gathered(self, own: Tensor) -> Tensor:
        return own

    def exchanged(self, work: Work, layer: DecoderLayer, attended: Tensor) -> Tensor:
        return attended

    def windows(self, work: Work) -> list[Tensor]:
        return [_windows(work.asked, span) for span in work.spans]

    def done(self) -> None:
        return


class ByTokens(Whole):
    def __init__(self, team: Team) -> None:
        self._team = team

    def work(self, computer: Computer, spans: Sequence[Span]) -> Work:
        parts, own = cut(spans, self._team.rank, self._team.size)
        mine = packed(computer, parts)
        return Work(tuple(spans), mine, own, mine)

    def stored(self, work: Work, layer: int) -> None:
        self._team.barrier()
        for span in work.spans:
            span.sequence.mark_stored(layer, span.start, len(span.tokens))

    def windows(self, work: Work) -> list[Tensor]:
        """Gathers the windows of all slices; in the order of ranks they are in the order of the
        spans."""
        layout = work.mine.layout
        shape = 0, layout.group_count, layout.top_k
        none = torch.empty(shape, dtype=torch.int32)
        lines = [_windows(work.mine, span).transpose(0, 1) for span in work.mine.spans]
        together = self._team.all_gather(joined(lines, none).contiguous())
        counts = [min(WINDOW_MAX, len(span.tokens)) for span in work.spans]
        return [part.transpose(0, 1).contiguous() for part in torch.split(together, counts)]

    def done(self) -> None:
        self._team.barrier()


class ByHeads(ByTokens):
    """The rank's model has its own heads (`MlaShare`)."""

    def work(self, computer: Computer, spans: Sequence[Span]) -> Work:
        parts, own = cut(spans, self._team.rank, self._team.size)
        return Work(tuple(spans), packed(computer, parts), own, packed(computer, spans))

    def gathered(self, own: Tensor) -> Tensor:
        return self._team.all_gather(own.contiguous())

    def exchanged(self, work: Work, layer: DecoderLayer, attended: Tensor) -> Tensor:
        own = values(work.asked, layer, attended)
        size, count = self._team.size, len(own)
        slices = [own[_bounds(count, rank, size)].contiguous() for rank in range(size)]
        return torch.cat(self._team.all_to_all(slices), dim=1)

    def windows(self, work: Work) -> list[Tensor]:
        return [_windows(work.asked, span) for span in work.spans]


def own_count(count: int, rank: int, size: int) -> int:
    """How many of a pack's tokens a rank of a team runs."""
    own = _bounds(count, rank, size)
    return int(own.stop - own.start)


def cut(spans: Sequence[Span], rank: int, size: int) -> tuple[list[Span], tuple[slice, ...]]:
    """The parts of spans that lie in a rank's slice of all their tokens, and where the tokens of
    each span are in it."""
    mine = _bounds(sum(len(span.tokens) for span in spans), rank, size)
    parts: list[Span] = []
    own: list[slice] = []
    first = taken = 0
    for span in spans:
        count = len(span.tokens)
        begin = min(max(mine.start - first, 0), count)
        end = min(max(mine.stop - first, begin), count)
        if begin < end:
            parts.append(_part(span, begin, end))
        own.append(slice(taken, taken + end - begin))
        first, taken = first + count, taken + end - begin
    assert taken == mine.stop - mine.start, f"{taken} tokens of {mine}"
    return parts, tuple(own)


def _part(span: Span, begin: int, end: int) -> Span:
    return Span(
        sequence=span.sequence,
        start=span.start + begin,
        tokens=span.tokens[begin:end],
        following=span.following[begin:end],
        behind_count=len(span.tokens) - end,
    )


def joined(parts: Sequence[Tensor], none: Tensor) -> Tensor:
    """The lines of all parts together; `none` is an empty tensor."""
    return parts[0] if len(parts) == 1 else torch.cat([none, *parts])


def _bounds(count: int, rank: int, size: int) -> slice:
    assert 0 <= rank < size, f"rank {rank} of {size}"
    return slice(count * rank // size, count * (rank + 1) // size)


def _windows(pack: Pack, span: Span) -> Tensor:
    """The windows, read by the host, which plans the working set with them."""
    assert len(span.windows) == pack.layout.group_count, "a group without a window"
    lines = torch.stack([span.windows[group] for group in sorted(span.windows)])
    return lines.int().contiguous().cpu()
