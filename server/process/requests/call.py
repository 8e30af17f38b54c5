"""One HTTP request's requests to the engine, with one mailbox for their pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ess.engine.process.messages import Piece
from ess.errors import EssError

Reader = Callable[[list[Piece]], bool]
TAKEN_MAX: Final = 16
"""Pieces taken at once: a slow client's others wait as pieces, whose size is known, not as bytes on
their way to its socket."""
PIECE_BYTES: Final = 200
TOKEN_BYTES: Final = 40
CHANCE_BYTES: Final = 130
"""What pieces, their tokens and each of their log probabilities take in memory."""


class Call:
    """The engine's requests of one HTTP request.

    `names` are the ids by which clients know each request: its own, or the call's.
    `params` go into its answer beside the text: kv_transfer_params of a prefill leg. `pending` are
    its requests that have not ended; the oldest of the pieces that waited together arrived at
    `heard_at_s`.
    A task that waits in `take` may name a reader, which gets pieces in the link's own turn, without
    waking the task; an end, and pieces that the reader does not take, wake it.
    """

    def __init__(
        self,
        request_id: str,
        numbers: range,
        *,
        names: Sequence[str] = (),
        started_s: float,
        prompt_count: int = 0,
    ) -> None:
        assert len(names) in (0, len(numbers)), f"{len(names)} ids for {len(numbers)} requests"
        self.prompt_count = prompt_count
        self.params: Mapping[str, Any] | None = None
        self.made_count = 0
        self.first_at_s = 0.0
        self.request_id = request_id
        self.started_s = started_s
        self.numbers = numbers
        self.names = names or (request_id,) * len(numbers)
        self.pending = set(numbers)
        self.error: EssError | None = None
        self.heard_at_s = 0.0
        self._pieces: list[Piece] = []
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Reader | None = None
        self._broken: Exception | None = None

    @property
    def unread_bytes(self) -> int:
        """What waits for a client that reads slowly; nothing if a task waits here, which takes the
        pieces in its next turn."""
        return self._bytes if self._waiter is None else 0

    def put(self, piece: Piece, *, heard_at_s: float = 0.0) -> bool:
        """Returns True for the first piece that has not been taken: the waiter must be told."""
        is_first = not self._pieces
        if is_first:
            self.heard_at_s = heard_at_s
        self._pieces.append(piece)
        self._bytes += bytes_of(piece)
        if piece.tokens:
            self.made_count += len(piece.tokens)
            self.first_at_s = self.first_at_s or heard_at_s
        if piece.reason is not None:
            self.pending.discard(piece.number)
            self._reader = None
        return is_first

    def tell(self) -> None:
        """Gives the pieces to the reader, if it takes them, else wakes the waiter; failures too.

        If the waiter is woken but not yet running, the reader is passed over: pieces left to the
        waiter come before new ones.
        """
        if self._waiter is None or self._waiter.done():
            return
        if self._reader is not None:
            pieces, size, self._pieces, self._bytes = self._pieces, self._bytes, [], 0
            try:
                if self._reader(pieces):
                    return
            except Exception as error:
                self._broken = error
            else:
                self._pieces[:0] = pieces
                self._bytes += size
        self.nudge()

    def name_of(self, number: int) -> str:
        return self.names[self.numbers.index(number)]

    def fail(self, error: EssError) -> None:
        self.error = error
        self.nudge()

    def cut(self, error: EssError) -> None:
        """Fails without the pieces that wait."""
        self._pieces, self._bytes = [], 0
        self.fail(error)

    def nudge(self) -> None:
        """Lets the reader go on, without pieces if none have come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, reader: Reader | None = None) -> list[Piece]:
        """The next TAKEN_MAX pieces; waits for the first that no reader takes, or for a nudge.

        Pieces from before a failure are returned first; then it is raised.
        """
        if not self._pieces and self.error is None:
            self._waiter, self._reader = asyncio.get_running_loop().create_future(), reader
            try:
                await self._waiter
            finally:
                self._waiter = self._reader = None
        if self._broken is not None:
            raise self._broken
        if not self._pieces and self.error is not None:
            raise self.error
        taken = self._pieces[:TAKEN_MAX]
        del self._pieces[:TAKEN_MAX]
        self._bytes -= sum(map(bytes_of, taken))
        return taken


def bytes_of(piece: Piece) -> int:
    """About what a piece takes in memory."""
    size = PIECE_BYTES + TOKEN_BYTES * len(piece.tokens)
    for chances in (piece.chances, piece.prompt_chances):
        if chances:  # those of a request have equally many
            size += len(chances) * (1 + len(chances[0].top)) * CHANCE_BYTES
    return size
