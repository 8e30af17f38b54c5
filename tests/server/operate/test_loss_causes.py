"""Of what a server knows about a lost engine, the cause is what it says."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ess.server.process.child import End
from ess.server.process.engines.group import EngineGroup, Loss, Member
from ess.server.process.engines.succession import Succession
from tests.support.manual_clock import ManualClock


class Ending:
    """A process that ends at once, if at all."""

    def __init__(self, end: End | None) -> None:
        self._end = end

    async def ended(self) -> End:
        return self._end if self._end is not None else await asyncio.Future()


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ((None, None), "no more of stage 1"),
        ((End("code 1", is_by_code=True), None), "no more of stage 1"),
        (
            (End("code 1", is_by_code=True), End("SIGKILL", is_by_code=False)),
            "stage 1 is lost: SIGKILL",
        ),
    ],
)
def test_the_process_that_was_killed_is_the_cause_of_what_others_say(
    ends: tuple[End | None, ...], cause: str
):
    async def act() -> Loss:
        group = EngineGroup([Member(f"stage {n}", Ending(end)) for n, end in enumerate(ends)])
        return await group.cause(Loss("no more of stage 1", is_said=True))

    assert asyncio.run(act()).how == cause


def test_what_an_engine_has_said_is_the_cause_where_its_end_is_seen_first():
    async def act() -> Loss:
        group = EngineGroup([Member("", Ending(End("code 1", is_by_code=True)))])

        async def start(number: int) -> EngineGroup:
            return group

        async def hear() -> None:
            await asyncio.wait(group._ends)
            for _ in range(9):
                await asyncio.sleep(0)
            link.on_fault("no memory")

        async def until_ready() -> None:
            return None

        link = SimpleNamespace(run=hear, engine=SimpleNamespace(until_ready=until_ready))
        link.open_count = link.open_elsewhere_count = 0
        given = SimpleNamespace(start=start, stopped_s=60.0, watchdog_s=60.0)
        engines = Succession(given, link, None, ManualClock())  # type: ignore[arg-type]
        return await engines._run_one()

    assert asyncio.run(act()).how == "no memory"
