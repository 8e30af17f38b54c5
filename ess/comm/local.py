"""A group in one process: queues instead of sockets, a thread or a turn per rank.

Frames are copied, ordered and limited as between processes; a lent tensor is filled with 0xFF (NaN
in every float) when the loan ends, so that a stale read shouts.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ess.comm.group import Beat, Group
from ess.comm.link import (
    AHEAD_MAX,
    HELD_MAX,
    PATIENCE_S,
    REPORTS_MAX,
    Frame,
    LinkLost,
    check_frame,
    left,
    name_of,
    took_nothing,
)
from ess.comm.team import OneTeam, PendingParts, Team, check_parts
from ess.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

Made = TypeVar("Made")


@dataclass(slots=True, eq=False)
class _Post:
    """A started exchange: each member's parts for the others, and how many members have theirs."""

    parts: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    taken_count: int = 0


@dataclass(slots=True, eq=False)
class _SharedState:
    """What all ranks share: one lock, the ranks that have left, why the group has ended."""

    size: int
    team: int
    patience_s: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    left: set[int] = field(default_factory=set)
    lost: LinkLost | None = None
    progress: dict[int, int] = field(default_factory=dict)
    moved_s: dict[int, float] = field(default_factory=dict)
    breakers: list[threading.Barrier] = field(default_factory=list)

    def fail(self, rank: int, sentence: str) -> None:
        with self.changed:
            if self.lost is None:
                self.lost = LinkLost(rank, sentence)
            self.changed.notify_all()
        for barrier in self.breakers:
            barrier.abort()

    def check(self) -> None:
        if self.lost is not None:
            raise LinkLost(self.lost.rank, str(self.lost))

    def gathered(self, posts: dict[int, _Post], number: int, rank: int, size: int) -> list[Tensor]:
        """The parts that all members sent to this member. The last member to call this drops the
        post."""
        with self.changed:
            post = posts[number]
            if not self.wait(lambda: len(post.parts) == size, self.patience_s):
                missing = [member for member in range(size) if member not in post.parts]
                sentence = f"members {missing} sent nothing for {self.patience_s:g} s"
                self.lost = LinkLost(missing[0], sentence)
                self.changed.notify_all()
                self.check()
            post.taken_count += 1
            if post.taken_count == size:
                del posts[number]
            return [post.parts[member][rank] for member in range(size)]

    def wait(self, until: Callable[[], bool], timeout_s: float | None) -> bool:
        """Called under the lock. True once `until` holds; LinkLost if the group ends first."""
        came = self.changed.wait_for(lambda: self.lost is not None or until(), timeout_s)
        self.check()
        return came


@dataclass(slots=True, eq=False)
class _Queue:
    """One direction of a link, and how many frames it may hold."""

    ahead: int = REPORTS_MAX
    held: int = REPORTS_MAX
    has_tensors: bool = False
    frames: deque[Frame] = field(default_factory=deque)


class LocalLink:
    def __init__(
        self,
        shared: _SharedState,
        rank: int,
        peer: int,
        out: _Queue,
        into: _Queue,
    ) -> None:
        self.peer = peer
        self._name = name_of(peer, shared.team)
        self._shared = shared
        self._rank = rank
        self._out = out
        self._in = into
        self._lent: Tensor | None = None

    def send(self, head: bytes, tensor: Tensor | None = None) -> None:
        check_frame(head, tensor, has_tensors=self._out.has_tensors)
        with self._shared.changed:
            self._take(self._out.held + self._out.ahead - 1)
            if self._is_left():
                raise left(self.peer, self._name)
            self._out.frames.append(Frame(bytes(head), None if tensor is None else tensor.clone()))
            self._shared.changed.notify_all()

    def flush(self) -> None:
        with self._shared.changed:
            self._take(self._out.held)

    def receive(self, timeout_s: float | None = 0.0) -> Frame | None:
        with self._shared.changed:
            self._shared.check()
            came = self._shared.wait(lambda: bool(self._in.frames) or self._is_left(), timeout_s)
            if not came:
                return None
            if not self._in.frames:
                raise left(self.peer, self._name)
            frame = self._in.frames.popleft()
            self._shared.changed.notify_all()
        if self._lent is not None:
            self._lent.view(torch.uint8).fill_(0xFF)
        self._lent = frame.tensor
        return frame

    def close(self) -> None:
        with self._shared.changed:
            self._shared.left.add(self._rank)
            self._shared.changed.notify_all()

    def _is_left(self) -> bool:
        return self.peer in self._shared.left

    def _take(self, most: int) -> None:
        """Waits until the peer has no more than `most` frames to take."""
        self._shared.check()
        came = self._shared.wait(
            lambda: len(self._out.frames) <= most or self._is_left(), self._shared.patience_s
        )
        if self._is_left() and len(self._out.frames) > most:
            raise left(self.peer, self._name)
        if not came:
            raise took_nothing(self.peer, self._name, self._shared.patience_s)


class LocalParts:
    """The parts for one member in the exchange of this number."""

    def __init__(
        self, shared: _SharedState, posts: dict[int, _Post], number: int, rank: int, due: list[int]
    ) -> None:
        self._shared = shared
        self._posts = posts
        self._number = number
        self._rank = rank
        self._due = due

    def wait(self) -> Tensor:
        parts = self._shared.gathered(self._posts, self._number, self._rank, len(self._due))
        sizes = [len(part) for part in parts]
        if sizes != self._due:
            sentence = f"member {self._rank} was given {sizes} bytes, {self._due} are due"
            self._shared.fail(self._rank, sentence)
            self._shared.check()
        return torch.cat(parts)


class LocalTeam:
    def __init__(
        self,
        shared: _SharedState,
        rank: int,
        slots: list[object],
        all_of_us: threading.Barrier,
        posts: dict[int, _Post],
    ) -> None:
        self._posts = posts
        self._started = 0
        self.rank = rank
        self.size = len(slots)
        self._shared = shared
        self._slots = slots
        self._barrier = all_of_us

    def barrier(self) -> None:
        try:
            self._barrier.wait(self._shared.patience_s)
        except threading.BrokenBarrierError:
            sentence = f"a team of {self.size} did not meet within {self._shared.patience_s} s"
            self._shared.fail(-1, sentence)
            self._shared.check()

    def all_gather(
        self, tensor: Tensor, dim: int = 0, *, sizes: Sequence[int] | None = None
    ) -> Tensor:
        return self._share(tensor, lambda slots: torch.cat(slots, dim))

    def all_to_all(self, tensors: list[Tensor]) -> list[Tensor]:
        if len(tensors) != self.size:
            raise BadInput(f"tensors has {len(tensors)} tensors for a team of {self.size}")
        return self._share(tensors, lambda slots: [slot[self.rank].clone() for slot in slots])

    def start(self, content: Tensor, given: Sequence[int], due: Sequence[int]) -> PendingParts:
        check_parts(self, content, given, due)
        number, self._started = self._started, self._started + 1
        with self._shared.changed:
            self._shared.check()
            post = self._posts.setdefault(number, _Post())
            post.parts[self.rank] = torch.split_with_sizes(content.clone(), list(given))
            self._shared.changed.notify_all()
        return LocalParts(self._shared, self._posts, number, self.rank, list(due))

    def spread(self, content: Tensor) -> PendingParts:
        sizes = [len(content)] * self.size
        return self.start(content.repeat(self.size), sizes, sizes)

    def check(self) -> None:
        self._shared.check()

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        return self._share(content, lambda slots: bytes(slots[root]))

    def _share(self, given: Any, make: Callable[[list[Any]], Made]) -> Made:
        """Shares `given` with all members, makes the result from what all members gave, and waits
        for all."""
        self._slots[self.rank] = given
        self.barrier()
        made = make(self._slots)
        self.barrier()
        return made


class LocalGroup:
    def __init__(self, shared: _SharedState, rank: int, team: Team, links: Mapping[str, LocalLink]):
        self.rank = rank
        self.size = shared.size
        self.team = team
        self.next = links.get("next")
        self.previous = links.get("previous")
        reports = {link.peer: link for name, link in links.items() if name.isdigit()}
        self.reports = MappingProxyType(reports)
        self._shared = shared

    def advance(self) -> None:
        self._shared.progress[self.rank] = self._shared.progress.get(self.rank, 0) + 1
        self._shared.moved_s[self.rank] = time.monotonic()

    def beats(self) -> Mapping[int, Beat]:
        now_s, shared = time.monotonic(), self._shared
        return {
            rank: Beat(shared.progress.get(rank, 0), 0.0, now_s - shared.moved_s.get(rank, now_s))
            for rank in self.reports
        }

    def fail(self, sentence: str) -> None:
        self._shared.fail(self.rank, sentence)

    def close(self) -> None:
        with self._shared.changed:
            self._shared.left.add(self.rank)
            self._shared.changed.notify_all()


def local_group(size: int, team: int = 1, *, patience_s: float = PATIENCE_S) -> list[Group]:
    """The groups of all ranks, by rank. A team of several needs a thread for each member."""
    if size < 1 or team < 1 or size % team:
        raise BadInput(f"size is {size}, a positive multiple of the team's {team}")
    shared = _SharedState(size, team, patience_s)
    links: list[dict[str, LocalLink]] = [{} for _ in range(size)]

    def connect(first: int, its_name: str, second: int, other_name: str, down: _Queue) -> None:
        up = _Queue(down.ahead, down.held)
        links[first][its_name] = LocalLink(shared, first, second, down, up)
        links[second][other_name] = LocalLink(shared, second, first, up, down)

    for rank in range(size):
        if rank + team < size:
            connect(rank, "next", rank + team, "previous", _Queue(AHEAD_MAX, HELD_MAX, True))
        if rank:
            connect(0, str(rank), rank, "0", _Queue())
    teams = [member for _ in range(size // team) for member in _team(shared, team)]
    return [LocalGroup(shared, rank, teams[rank], links[rank]) for rank in range(size)]


def _team(shared: _SharedState, size: int) -> list[Team]:
    if size == 1:
        return [OneTeam()]
    barrier = threading.Barrier(size)
    shared.breakers.append(barrier)
    slots: list[object] = [None] * size
    posts: dict[int, _Post] = {}
    return [LocalTeam(shared, rank, slots, barrier, posts) for rank in range(size)]
