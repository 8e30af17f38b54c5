"""What a schedule may ask of one layer of one step; who answers is the engine's business.

    index       new rows and keys are in their slots, the indexer's queries are ready
    resolve     logits and top-k of a part of the batch, then where its rows are: from here on the
                fetch of the part's missing rows is under way
    wait        the fetched rows have landed; what passes here is exposed transfer time
    pre_attn    the attention queries: projection, absorption, rope
    attend_*    attention over all rows, over the resident ones, over the fetched ones
    merge       two partials over disjoint rows make one

A part is a range of the step's queries. Parts are resolved in batch order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

Where = TypeVar("Where")
Part = range
P = TypeVar("P")


class Stages(Protocol[Where, P]):
    def parts(self, count: int) -> Sequence[Part]:
        """The batch in at most `count` parts, no sequence cut in two."""

    def index(self) -> None: ...
    def resolve(self, part: Part) -> Where: ...
    def wait(self, where: Where) -> None:
        """Returns when the fetch of this part has landed."""

    def pre_attn(self) -> None: ...
    def attend_all(self, where: Where) -> P: ...
    def attend_resident(self, where: Where) -> P: ...
    def attend_fetched(self, where: Where) -> P: ...
    def merge(self, resident: P, fetched: P) -> P: ...
