"""Questions to the engine, which answers those of one kind in the order in which it was asked."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from typing import Final, Literal

from ess.engine.process.messages import Aborted, Answered, Flushed, Held, Met, Traced, Tracing
from ess.errors import EssError

Question = Literal["flush", "hold", "trace", "abort", "meet"]
QUESTION_OF: Final[dict[type[Answered], Question]] = {
    Flushed: "flush",
    Held: "hold",
    Tracing: "trace",
    Traced: "trace",
    Aborted: "abort",
    Met: "meet",
}


class Questions:
    """A client may leave before its answer comes: its question stays, so no other client gets that
    answer."""

    def __init__(self) -> None:
        self._asked: defaultdict[Question, deque[asyncio.Future[Answered]]] = defaultdict(deque)

    def ask(self, question: Question) -> asyncio.Future[Answered]:
        """Waits for the answer; to be called just after the question was sent."""
        answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._asked[question].append(answer)
        return answer

    def answer(self, answer: Answered) -> None:
        asked = self._asked[QUESTION_OF[type(answer)]]
        asker = asked.popleft() if asked else None
        if asker is not None and not asker.done():
            asker.set_result(answer)

    def fail(self, error: EssError) -> None:
        """Ends all questions with the error."""
        for asked in self._asked.values():
            for asker in asked:
                if not asker.done():
                    asker.set_exception(error)
            asked.clear()
