"""A lane whose jobs land in pieces: rows of the first job in any order, some long before others."""

from __future__ import annotations

from dataclasses import replace

from ess.flashtrans.rows import run_numpy
from ess.flashtrans.views import CheckedCopy
from tests.support.manual_lane import ManualLane


class RaggedLane(ManualLane):
    """Jobs end in the order in which they came, as a lane promises. Rows of a job have no order."""

    def advance(self, ticks: int = 1) -> None:
        super().advance(ticks)
        if self._jobs and not self._held:
            for copy in self._jobs[0].copies:
                self._run_some(copy)

    def _run_some(self, copy: CheckedCopy) -> None:
        """What has been copied is left out later: -1 skips a pair."""
        source, target = copy.source, copy.target
        if source.rows is None or target.rows is None or not len(source.rows):
            return
        picked = self._random.permutation(len(source.rows))[: self._random.integers(0, 4)]
        run_numpy(
            CheckedCopy(
                replace(source, rows=source.rows[picked]), replace(target, rows=target.rows[picked])
            )
        )
        source.rows[picked] = -1
