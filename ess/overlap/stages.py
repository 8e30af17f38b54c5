"""What a schedule may ask of one layer in one step; the engine answers.

    index       new rows and keys are in their slots, the indexer's queries are ready
    locate      logits and top-k, then the slots of the selected rows; None when a row has no slot
    resolve     logits and top-k of a part of the batch, then where its rows are: from here on the
                fetch of the part's missing rows is under way
    wait        the fetched rows have landed; what passes here is exposed transfer time
    pre_attn    the attention queries: projection, absorption, rope
    attend_*    attention over all rows, over the resident ones, and over the fetched ones, which
                goes on from the partial over the resident ones

A part is a range of the step's queries. Parts are resolved in batch order.

A schedule is a generator. It yields where something it has started is under way and what comes next
would wait for it: there another half of the batch may run. Nothing depends on what happens at a
yield, so `finish` (no other half runs) and `interleave` (another half does) give the same answer.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

Where = TypeVar("Where")
Part = range
P = TypeVar("P")
R = TypeVar("R")
Run: TypeAlias = Generator[None, None, R]


class Stages(Protocol[Where, P]):
    def parts(self, count: int) -> Sequence[Part]:
        """The batch in at most `count` parts, no sequence cut in two."""

    def index(self) -> None: ...
    def locate(self, part: Part) -> Where | None: ...
    def resolve(self, part: Part) -> Where: ...
    def wait(self, where: Where) -> None:
        """Returns when the fetch of this part has landed."""

    def pre_attn(self) -> None: ...
    def attend_all(self, where: Where) -> P: ...
    def attend_resident(self, where: Where) -> P: ...
    def attend_fetched(self, where: Where, resident: P) -> P: ...


def finish(run: Run[R]) -> R:
    """Runs the schedule to its end without a pause."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            result: R = end.value
            return result
