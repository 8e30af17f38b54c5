"""The group of a rank that is its own process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Mapping
from types import MappingProxyType

from ess.comm.ending import Ending
from ess.comm.group import Beat
from ess.comm.link import LinkLost
from ess.comm.processes.members import WiredTeam
from ess.comm.processes.pulse import Pulse
from ess.comm.processes.wired import CLOSE_S, WiredLink
from ess.comm.team import Team


class JoinedGroup:
    def __init__(
        self,
        rank: int,
        size: int,
        name: str,
        team: Team,
        links: Mapping[str, WiredLink],
        pulse: Pulse,
        ending: Ending,
    ) -> None:
        self.rank = rank
        self.size = size
        self._name = name
        self.team = team
        self.next = links.get("next")
        self.previous = links.get("previous")
        reports = {link.peer: link for name, link in links.items() if name.isdigit()}
        self.reports = MappingProxyType(reports)
        self._links = list(links.values())
        self._pulse = pulse
        self._ending = ending
        self._is_closed = False

    def start(self) -> None:
        """Ends the threads at exit: one inside torch would abort the interpreter's end."""
        atexit.register(self._abandon)
        for link in self._links:
            link.start()
        self._pulse.start()

    def advance(self) -> None:
        self._pulse.advance()

    def beats(self) -> Mapping[int, Beat]:
        return self._pulse.beats()

    def fail(self, sentence: str) -> None:
        self._ending.fail(LinkLost(self.rank, sentence))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._abandon)
        for link in self._links:
            link.leave()
        self._pulse.stop()
        until_s = time.monotonic() + (CLOSE_S if self._ending.lost is None else 0.0)
        for link in self._links:
            link.part(until_s)
        if isinstance(self.team, WiredTeam):
            self.team.close()

    def _abandon(self) -> None:
        self.fail(f"{self._name} has ended without leaving the group")
        self.close()
