"""TBO: a batch in two halves, stage by stage in turn: a half waits while the other computes.

A layer with experts is five stages, cut at the yields of its schedules:

    0 index, resolve | 1 attend, output, route | 2 dispatch | 3 experts, combine | 4 collect

In decode half a runs `DELTA` = 2 stages ahead:

    a   0 1 2   3   4   0   1   2   3      whose 0 starts a fetch that 1 waits for
    b         0   1   2   3   4   0   1

So a's stage 3, its experts, stands between b's 0 and 1, and b's between a's: with two ahead, each
half's fetch hides behind the other's experts, whatever the schedule within the half. Half a is
ahead in every layer, so parts are appended and resolved in batch order, as the pools demand.
Dense layers have nothing to dispatch and little to hide behind: they run whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Generic, Literal

from ess.overlap.policy import Mode, Vector
from ess.overlap.stages import R, Run

DELTA: Final = 2
FLOOR_TOKENS: Final = 64

Tbo = Literal["off", "on", "auto"] | int


def interleave(first: Run[R], second: Run[R], *, delta: int = DELTA) -> tuple[R, R]:
    """Runs both to their ends: `first` is `delta` stages ahead, then they take turns."""
    assert delta >= 0, f"the first half is {delta} stages ahead"
    assert first is not second, "a half cannot run beside itself"
    a, b = _Half(first), _Half(second)
    for _ in range(delta):
        a.advance()
    while not (a.is_over and b.is_over):
        a.advance()
        b.advance()
        lead = a.stage_count - b.stage_count
        assert a.is_over or lead == delta, f"the first half is {lead} stages ahead, not {delta}"
    a.check()
    b.check()
    assert a.stage_count == b.stage_count, f"{a.stage_count} stages beside {b.stage_count}"
    return a.result[0], b.result[0]


class _Half(Generic[R]):
    def __init__(self, run: Run[R]) -> None:
        self.result: list[R] = []
        self.stage_count = 0
        self._run = run

    @property
    def is_over(self) -> bool:
        return bool(self.result)

    def advance(self) -> None:
        if self.is_over:
            return
        self.stage_count += 1
        try:
            next(self._run)
        except StopIteration as end:
            self.result.append(end.value)

    def check(self) -> None:
        assert len(self.result) <= 1, f"a half ended {len(self.result)} times"
        assert self.stage_count > 0 or not self.is_over, "a half ended before its first stage"


def first_half(counts: Sequence[int]) -> int:
    """How many sequences half a gets: half of them, as each has about as many queries."""
    assert len(counts) > 1, f"{len(counts)} sequences have no two halves"
    assert min(counts) > 0, f"a sequence brings no query: {list(counts)}"
    return len(counts) // 2


def reasons_off(
    tbo: Tbo, *, counts: Sequence[int], vector: Vector, has_experts: bool
) -> tuple[str, ...]:
    """The reasons, as sentences, why this step is not split; none when it is."""
    if tbo == "off":
        return ("tbo is off",)
    floor = FLOOR_TOKENS if tbo == "auto" else 0 if isinstance(tbo, str) else tbo
    checks = {
        "one sequence has no second half": len(counts) < 2,
        f"{sum(counts)} tokens, the floor is {floor}": sum(counts) < floor,
        "no layer with experts leads a layer group": not has_experts,
        "all rows are resident: there is no fetch to hide": (
            tbo == "auto" and all(mode is Mode.RESIDENT for mode in vector)
        ),
    }
    return tuple(reason for reason, holds in checks.items() if holds)
