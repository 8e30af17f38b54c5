"""What a plan's workers are made of: an engine, or a pipeline of stages, behind one face."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Callable, Iterable

import torch

from ess.clock import Clock
from ess.comm.link import AHEAD_MAX, HELD_MAX
from ess.comm.local import local_group
from ess.door import Offload
from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.plan import StepResult
from ess.engine.step.runner import made_runner
from ess.errors import BadState
from ess.layout import ModelLayout
from ess.models.model import Model
from ess.models.registry import build
from ess.pool.disk.tier import DiskTier
from ess.prefill.follower import Follower
from ess.prefill.lead import Lead
from ess.prefill.rooms import stage_offload
from ess.prefill.stage import Stage
from ess.prefill.stages import members
from ess.transfer.endpoint import Identity
from ess.transfer.transport import Transport
from ess.transfer.transports.inprocess import Exchange, InProcessTransport
from tests.campaign.lives.drift import Drift
from tests.pd.rigs import LAYOUT, SEAL, Worker
from tests.prefill.pipes import Sizes
from tests.support.checkpoints import small, tensors

CUTS = {1: (0, 2), 2: (0, 1, 2)}
LINK_MAX = HELD_MAX + AHEAD_MAX


def layout_of(mtp: int) -> ModelLayout:
    return small().config.layout(row="f32", index="f32", has_mtp=mtp > 1)


@functools.cache
def part_of(first: int, stop: int) -> Model:
    config = small().config
    return build(config, _weights().__getitem__, layers=range(first, stop))


@functools.cache
def _weights() -> dict[str, torch.Tensor]:
    return tensors(small().config)


class Whole(Worker):
    """All layers in one engine, whose settings change at every turn where it has a `drift`."""

    drift: Drift | None = None

    def step(self) -> StepResult:
        """A worker that rests has nothing to check."""
        if self.drift is not None:
            self.drift.turn()
        return self.engine.step() if self.is_quiet else super().step()

    @property
    def offloads(self) -> list[Offload]:
        return [self.offload]

    @property
    def ports(self) -> list[Port]:
        return [self.port]

    @property
    def transports(self) -> list[Transport]:
        return [self.transport]

    def metadata(self) -> bytes:
        return self.port.metadata()

    def meet(self, metadata: bytes) -> None:
        self.port.meet(metadata)

    def forget(self) -> None:
        with contextlib.suppress(BadState):  # some of them are in use
            self.engine.forget_prefixes()


class Piped:
    """Stages of a prefill worker, each of which takes a turn or does not."""

    def __init__(
        self,
        stage_count: int,
        exchange: Exchange,
        epochs: Iterable[int],
        clock: Clock,
        *,
        mtp: int,
        chunk: int,
        deterministic: bool,
        page_counts: tuple[int, int],
        lines: int,
        lease_s: float,
        wait_s: float,
        wrap: Callable[[Transport, int], Transport],
        disk_of: Callable[[ModelLayout, int], DiskTier | None],
        seed: int,
    ) -> None:
        self._layers = list(itertools.pairwise(CUTS[stage_count]))
        self._draw = random.Random(seed)
        config = EngineConfig(max_running=lines, deterministic=deterministic)
        whole = layout_of(mtp)
        self._layer_total = whole.layer_total
        self.transports: list[Transport] = []
        self.stages: list[Stage] = []
        for number, (layers, epoch) in enumerate(zip(self._layers, epochs, strict=False)):
            offload = stage_offload(
                whole,
                layers,
                host_bytes=page_counts[0] * whole.host_page_bytes,
                index_bytes=page_counts[1] * whole.index_page_bytes,
                length_max=1024,
                sequence_max=lines,
                poison=True,
                disk=disk_of(whole.part(*layers), number),
            )
            identity = Identity(epoch=epoch, seal=SEAL, layout=LAYOUT)
            inner = InProcessTransport(
                identity, exchange=exchange, name=f"worker {epoch}", clock=clock
            )
            self.transports.append(wrap(inner, epoch))
            port = Port(
                *(offload, self.transports[-1], SEAL), clock=clock, wait_s=wait_s, lease_s=lease_s
            )
            runner = made_runner(part_of(*layers), offload, config)
            self.stages.append(Stage(runner, port=port, clock=clock))
        self._begin(config, chunk, clock)

    def _begin(self, config: EngineConfig, chunk: int, clock: Clock) -> None:
        self._groups = local_group(len(self.stages), patience_s=1.0)
        hellos = [stage.hello(LAYOUT) for stage in self.stages]
        self._followers = [
            Follower(stage, group, hello)
            for stage, group, hello in zip(self.stages, self._groups, hellos, strict=True)
            if group.rank
        ]
        self.engine = Lead(
            self.stages[0],
            self._groups[0],
            config,
            layers=self._layers,
            sizer=Sizes(chunk),
            clock=clock,
            stage_timeout_s=1e9,
        )
        self._hellos = self.engine.stages.gather(hellos[0], 1.0)

    @property
    def offloads(self) -> list[Offload]:
        return [stage.offload for stage in self.stages]

    @property
    def ports(self) -> list[Port]:
        return [stage.port for stage in self.stages]

    @property
    def port(self) -> Port:
        """The lead's, by whose epoch the worker is known."""
        return self.ports[0]

    def metadata(self) -> bytes:
        ranges = members(self._hellos, self._layer_total)
        return self.port.metadata(ranges)

    def meet(self, metadata: bytes) -> None:
        self.port.meet(metadata)
        self.engine.meet(metadata)

    def forget(self) -> None:
        with contextlib.suppress(BadState):
            self.engine.forget_prefixes()

    def step(self) -> None:
        """Each stage twice on average, in any order. No token is made."""
        rested = self.is_quiet
        for rank in self._draw.choices(range(len(self.stages)), k=2 * len(self.stages)):
            self._turn(rank)
        if not rested:
            for each in (self.engine, *self._followers):
                each.check()

    def _turn(self, rank: int) -> None:
        """Nothing while it would wait for another rank: no rank has a thread of its own."""
        following = self._groups[rank].next
        if rank == 0:
            self.engine.step()
        elif following is None or len(following._out.frames) < LINK_MAX:
            self._followers[rank - 1].turn()

    @property
    def is_quiet(self) -> bool:
        lead = self.engine
        is_over = lead.is_idle and not lead.is_handing_over and lead.stages.is_clear
        links = [group.next for group in self._groups if group.next is not None]
        is_busy = any(stage.is_busy for stage in self.stages)
        return is_over and not is_busy and not any(link._out.frames for link in links)
