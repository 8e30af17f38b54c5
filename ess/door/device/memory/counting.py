"""The device's counts, which reach the host a step late, in one small copy per step.

Four kinds of calls are counted separately: calls that resolve selections, that find slots for new
rows, that land rows ahead of selections, and that make rows leave. The copy also has the answers to
looks (`knowledge`): how many rows of a sequence had no slot, and how many rows had given way by
then.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ess.array_types import Counts
from ess.door.device.memory.lane import DeviceLane
from ess.door.device.memory.uploads import LatestCopy
from ess.errors import BadState
from ess.pool.lru.cuda_shape import KINDS, REPORT, Kind

STORED: Final = len(REPORT)
WIDTH: Final = STORED + 1
EVICTED: Final = REPORT.index("evicted")
FAULTS: Final[tuple[tuple[str, tuple[Kind, ...], str], ...]] = (
    ("faults", KINDS, "selected entries are no positions of their sequences, or have no row yet"),
    ("unwritten", KINDS, "selected entries are rows that the host has never had"),
    ("places", ("write",), "new rows found no slot and are lost"),
)


@dataclass(frozen=True, slots=True)
class QueuedClaims:
    """The most that work queued before a sending may claim in each group. Where all rows of these
    sequences are in slots, their step claims slots only for its new rows."""

    sending: int
    at_most: Counts
    sequences: frozenset[int]
    new_rows: int | None


@dataclass(frozen=True, slots=True)
class HeardCounts:
    """What one copy has brought, and the work whose claims are not in it. Numbers are compared only
    with others of the same copy: between two copies rows may have given way."""

    totals: Counts
    looks: Counts
    landed_count: int
    unheard: tuple[QueuedClaims, ...]

    def look(self, line: int, sending: int) -> tuple[int, int] | None:
        """Absent rows and rows that had given way, once that sending has landed."""
        if self.landed_count < sending:
            return None
        return int(self.looks[line, 0]), int(self.looks[line, 1])

    def counts(self, name: str, *kinds: Kind) -> Counts:
        """The counts of these kinds by group."""
        at = STORED if name == "stored" else REPORT.index(name)
        chosen = [KINDS.index(kind) for kind in kinds or KINDS]
        counts: Counts = self.totals[chosen, :, at].sum(axis=0)
        return counts

    def used(self) -> Counts:
        """Slots with a row."""
        return self.counts("claimed") - self.counts("evicted") - self.counts("left")


class Counting:
    """`totals` [kinds, groups, counts]: each number of the reports, and rows that were stored.
    `looks` [lines, 2]: absent rows, and rows that had given way."""

    def __init__(self, lane: DeviceLane, group_count: int, line_count: int) -> None:
        self._lane = lane
        sizes = len(KINDS) * group_count * WIDTH, line_count * 2
        self._numbers = torch.zeros(sum(sizes), dtype=torch.int64, device=lane.home)
        totals, looks = torch.split(self._numbers, list(sizes))
        self.totals = totals.view(len(KINDS), group_count, WIDTH)
        self.looks = looks.view(line_count, 2)
        self._behind = LatestCopy(lane.device, self._numbers)
        self._since: list[QueuedClaims] = []
        self._sending = 0

    # ---- on the device

    def add(self, kind: Kind, reports: Tensor) -> None:
        """`reports` [calls, groups, numbers of a report]."""
        totals = self.of(kind)[:, :STORED]
        totals += reports.sum(dim=0)

    def add_landing(self, group: int, report: Tensor) -> None:
        """The report of one call for this group."""
        self.totals[KINDS.index("landing"), group, :STORED] += report

    def of(self, kind: Kind) -> Tensor:
        """The totals of a kind of call, [groups, counts]; each call adds its report."""
        return self.totals[KINDS.index(kind)]

    def evicted(self) -> Tensor:
        """The number of rows that have given way, in all groups; it lies on the device."""
        evicted: Tensor = self.totals[:, :, EVICTED].sum()
        return evicted

    def send(self) -> None:
        self._sending = self._behind.send(self._numbers, self._lane.compute) or self._sending

    # ---- on the host

    @property
    def next_sending(self) -> int:
        return self._sending + 1

    def claims(
        self, at_most: Counts, sequences: Many[int] = (), *, new_rows: int | None = None
    ) -> None:
        """How many slots of each group the queued work may claim at most."""
        self._since.append(QueuedClaims(self.next_sending, at_most, frozenset(sequences), new_rows))

    def heard(self) -> HeardCounts:
        """As of the latest step whose counts have landed. The driver is asked once."""
        newest, landed = self._behind.newest(), self._behind.landed_count
        totals, looks = np.split(newest, [self.totals.numel()])
        self._since = [claims for claims in self._since if claims.sending > landed]
        shape = tuple(self.totals.shape)
        return HeardCounts(totals.reshape(shape), looks.reshape(-1, 2), landed, tuple(self._since))

    def require_sound(self) -> None:
        """BadState where kernels have met arguments that a pool on the host would refuse."""
        heard = self.heard()
        for name, kinds, sentence in FAULTS:
            counts = heard.counts(name, *kinds)
            if counts.any():
                group = int(counts.argmax())
                raise BadState(f"group {group}: {int(counts[group])} {sentence}")

    def wait(self) -> None:
        """Waits until the host has the counts of all that is queued. For audits."""
        self.send()
        self._behind.wait()
