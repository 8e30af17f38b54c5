"""The calls of one process of the server that have not ended, by the numbers of their requests.

A server of several processes, its fronts, has them in each. Requests of all fronts are numbered
apart: front f of n has the numbers f, f + n, f + 2n ... The calls' records are in the journal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from weakref import WeakSet

from ess.clock import Clock
from ess.engine.process.messages import Add, Piece
from ess.engine.tokens.sampling import Sampling
from ess.server.http.responses import Interrupted, Refused
from ess.server.process.bounds import UNREAD_BYTES
from ess.server.process.requests.call import Call
from ess.server.process.requests.journal import Journal
from ess.server.process.tally import Waits

LIVES: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPlace:
    """A process of the server. A front that replaces a lost front is the next `life` at its place,
    so that no number is used twice."""

    front: int = 0
    count: int = 1
    life: int = 0

    def __post_init__(self) -> None:
        assert 0 <= self.front < self.count, f"front {self.front} of {self.count}"

    @property
    def first_number(self) -> int:
        return self.front + self.count * self.life * LIVES


ALONE: Final = FrontPlace()


class OpenCalls:
    """`to_socket` counts how long tokens take from the engine to the sockets of clients.

    A client that reads more slowly than its tokens come has them wait in its call, at most
    `unread_max` bytes for all clients together. Beyond that the call ends for which most waits, so
    those end whose clients are furthest behind, and none whose client keeps up: for it nothing
    waits. It may have ended in the engine.
    """

    def __init__(self, place: FrontPlace, clock: Clock, journal: Journal) -> None:
        self.to_socket = Waits()
        self.refusals: dict[str, int] = Counter()
        self.unread_max = UNREAD_BYTES
        self._place = place
        self._clock = clock
        self._journal = journal
        self._calls: dict[int, Call] = {}
        self._unread: WeakSet[Call] = WeakSet()
        self._next_number = place.first_number

    def __len__(self) -> int:
        """Requests, not calls."""
        return len(self._calls)

    @property
    def oldest_wait_s(self) -> float:
        """How long the oldest call without any piece from the engine has waited."""
        silent = [call.started_s for call in self._calls.values() if not call.heard_at_s]
        return self._clock.now_s() - min(silent) if silent else 0.0

    def numbered(
        self,
        request_id: str,
        prompts: Sequence[tuple[list[int], Sampling]],
        *,
        names: Sequence[str] = (),
    ) -> Call:
        """A call with a number for each prompt. It counts once its requests are added."""
        step, first = self._place.count, self._next_number
        numbers = range(first, first + step * len(prompts), step)
        self._next_number = numbers.stop
        return Call(
            request_id,
            numbers,
            names=names,
            started_s=self._clock.now_s(),
            prompt_count=sum(len(prompt) for prompt, _ in prompts),
        )

    def add(self, call: Call, add: Add, packed: bytes) -> None:
        """A request of the call was sent to the engine as `packed`."""
        self._journal.open(add, packed)
        self._calls[add.number] = call

    def remove(self, number: int) -> bool:
        """Returns whether the request had not ended."""
        self._journal.close(number)
        return self._calls.pop(number, None) is not None

    def named(self, names: set[str] | None) -> list[tuple[Call, int]]:
        """The requests with these ids of clients or of calls, and their calls; None means all."""
        return [
            (call, number)
            for number, call in self._calls.items()
            if names is None or not names.isdisjoint((call.request_id, call.name_of(number)))
        ]

    def fail(self, sentence: str, *, spares_recorded: bool = False) -> None:
        """Ends calls with the sentence: all of them, or those that another engine cannot
        continue, because a request of theirs has no record."""
        for call in dict.fromkeys(self._calls.values()):
            if spares_recorded and all(number in self._journal for number in call.pending):
                continue
            for number in call.pending:
                self.remove(number)
            call.fail(Interrupted(sentence))

    def lose_engine(self) -> None:
        """The engine is lost: requests that may be the cause are in no record any more."""
        self._journal.lose()

    def again(self) -> Iterator[Add]:
        """The messages for the next engine, in the order of arrival."""
        return self._journal.again()

    def deliver(self, pieces: Sequence[Piece], *, heard_at_s: float, left_at_s: float) -> None:
        """Hands all pieces out before a waiter is woken: all choices leave together."""
        waiting: list[Call] = []
        for piece in pieces:
            call = self._calls.get(piece.number)
            if call is None:
                continue
            if piece.reason is not None:
                del self._calls[piece.number]
            if call.put(self._journal.hear(piece), heard_at_s=heard_at_s):
                waiting.append(call)
            else:
                self._unread.add(call)
        for call in waiting:
            call.tell()
        if left_at_s:
            asyncio.get_running_loop().call_soon(self._written, left_at_s, len(pieces))

    def furthest_behind(self) -> Call | None:
        """The call for whose client most waits, if too much waits for all."""
        for call in [call for call in self._unread if not call.unread_bytes]:
            self._unread.discard(call)
        if sum(call.unread_bytes for call in self._unread) <= self.unread_max:
            return None
        return max(self._unread, key=lambda call: call.unread_bytes)

    def cut(self, call: Call) -> None:
        """Ends a call whose client is too far behind, without what waits for it."""
        self.refusals["slow_reader"] += 1
        sentence = (
            f"the client reads too slowly: {call.unread_bytes:,} bytes of its answer wait in the"
            f" server, more than for any other; for all together {self.unread_max:,} may wait"
        )
        call.cut(Refused(sentence, reason="slow_reader", retry_after_s=None))

    def check(self) -> None:
        place = self._place
        for number, call in self._calls.items():
            assert number in call.pending, f"request {number} has ended and is listed"
            assert number % place.count == place.front, f"{number}: another front's"
            assert number < self._next_number, f"{number}: the next is {self._next_number}"
        self._journal.check()

    def _written(self, left_at_s: float, count: int) -> None:
        """The loop writes to sockets at the end of each turn, so by now the step's pieces are out;
        each counts as late as the last."""
        self.to_socket.add(self._clock.now_s() - left_at_s, count)
