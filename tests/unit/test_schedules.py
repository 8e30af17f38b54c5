"""What each schedule asks of a layer, in which order, and where another half may run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from ess.overlap.da import da
from ess.overlap.dba import dba
from ess.overlap.none import none
from ess.overlap.resident import resident
from ess.overlap.stages import finish


class Told:
    """A layer of four queries that records its calls; each result names the call that made it."""

    def __init__(self, *, sequences: int = 4, is_resident: bool = True) -> None:
        self.log: list[str] = []
        self._sequences = sequences
        self._is_resident = is_resident

    def parts(self, count: int) -> list[range]:
        cuts = [4 * at // min(count, self._sequences) for at in range(count + 1)]
        return [range(start, stop) for start, stop in pairwise(cuts) if stop <= 4]

    def locate(self, part: range) -> str | None:
        located = self.asked("locate", part)
        return located if self._is_resident else None

    def asked(self, stage: str, *of: object) -> str:
        named = [f"{of.start}-{of.stop}" if isinstance(of, range) else str(of) for of in of]
        answer = f"{stage}({', '.join(named)})"
        self.log.append(answer)
        return answer

    def __getattr__(self, stage: str) -> Callable[..., str]:
        return lambda *of: self.asked(stage, *of)


R, A, B = "resolve(0-4)", "resolve(0-2)", "resolve(2-4)"
JOINED = "attend_fetched({0}, attend_resident({0}))"
CASES = {
    "none": (none, Told(), f"index() {R} | pre_attn() wait({R}) attend_all({R})"),
    "resident": (
        resident,
        Told(),
        "index() locate(0-4) | pre_attn() wait(locate(0-4)) attend_all(locate(0-4))",
    ),
    "resident, a row is absent": (
        resident,
        Told(is_resident=False),
        f"index() locate(0-4) {R} | pre_attn() wait({R}) attend_all({R})",
    ),
    "da": (
        da,
        Told(),
        f"index() {R} | pre_attn() attend_resident({R}) wait({R}) " + JOINED.format(R),
    ),
    "dba": (
        dba,
        Told(),
        f"index() {A} {B} | pre_attn() attend_resident({A}) attend_resident({B}) "
        f"wait({A}) {JOINED.format(A)} wait({B}) {JOINED.format(B)}",
    ),
    "dba of one sequence": (
        dba,
        Told(sequences=1),
        f"index() {R} | pre_attn() attend_resident({R}) wait({R}) " + JOINED.format(R),
    ),
}
ANSWERS = {
    "none": [f"attend_all({R})"],
    "resident": ["attend_all(locate(0-4))"],
    "resident, a row is absent": [f"attend_all({R})"],
    "da": [JOINED.format(R)],
    "dba": [JOINED.format(A), JOINED.format(B)],
    "dba of one sequence": [JOINED.format(R)],
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_and_when(case: str) -> None:
    schedule, told, order = CASES[case]
    run = schedule(told)
    next(run)
    told.log.append("|")
    assert finish(run) == ANSWERS[case]
    assert " ".join(told.log) == order


def test_parts_that_do_not_adjoin_are_refused() -> None:
    told = Told()
    told.parts = lambda count: [range(2, 4), range(2)]
    with pytest.raises(AssertionError, match="halves out of order"):
        finish(dba(told))
    told.parts = lambda count: [range(at, at + 1) for at in range(3)]
    with pytest.raises(AssertionError, match="3 halves"):
        finish(dba(told))


@pytest.mark.parametrize("schedule", [none, da, resident])
def test_a_batch_without_queries_is_refused(schedule) -> None:
    told = Told()
    told.parts = lambda count: [range(0)]
    with pytest.raises(AssertionError, match="not for none"):
        finish(schedule(told))
