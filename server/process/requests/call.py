"""One HTTP request's requests to the engine, with one mailbox for their pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ess.engine.process.messages import Piece
from ess.server.http.responses import Interrupted

Reader = Callable[[list[Piece]], bool]


class Call:
    """The engine's requests of one HTTP request.

    `params` go into its answer beside the text: kv_transfer_params of a prefill leg. `pending` are
    its requests that have not ended; the oldest piece of those taken last arrived at `heard_at_s`.
    A task that waits in `take` may name a reader, which gets pieces in the link's own turn, without
    waking the task; an end, and pieces that the reader does not take, wake it.
    """

    def __init__(
        self, request_id: str, numbers: range, *, started_s: float, prompt_count: int = 0
    ) -> None:
        self.prompt_count = prompt_count
        self.params: Mapping[str, Any] | None = None
        self.made_count = 0
        self.first_at_s = 0.0
        self.request_id = request_id
        self.started_s = started_s
        self.numbers = numbers
        self.pending = set(numbers)
        self.error: str | None = None
        self.heard_at_s = 0.0
        self._pieces: list[Piece] = []
        self._waiter: asyncio.Future[None] | None = None
        self._reader: Reader | None = None
        self._broken: Exception | None = None

    def put(self, piece: Piece, *, heard_at_s: float = 0.0) -> bool:
        """Returns True for the first piece that has not been taken: the waiter must be told."""
        is_first = not self._pieces
        if is_first:
            self.heard_at_s = heard_at_s
        self._pieces.append(piece)
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
            pieces, self._pieces = self._pieces, []
            try:
                if self._reader(pieces):
                    return
            except Exception as error:
                self._broken = error
            else:
                self._pieces[:0] = pieces
        self.nudge()

    def fail(self, sentence: str) -> None:
        self.error = sentence
        self.nudge()

    def nudge(self) -> None:
        """Lets the reader go on, without pieces if none have come."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self, reader: Reader | None = None) -> list[Piece]:
        """All pieces that have come; waits for the first that no reader takes, or for a nudge.

        Pieces from before a failure are returned first; then Interrupted is raised.
        """
        if not self._pieces and self.error is None:
            self._waiter, self._reader = asyncio.get_running_loop().create_future(), reader
            try:
                await self._waiter
            finally:
                self._reader = None
        if self._broken is not None:
            raise self._broken
        if not self._pieces and self.error is not None:
            raise Interrupted(self.error)
        taken, self._pieces = self._pieces, []
        return taken
