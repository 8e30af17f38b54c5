"""Engines that divide the experts, a thread each, and what each of them is to do."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ess.comm.experts.expert_ranks import ExpertRanks
from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.placement import Places, even
from ess.comm.group import Group
from ess.comm.local import local_group
from ess.comm.team import Team
from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.ranks.agreement import Many
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.models.model import Model
from ess.models.registry import build, read_config
from tests.comm.test_local import each
from tests.model.test_engine import prompt
from tests.support.checkpoints import GLM, SMALL, V32, tensors
from tests.support.manual_lane import ManualLane

EXPERTS = SMALL["n_routed_experts"]
PATIENCE_S = 240.0


def fixed(team: Team, places: Places) -> FixedExpertRanks:
    """As on a device, with all that lies there on the host."""
    return FixedExpertRanks(team, places, torch.device("cpu"), lambda there: there.clone)


@functools.cache
def weights(family: str) -> tuple[object, dict[str, torch.Tensor]]:
    """Of `small(family, layer_count=3)`."""
    torch.set_num_threads(1)
    raw = {"v32": V32, "glm": GLM}[family]
    config = read_config({**raw, **SMALL, "num_hidden_layers": 3})
    return config, tensors(config)


def share(family: str, expert_ranks: ExpertRanks) -> Model:
    """A rank's model. It has no way to the weights of another rank's experts."""
    config, whole = weights(family)

    def own(name: str) -> torch.Tensor:
        above, is_routed, rest = name.partition(".mlp.experts.")
        layer = int(above.rpartition(".")[2]) if is_routed else 0
        assert not is_routed or int(rest.split(".")[0]) in expert_ranks.own(layer), name
        return whole[name]

    return build(config, own, expert_ranks=expert_ranks)


@dataclass(frozen=True)
class Task:
    """A request that comes when its engine has taken part in so many steps; one of `cancelled`
    tokens or more is given up, one of `preempted` is preempted for some steps."""

    at: int
    length: int
    count: int = 10
    cancelled: int | None = None
    preempted: int | None = None


class Rank:
    def __init__(
        self,
        group: Group,
        family: str,
        *,
        chunks: int = 1,
        mtp: int = 1,
        index_pages: int | None = None,
        places: Places | None = None,
        is_fixed: bool = False,
        **config,
    ) -> None:
        placed = places or Places(even(EXPERTS, group.size))
        self.expert_ranks = (fixed if is_fixed else ExpertRanks)(group.team, placed)
        made = share(family, self.expert_ranks)
        layout = made.config.layout(row="f32", index="f32", has_mtp=mtp > 1)
        self.offload = Offload.create(
            layout,
            slot_bytes=layout.group_count * layout.chunk_bytes * chunks,
            host_bytes=60 * layout.host_page_bytes,
            index_bytes=None if index_pages is None else index_pages * layout.index_page_bytes,
            length_max=1024,
            slot_floor=24,
            lane=ManualLane(seed=chunks + group.rank, delay_max=3),
            poison=True,
        )
        settings = EngineConfig(**{"mtp": mtp, "chunk_tokens": 48, **config})
        self.engine = Engine(
            made, self.offload, settings, ranks=Many(self.expert_ranks, on_meet=group.advance)
        )
        self.made: list[tuple[Task, Request]] = []
        self.stood_by = 0
        self._held: dict[int, Request] = {}

    def run(self, tasks: Sequence[Task]) -> Rank:
        """Until all ranks have done theirs."""
        left, step = sorted(tasks, key=lambda task: task.at), 0
        while left or not self.engine.is_idle or self._held:
            while left and left[0].at <= step:
                task = left.pop(0)
                request = self.engine.add(prompt(task.length), Sampling(tokens_max=task.count))
                self.made.append((task, request))
            self._act(step)
            self._turn()
            step += 1
        self.engine.close()
        self._check_pools()
        return self

    def _turn(self) -> None:
        if self.engine.is_idle:
            self.engine.stand_by()
            self.stood_by += 1
        else:
            self.engine.step()
        self.engine.check()

    def _act(self, step: int) -> None:
        for task, request in self.made:
            count = len(request.output)
            if task.cancelled is not None and count >= task.cancelled and not request.reason:
                self.engine.cancel(request)
            if task.preempted is not None and count == task.preempted:
                is_running = request.state == "decoding" and request not in self._held.values()
                if is_running and step + 3 not in self._held:
                    self.engine.preempt(request)
                    self._held[step + 3] = request
        if step in self._held:
            resumed = self._held.pop(step)
            if resumed.state == "preempted":
                self.engine.resume(resumed)

    def _check_pools(self) -> None:
        self.offload.drain()
        stats = self.offload.stats()
        assert stats.used_slot_count.sum() == 0
        assert stats.free_host_page_count == stats.host_page_count
        self.offload.close()


def run_ranks(family: str, tasks: Sequence[Sequence[Task]], **config) -> list[Rank]:
    """A rank for each list of tasks."""
    groups = local_group(len(tasks), team=len(tasks), patience_s=PATIENCE_S)

    def act(group: Group) -> Rank:
        try:
            rank = Rank(group, family, **config)
            return rank.run(tasks[group.rank])
        except BaseException as wrong:
            group.fail(f"{type(wrong).__name__}: {wrong}")
            raise

    ranks = each(groups, act)
    for rank in ranks:
        if isinstance(rank, BaseException):
            raise rank
    return ranks
