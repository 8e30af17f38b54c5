"""A pipeline as processes: rank 0 speaks to this test as to its server."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ess.engine.process.messages import Fault, Rank
from ess.ports import kept_port
from tests.pd.processes import PATIENCE_MS, EngineProcess
from tests.support.forked import started

CUTS = {1: (0, 6), 2: (0, 3, 6), 4: (0, 1, 3, 4, 6)}
MODULE = "ess.prefill.worker"


class PipelineProcess(EngineProcess):
    """`ranks` are the processes of all stages, the first of them the lead's."""

    def __init__(self, folder: Path, stage_count: int, *, rank: dict | None = None, **config):
        wishes = {
            "size": stage_count,
            "layers": tuple(itertools.pairwise(CUTS[stage_count])),
            **(rank or {}),
        }
        self._kept = contextlib.ExitStack()
        port = self._kept.enter_context(kept_port("127.0.0.1"))
        lead = Rank(rank=0, init=f"tcp://127.0.0.1:{port}", **wishes)
        super().__init__(folder, module=MODULE, rank=lead, role="prefill", **config)
        self.ranks = [self.process]
        for number in range(1, stage_count):
            follower = started("engine", ["-m", MODULE], stdin=subprocess.PIPE)
            mine = msgspec.structs.replace(lead, rank=number)
            launch = msgspec.structs.replace(self.launch, rank=mine)
            assert follower.stdin is not None
            follower.stdin.write(msgspec.json.encode(launch) + b"\n")
            follower.stdin.flush()
            self.ranks.append(follower)

    def close(self) -> None:
        for process in self.ranks[1:]:
            process.kill()
            process.wait()
            process.stdin.close()
        self._kept.close()
        super().close()

    def fault(self) -> str:
        """The last word of the lead."""
        while not isinstance(message := self.hear(), Fault):
            pass
        return message.sentence

    def wait_all(self, *, but: int | None = None) -> list[int]:
        """The codes with which all ranks end, but for a rank that cannot."""
        return [
            process.wait(timeout=PATIENCE_MS / 1000)
            for at, process in enumerate(self.ranks)
            if at != but
        ]


@contextlib.contextmanager
def pipeline(folder: Path, stage_count: int, **wishes) -> Iterator[PipelineProcess]:
    made = PipelineProcess(folder, stage_count, **wishes)
    try:
        yield made
    finally:
        made.close()
