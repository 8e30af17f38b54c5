"""A stage as a team of ranks, which run its micro-batches together (`engine.prompt.share`).

Member 0 owns the pools and the sequences and obeys the orders. For each micro-batch it sends the
others the tokens, positions and pages of each sequence. So they keep no state between
micro-batches, and never read or write a page that was freed in between; a sequence of 128K tokens
has 16 KB of page numbers, against a hidden state of megabytes.

Each member receives its slice of the hidden state from the same member of the stage before, and
sends its slice on. While nothing runs member 0 sends a sign of life from time to time (`rest`): a
member that gets no message for long takes the team for lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from struct import Struct
from struct import error as StructError
from typing import Final, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from ess.clock import Clock
from ess.comm.group import Group
from ess.comm.link import next_frame
from ess.comm.team import Team
from ess.door import Sequence as Opened
from ess.door.memory.mapped import MappedPools, MappedRows, SharedPools
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import NO_HOOKS, Hooks, Queued, queue_part, run_part
from ess.engine.prompt.share import ByHeads, ByTokens, Share, Whole, own_count
from ess.engine.step.runner import Runner
from ess.errors import BadInput
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.models.model import Model
from ess.models.weights.expected.split import Split
from ess.units import PAGE_ROWS, div_ceil

Kind = Literal["tp", "cp"]

REST_S: Final = 1.0

_RUN: Final = b"R"
_REST: Final = b"P"
_STOP: Final = b"S"
_SPAN: Final = Struct("<QII")
_INT: Final = np.dtype("<i4")


def share_of(kind: Kind, team: Team) -> Share:
    """What the ranks of a team share."""
    if team.size == 1:
        return Whole()
    return ByHeads(team) if kind == "tp" else ByTokens(team)


def heads_of(kind: Kind, team: Team) -> Split | None:
    """The heads that a member loads; None for all."""
    if kind == "cp" or team.size == 1:
        return None
    return Split(tp=team.size, tp_rank=team.rank, by_heads=True)


class OwnRows(MappedRows):
    """A sequence's rows on member 0, which marks what all members have written."""

    def __init__(self, pools: MappedPools, sequence: Opened, stop: int) -> None:
        count = div_ceil(stop, PAGE_ROWS)
        self.host_pages = sequence.holding.host_pages[:count]
        self.active_pages = sequence.page_table.numpy()[:count]
        super().__init__(pools, self.host_pages, self.active_pages)
        self._sequence = sequence

    def mark_stored(self, layer: int, start: int, count: int) -> None:
        self._sequence.mark_stored(layer, start, count)


class Ranks(Protocol):
    """Runs the micro-batches of a stage: member 0 alone, or with its team. `given` and what is made
    of it are member 0's slice of the hidden states."""

    @property
    def may_go_on(self) -> bool:
        """Whether the next micro-batch may be queued before one has landed."""

    def queue_part(
        self, spans: Sequence[Span], *, given: Tensor | None = None, hooks: Hooks = NO_HOOKS
    ) -> Queued: ...

    def own_count(self, count: int) -> int:
        """How many lines of a hidden state of `count` tokens come to this member."""

    def rest(self) -> None:
        """Called often while nothing runs: tells the other members so from time to time."""

    def stop(self) -> None: ...


class OneRank:
    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.may_go_on = runner.model.device.type != "cpu"

    def queue_part(
        self, spans: Sequence[Span], *, given: Tensor | None = None, hooks: Hooks = NO_HOOKS
    ) -> Queued:
        return queue_part(self._runner, spans, given=given, hooks=hooks)

    def own_count(self, count: int) -> int:
        return count

    def rest(self) -> None:
        return

    def stop(self) -> None:
        return


class TeamLead:
    """Member 0 of a team of several, who meet when a micro-batch has landed."""

    may_go_on = False

    def __init__(self, runner: Runner, team: Team, kind: Kind, clock: Clock) -> None:
        assert team.rank == 0 < team.size - 1, f"rank {team.rank} of {team.size} leads no team"
        self._runner = runner
        self._team = team
        self._share = share_of(kind, team)
        pools = runner.offload.owner.pools
        self._pools = MappedPools.of(pools)
        self._clock = clock
        self._sent_s = clock.now_s()
        team.broadcast(SharedPools.of(pools).pack())

    def queue_part(
        self, spans: Sequence[Span], *, given: Tensor | None = None, hooks: Hooks = NO_HOOKS
    ) -> Queued:
        shared = [replace(span, sequence=self._own(span)) for span in spans]
        self._say(_RUN + b"".join(map(_packed, shared)))
        return queue_part(self._runner, shared, given=given, share=self._share, hooks=hooks)

    def _own(self, span: Span) -> OwnRows:
        assert isinstance(span.sequence, Opened), "member 0 opens the sequences"
        return OwnRows(self._pools, span.sequence, span.stop)

    def own_count(self, count: int) -> int:
        return own_count(count, self._team.rank, self._team.size)

    def rest(self) -> None:
        if self._clock.now_s() - self._sent_s > REST_S:
            self._say(_REST)

    def stop(self) -> None:
        self._say(_STOP)

    def _say(self, content: bytes) -> None:
        self._sent_s = self._clock.now_s()
        self._team.broadcast(content)


@dataclass(frozen=True, slots=True)
class _Computer:
    model: Model
    offload: MappedPools
    ops: Ops


class TeamMember:
    """Any other member. `layout` is that of member 0's pools."""

    def __init__(
        self, model: Model, ops: Ops, layout: ModelLayout, group: Group, kind: Kind
    ) -> None:
        team = group.team
        assert team.rank > 0, "member 0 leads its team"
        shared = SharedPools.unpack(team.broadcast(b""))
        self._computer = _Computer(model, MappedPools.map(layout, shared), ops)
        self._group = group
        self._team = team
        self._share = share_of(kind, team)

    @torch.inference_mode()
    def run(self) -> None:
        """Obeys until member 0 says stop; LinkLost if the group ends first."""
        while (order := self._team.broadcast(b"")) != _STOP:
            self._group.advance()
            if order != _REST:
                self._obey(order)

    def _obey(self, order: bytes) -> None:
        spans = list(_unpacked(order, self._computer.offload))
        given = self._received(sum(len(span.tokens) for span in spans))
        hooks = Hooks(on_layer=lambda _: self._group.advance())
        _, hidden = run_part(self._computer, spans, given=given, share=self._share, hooks=hooks)
        if self._group.next is not None:
            self._group.next.send(b"", hidden)

    def _received(self, count: int) -> Tensor | None:
        if self._group.previous is None:
            return None
        frame = next_frame(self._group.previous)
        own = own_count(count, self._team.rank, self._team.size)
        if frame.tensor is None or len(frame.tensor) != own:
            raise BadInput(f"a batch of {count} tokens came without {own} lines for this member")
        return frame.tensor


def _packed(span: Span) -> bytes:
    rows = span.sequence
    assert isinstance(rows, OwnRows), "a team's rows are those of its first member"
    lists = (span.tokens, span.following, rows.host_pages, rows.active_pages)
    head = _SPAN.pack(span.start, len(span.tokens), len(rows.host_pages))
    return head + b"".join(np.asarray(each, _INT).tobytes() for each in lists)


def _unpacked(order: bytes, pools: MappedPools) -> Iterator[Span]:
    if order[:1] != _RUN:
        raise BadInput(f"{order[:20]!r} is not an order of a team")
    at = 1
    while at < len(order):
        try:
            start, count, page_count = _SPAN.unpack_from(order, at)
            at += _SPAN.size
            numbers = np.frombuffer(order, _INT, 2 * (count + page_count), at).astype(np.int32)
        except (StructError, ValueError):
            raise BadInput(f"an order of {len(order)} bytes is cut short") from None
        at += numbers.nbytes
        if not 0 < count <= start + count <= page_count * PAGE_ROWS:
            raise BadInput(f"{count} tokens from {start} on do not fit on {page_count} pages")
        tokens, following, pages = np.split(numbers, [count, 2 * count])
        host, active = pages[:page_count], pages[page_count:]
        yield Span(
            sequence=MappedRows(pools, host, active),
            start=start,
            tokens=tokens.tolist(),
            following=following.tolist(),
        )
