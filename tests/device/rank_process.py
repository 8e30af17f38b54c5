"""A rank on the pretended device; its arguments say which rank it is and which cases to run.

    python -m tests.device.rank_process RANK SIZE PORT CASES

Each case is an engine of its own, in one group for all; the tokens of its requests and how its
steps ran are printed as a line of JSON. A case that names a rank which is `lost` ends there in the
middle of its requests, or where it has met the others `lost_at` times.
"""

from __future__ import annotations

import json
import os
import sys

from tests.support import pretended  # from here on there is a device

from tests.support import pretended_nccl  # isort: skip # noqa: F401

import torch

from ess.comm.experts.balance import balanced
from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.placement import Placement, Places, even
from ess.comm.link import LinkLost
from ess.comm.processes.meeting import join_group
from ess.door.device.memory.uploads import Download
from ess.engine.engine import Engine
from ess.engine.ranks.agreement import Many
from ess.models.registry import build, read_config
from tests.device import engines
from tests.device.rank_tasks import TASKS, added
from tests.support.checkpoints import tensors

PATIENCE_S = 60.0
OF_TEST = ("tasks", "redundant", "rehearses", "lost", "lost_at")


class Rank:
    def __init__(self, group, case):
        self.tasks = TASKS[case["tasks"][group.rank]]
        config = read_config(engines.FAMILIES[case["family"]])
        whole, count = tensors(config), config.expert_count
        loads, copies = [1000, *range(count - 1)], case.get("redundant", 0)
        placed = balanced(loads, group.size, copies) if copies else even(count, group.size).places
        places = Places(Placement(placed))
        home = torch.device("cuda", 0)
        self.expert_ranks = FixedExpertRanks(
            group.team, places, home, lambda there: Download(there).read
        )
        model = build(config, lambda name: whole[name].to("cuda"), expert_ranks=self.expert_ranks)
        settings = {name: case[name] for name in case if name not in OF_TEST}
        _, offload, chosen = engines.parts("cuda", **settings)
        self.meets_left = case.get("lost_at", 0) if case.get("lost") == group.rank else 0
        self.advance = group.advance
        ranks = Many(self.expert_ranks, on_meet=self.met)
        self.engine = Engine(model, offload, chosen, ranks=ranks)
        self.requests, self.waited, self.stood_by, self.by_graph = [], [], 0, 0
        if case.get("rehearses"):
            self.engine.rehearse(lambda said: None)

    def met(self):
        self.advance()
        self.meets_left -= 1
        if not self.meets_left:
            os._exit(3)

    def run(self, *, is_lost=False):
        left, step = list(self.tasks), 0
        while left or not self.engine.is_idle:
            while left and left[0][0] <= step:
                self.requests.append(added(self.engine, left.pop(0)))
            pretended.PRETENCE.waited.clear()
            if self.engine.is_idle:
                replayed = self.replayed
                self.engine.stand_by()
                self.stood_by += 1
                self.by_graph += self.replayed - replayed
            else:
                result = self.engine.step()
                if result.turn_count and not result.chunks:
                    self.waited.append(sorted(pretended.PRETENCE.waited))
            self.engine.check()
            step += 1
            if is_lost and step == 6:
                os._exit(3)
        self.engine.close()
        self.engine.offload.close()
        return self.told()

    @property
    def replayed(self):
        line = self.engine.graph_line()
        return 0 if line is None else line.replayed

    def told(self):
        line, tuning = self.engine.graph_line(), self.engine.tuning
        return {
            "said": [request.output for request in self.requests],
            "replayed": self.replayed,
            "captured": 0 if line is None else line.captured,
            "eager": {} if line is None else line.eager,
            "splits": tuning.split_count,
            "stood_by": self.stood_by,
            "by_graph": self.by_graph,
            "waited": self.waited,
            "chosen": sum(map(sum, self.expert_ranks.loads.recent().values())),
            "exchanged": self.expert_ranks.traffic.exchange_count,
        }


def main(rank, size, port, cases):
    rank, size = int(rank), int(size)
    group = join_group(
        rank,
        size,
        init=f"tcp://127.0.0.1:{port}",
        team=size,
        timeout_s=PATIENCE_S,
        patience_s=PATIENCE_S,
        device="cuda:0",
    )
    with engines.alone():
        for case in json.loads(cases):
            try:
                said = Rank(group, case).run(is_lost=case.get("lost") == rank)
            except LinkLost as lost:
                said = {"lost": str(lost)}
            print(json.dumps(said), flush=True)
            if "lost" in said:
                os._exit(0)
    group.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
