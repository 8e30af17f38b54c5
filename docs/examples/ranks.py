"""Four ranks, two stages of a team of two, in one process: links, teams, reports and beats.

Each member of the first stage exchanges columns with the other and hands them on to the same
member of the second stage, whose team gathers the whole; the lead hears of it in a report.

    python docs/examples/ranks.py
"""

from __future__ import annotations

import threading

import torch

from ess.comm.group import Group
from ess.comm.link import Link, LinkLost, next_frame
from ess.comm.local import local_group


def first_stage(group: Group, following: Link) -> None:
    team = group.team
    rows = torch.full((2, 4), float(group.rank))
    columns = team.all_to_all([part.contiguous() for part in rows.chunk(team.size, dim=1)])
    group.advance()
    following.send(team.broadcast(b"add", root=0), torch.cat(columns))
    following.flush()


def second_stage(group: Group, previous: Link) -> None:
    frame = next_frame(previous)
    assert frame.tensor is not None, "the first stage sends a tensor"
    whole = group.team.all_gather(frame.tensor, dim=1)
    group.advance()
    group.team.barrier()
    group.reports[0].send(f"{frame.head.decode()}: {whole.tolist()}".encode())


def act(group: Group) -> None:
    try:
        if group.next is not None:
            first_stage(group, group.next)
        elif group.previous is not None:
            second_stage(group, group.previous)
    except LinkLost as lost:
        group.fail(f"rank {group.rank} stops: {lost}")


def main() -> None:
    groups = local_group(4, team=2)
    threads = [threading.Thread(target=act, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lead = groups[0]
    print(next_frame(lead.reports[2]).head.decode())
    print({rank: beat.progress for rank, beat in lead.beats().items()})
    for group in groups:
        group.close()


main()
