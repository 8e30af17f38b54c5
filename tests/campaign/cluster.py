"""The workers of a plan, their network, their clock and their disks."""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Final, Literal

import numpy as np

from ess.engine.engine import EngineConfig
from ess.layout import ModelLayout
from ess.transfer.runs import Region
from ess.transfer.transport import Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from ess.transfer.transports.inprocess import Exchange
from tests.campaign.disks import ManualDisk, damage
from tests.campaign.families import FAMILIES
from tests.campaign.lane import RaggedLane
from tests.campaign.lives.drift import Drift
from tests.campaign.plan import Plan
from tests.campaign.workers import Piped, Whole, layout_of
from tests.support.manual_clock import ManualClock
from tests.support.manual_lane import ManualLane

SCRATCH_BYTES: Final = 1 << 18
MEMORY: Final = Path("/dev/shm")

Kind = Literal["giver", "taker"]
AnyWorker = Whole | Piped


class Cluster:
    """`struck` counts what networks and disks did. To be closed."""

    def __init__(self, plan: Plan) -> None:
        self.struck: Counter[str] = Counter()
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self.clock, self._exchange = ManualClock(), Exchange()
        self._epochs = itertools.count(1)
        self._root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self._disks: dict[Path, ManualDisk] = {}
        self._transports: list[FaultyTransport] = []
        self.of: dict[str, list[AnyWorker]] = {
            "giver": [self._made("giver", number) for number in range(plan.giver_count)],
            "taker": [self._made("taker", number) for number in range(plan.taker_count)],
        }
        self.meet()

    @property
    def all(self) -> list[AnyWorker]:
        return [*self.of["giver"], *self.of["taker"]]

    def meet(self) -> None:
        for giver, taker in itertools.product(self.of["giver"], self.of["taker"]):
            giver.meet(taker.metadata())
            taker.meet(giver.metadata())

    def restart(self, kind: Kind, place: int) -> AnyWorker:
        """The process is gone; another comes, which finds its disk, and whom all meet."""
        lost = self.of[kind][place]
        for port in lost.ports:
            port.close()
        home = self._home(kind, place)
        for folder in [each for each in self._disks if each.is_relative_to(home)]:
            self._disks.pop(folder).kill()
            damage(folder, self._draw, self.struck)
        self.of[kind][place] = self._made(kind, place)
        self.meet()
        return lost

    def advance(self) -> None:
        """What disks do in a turn."""
        for disk in self._disks.values():
            disk.advance()

    def count(self) -> Counter[str]:
        """Of all faults of networks and disks."""
        for transport in self._transports:
            for fault, count in transport.injected.items():
                self.struck[fault.value] += count
        return self.struck

    def close(self) -> None:
        for disk in self._disks.values():
            disk.kill()
        shutil.rmtree(self._root)

    # ---- parts of workers

    def _made(self, kind: Kind, number: int) -> AnyWorker:
        plan = self._plan
        if kind == "giver" and plan.stages:
            return self._pipeline(number)
        epoch = next(self._epochs)
        lane = RaggedLane if plan.is_ragged else ManualLane
        pools = {
            "host_pages": plan.host_pages,
            "index_pages": plan.index_pages,
            "slot_pages": plan.slot_pages,
            "lines": plan.lines,
            "evict": plan.evict,
            "lane": lane(seed=plan.seed + epoch, delay_max=plan.delay_max),
            "clock": self.clock,
            "disk": self._disk(kind, number, layout_of(plan.mtp)),
            "model": FAMILIES[plan.family].model(),
        }
        made = Whole(
            self._exchange,
            epoch,
            self.clock,
            config=self._config(),
            pools=pools,
            lease_s=plan.lease_s,
            wait_s=plan.wait_s,
            wrap=lambda inner: self._worse(inner, epoch),
        )
        if plan.drifts:
            made.drift = Drift(made.engine, seed=plan.seed + epoch, cuts_chunks=True)
        return made

    def _config(self) -> EngineConfig:
        plan = self._plan
        return EngineConfig(
            mtp=plan.mtp,
            depth=plan.depth,
            modes=plan.modes,
            tbo=plan.tbo,
            deterministic=plan.deterministic,
            promise=plan.promise,
            warm=plan.warm,
            budget_every=plan.budget_every,
            verify_every=plan.verify_every,
            verify_fatal=True,
            chunk_tokens=plan.chunk,
            handoff_failure=plan.failure,
        )

    def _pipeline(self, number: int) -> Piped:
        plan = self._plan
        return Piped(
            plan.stages,
            self._exchange,
            self._epochs,
            self.clock,
            mtp=plan.mtp,
            chunk=plan.chunk,
            deterministic=plan.deterministic,
            page_counts=(plan.host_pages, plan.index_pages),
            lines=plan.lines,
            lease_s=plan.lease_s,
            wait_s=plan.wait_s,
            wrap=self._worse,
            disk_of=lambda part, stage: self._disk("giver", number, part, stage),
            seed=plan.seed + number,
        )

    def _worse(self, inner: Transport, epoch: int) -> Transport:
        scratch = Region(99, np.zeros(SCRATCH_BYTES, np.uint8))
        inner.register([scratch])
        odds = {Fault(name): chance for name, chance in self._plan.odds.items()}
        made = FaultyTransport(
            inner, clock=self.clock, odds=odds, scratch=scratch, seed=self._plan.seed + epoch
        )
        self._transports.append(made)
        return made

    def _home(self, kind: Kind, number: int) -> Path:
        return self._root / f"{kind}-{number}"

    def _disk(
        self, kind: Kind, number: int, layout: ModelLayout, stage: int = 0
    ) -> ManualDisk | None:
        plan = self._plan
        if plan.disks not in ("all", f"{kind}s"):
            return None
        folder = self._home(kind, number) / str(stage)
        self._disks[folder] = ManualDisk(
            folder,
            page_bytes=layout.host_page_bytes,
            page_max=plan.disk_pages,
            odds=plan.disk_odds,
            delay_max=plan.disk_delay,
            seed=self._draw.randrange(1 << 30),
            struck=self.struck,
        )
        return self._disks[folder]
