"""The processes of one engine on this machine, which live and end together."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ess.engine.process.lifeline import LEAVE
from ess.engine.process.messages import Launch, Rank
from ess.server.process.child import Child
from ess.server.process.engines.stages import stage_name

ALONE: Final = "ess.engine.process.worker"
PACED: Final = "ess.engine.process.fake_engine"
STAGE: Final = "ess.prefill.worker"
RANK: Final = "ess.engine.process.rank"
MESH: Final = "ess.engine.mesh.process"
LOOK_S: Final = 1.0
SEEN_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Loss:
    """How an engine was lost. `is_said` if it said so itself, or ended with an exit code: started
    again in the same way, it may well end in the same way. `open_count` is the number of requests
    that were open then, where they have ended since."""

    how: str
    is_said: bool = False
    open_count: int | None = None


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the engine; `name` is empty if it is the only one."""

    name: str
    child: Child

    def lost(self, how: str) -> str:
        """
        >>> Member("stage 1", None).lost("it hangs"), Member("", None).lost("it hangs")
        ('stage 1 is lost: it hangs', 'it hangs')
        """
        return f"{self.name} is lost: {how}" if self.name else how


class EngineGroup:
    def __init__(self, members: Sequence[Member]) -> None:
        assert members, "an engine has a process"
        self._members = tuple(members)
        self._ends = {asyncio.ensure_future(m.child.ended()): m for m in members}

    @classmethod
    async def start(
        cls,
        launches: Sequence[Launch],
        endpoints: Sequence[str],
        *,
        is_paced: bool,
        environment: Mapping[str, str] | None = None,
    ) -> EngineGroup:
        """Starts a process per launch. Rank 0, or the engine's only process, connects to the server
        at the endpoints. If one cannot be started, the others have ended when this raises: another
        engine may start at once, and needs their ports and files."""
        members: list[Member] = []
        try:
            for launch in launches:
                program = PACED if is_paced else program_of(launch)
                leads = launch.rank is None or launch.rank.rank == 0
                given = endpoints if leads else ()
                child = await Child.start(program, launch, *given, environment=environment)
                members.append(Member(name_of(launch.rank), child))
        except BaseException:
            for member in members:
                member.child.kill()
            await asyncio.gather(*(member.child.ended() for member in members))
            raise
        return cls(members)

    async def lost(self, *, stopped_s: float) -> Loss:
        """Waits until a process has ended, or has been stopped for `stopped_s`: after SIGSTOP it
        does nothing until it is continued."""
        passed_s, every_s = 0.0, min(LOOK_S, stopped_s / 4)
        while True:
            done, _ = await asyncio.wait(
                self._ends, timeout=every_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return self._first()
            stopped = next((m for m in self._members if m.child.is_stopped), None)
            passed_s = 0.0 if stopped is None else passed_s + every_s
            if stopped is not None and passed_s > stopped_s:
                return Loss(stopped.lost(f"it has been stopped for {passed_s:.1f} s"))

    async def cause(self, loss: Loss) -> Loss:
        """The first cause of a loss: a process that reports a failure may only follow another that
        a signal ended. The signal came first, but may be seen later."""
        if loss.is_said and len(self._ends) > 1:
            await asyncio.wait(self._ends, timeout=SEEN_S, return_when=asyncio.FIRST_COMPLETED)
            if any(task.done() for task in self._ends) and not self._first().is_said:
                return self._first()
        return loss

    def _first(self) -> Loss:
        """A process that a signal has ended, if any; else any process that has ended."""
        ends = [(member, task.result()) for task, member in self._ends.items() if task.done()]
        losses = [Loss(member.lost(end.how), end.is_by_code) for member, end in ends]
        return min(losses, key=lambda loss: loss.is_said)

    def ask_to_leave(self) -> None:
        """Ends processes that have not loaded yet; the others end with the lead."""
        for member in self._members:
            member.child.ask_to_end(LEAVE)

    def kill(self) -> None:
        for member in self._members:
            member.child.kill()

    async def stop(self, *, within_s: float) -> None:
        """Waits for all processes to end; kills those that have not after `within_s`."""
        await asyncio.gather(*(m.child.stop(within_s=within_s) for m in self._members))
        await asyncio.gather(*self._ends)


def program_of(launch: Launch) -> str:
    if launch.rank is not None:
        return STAGE if launch.config.role == "prefill" else MESH
    return ALONE if launch.config.dp_size == 1 else RANK


def name_of(rank: Rank | None) -> str:
    """
    >>> name_of(Rank(rank=1, size=2, init="", layers=((0, 4), (4, 8))))
    'stage 1 (layers 4 to 7)'
    >>> name_of(Rank(rank=3, size=4, init="", layers=((0, 4), (4, 8)), team=2))
    'stage 1 (layers 4 to 7), member 1'
    """
    if rank is None:
        return ""
    stage, member = divmod(rank.rank, rank.team)
    name = stage_name(stage, rank.layers[stage])
    return f"{name}, member {member}" if rank.team > 1 else name
