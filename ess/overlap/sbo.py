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

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
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


def off(experts: Experts) -> Run[None]:
    experts.route()
    yield
    experts.dispatch()
    yield
    experts.arrive()
    experts.up()
    [whole] = experts.blocks(1)
    experts.down(whole)
    experts.combine(whole)
    yield
    experts.collect()
    experts.shared()


def dispatch_shared(experts: Experts) -> Run[None]:
    experts.route()
    yield
    experts.dispatch()
    experts.shared()
    yield
    experts.arrive()
    experts.up()
    [whole] = experts.blocks(1)
    experts.down(whole)
    experts.combine(whole)
    yield
    experts.collect()


def combine_shared(experts: Experts) -> Run[None]:
    experts.route()
    yield
    experts.dispatch()
    yield
    experts.arrive()
    experts.up()
    [whole] = experts.blocks(1)
    experts.down(whole)
    experts.combine(whole)
    experts.shared()
    yield
    experts.collect()


def combine_down(experts: Experts) -> Run[None]:
    experts.route()
    yield
    experts.dispatch()
    yield
    experts.arrive()
    experts.up()
    blocks = experts.blocks(BLOCKS)
    assert 1 <= len(blocks) <= BLOCKS, f"{len(blocks)} blocks of experts, at most {BLOCKS}"
    assert all(a.stop == b.start for a, b in pairwise(blocks)), f"blocks out of order: {blocks}"
    for block in blocks:
        experts.down(block)
        experts.combine(block)
    yield
    experts.collect()
    experts.shared()


SCHEDULES: Final[Mapping[Sbo, Callable[[Experts], Run[None]]]] = MappingProxyType(
    {
        "off": off,
        "combine-down": combine_down,
        "combine-shared": combine_shared,
        "dispatch-shared": dispatch_shared,
    }
)
