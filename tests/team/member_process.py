"""A member of a team as a process: `python -m tests.team.member_process KIND SIZE RANK INIT`.

Member 0 runs the prompts and says what they have left; then each waits for its standard input to
end, so that its memory can be looked at.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from ess.clock import RealClock
from ess.comm.processes.meeting import join_group
from ess.engine.config import EngineConfig
from ess.engine.step.runner import made_runner
from ess.kernels.backend import ops
from ess.prefill.team import TeamLead, TeamMember
from tests.team.rig import Made, model, offload, packs, prompts, run_packs

FAMILY, FORM, LENGTHS, CHUNK = "v32", "fp8", (200, 66), 64
SETTINGS = EngineConfig(modes="none")


def digest(made: list[Made]) -> str:
    left = hashlib.sha256()
    for each in made:
        for tensor in (*each.rows, *each.keys, *each.windows):
            left.update(tensor.contiguous().view(torch.uint8).numpy())
    return left.hexdigest()


def main(kind: str, size: int, rank: int, init: str) -> None:
    torch.set_num_threads(1)
    group = join_group(rank, size, init=init, team=size, secret=b"a secret of all members")
    tp = size if kind == "tp" else 1
    made = model(FAMILY, tp=tp, rank=rank % tp)
    pools = offload(made, FORM) if rank == 0 else None
    print("ready", flush=True)
    if pools is None:
        layout = made.config.layout(row=FORM, index="fp8")
        member = TeamMember(made, ops(SETTINGS.backend), layout, group, kind)
        member.run()
        print("ran", flush=True)
        sys.stdin.read()
    else:
        lead = TeamLead(made_runner(made, pools, SETTINGS), group.team, kind, RealClock())
        with torch.inference_mode():
            left = run_packs(
                pools,
                lambda spans: lead.queue_part(spans).made(),
                prompts(LENGTHS),
                packs(LENGTHS, CHUNK),
            )
        lead.stop()
        print(digest(left), flush=True)
        sys.stdin.read()
        pools.close()
    group.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
