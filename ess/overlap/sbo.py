"""SBO: a layer with experts on several ranks, and what its communication runs beside.

    off              route | dispatch .. arrive | up, down | combine .. collect | shared
    dispatch-shared  route | dispatch, shared, arrive | up, down | combine .. collect
    combine-shared   route | dispatch .. arrive | up, down | combine, shared, collect
    combine-down     as off, but down is cut by experts: the combine of one block beside the next

`dispatch` and `combine` start what `arrive` and `collect` wait for. Which order pays depends on the
machine, the answer does not depend on it: every block writes rows of its own, and each token sums
its experts in their order at the end. The yields are TBO's (`tbo`): they are the same in all four.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal, Protocol

from ess.overlap.stages import Run

BLOCKS: Final = 2

Sbo = Literal["off", "combine-down", "combine-shared", "dispatch-shared"]


class Experts(Protocol):
    """The experts of a layer for some of the step's queries."""

    def blocks(self, count: int) -> Sequence[range]:
        """The experts in at most `count` ranges, ascending, none left out."""

    def route(self) -> None: ...
    def dispatch(self) -> None:
        """Starts sending tokens to the ranks of their experts."""

    def arrive(self) -> None:
        """Returns when all tokens for this rank's experts are here."""

    def up(self) -> None: ...
    def down(self, block: range) -> None: ...
    def combine(self, block: range) -> None:
        """Starts sending the outputs of these experts to the ranks of their tokens."""

    def collect(self) -> None:
        """Returns when all expert outputs for this rank's tokens are here."""

    def shared(self) -> None: ...


def schedule(experts: Experts, sbo: Sbo) -> Run[None]:
    experts.route()
    yield
    experts.dispatch()
    if sbo == "dispatch-shared":
        experts.shared()
    yield
    experts.arrive()
    experts.up()
    for block in _blocks(experts, BLOCKS if sbo == "combine-down" else 1):
        experts.down(block)
        experts.combine(block)
    if sbo == "combine-shared":
        experts.shared()
    yield
    experts.collect()
    if sbo in ("off", "combine-down"):
        experts.shared()


def _blocks(experts: Experts, count: int) -> Sequence[range]:
    blocks = experts.blocks(count)
    assert 1 <= len(blocks) <= count, f"{len(blocks)} blocks of experts, at most {count}"
    assert all(a.stop == b.start for a, b in pairwise(blocks)), f"blocks out of order: {blocks}"
    return blocks
