"""A rank of its own process: `python -m tests.comm.peer_process ACT RANK SIZE PORT [TEAM]`.

It says what it does on standard output, a line each, and ends with `done` or with what it raised.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from collections.abc import Iterator

import torch

from ess.comm.group import Group
from ess.comm.link import LinkLost
from ess.comm.processes.joined import JoinedGroup
from ess.comm.processes.meeting import join_group
from ess.errors import EssError
from tests.comm.poison import poison_pickle

FRAMES = 400
SECRET = b"the ranks of this test were started with it"
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64]


def say(*words: object) -> None:
    print(*words, flush=True)


def frames(seed: int) -> Iterator[tuple[bytes, torch.Tensor | None]]:
    """Heads and tensors of odd sizes, the same for the same seed; every head has a checksum."""
    chance = random.Random(seed)
    for number in range(FRAMES):
        tensor = None
        if chance.random() < 0.7:
            dims = [chance.choice([0, 1, 2, 7, 33]) for _ in range(chance.randint(0, 2))]
            dims.append(chance.choice([1, 3, 65, 1023]))
            dtype = chance.choice(DTYPES)
            count = torch.Size(dims).numel() * dtype.itemsize
            content = bytearray(chance.randbytes(count)) or bytearray(1)
            raw = torch.frombuffer(content, dtype=torch.uint8)[:count]
            tensor = raw.view(dtype).view(dims)
        body = chance.randbytes(chance.choice([0, 1, 100, 70_001]))
        yield number.to_bytes(4, "little") + digest(tensor) + body, tensor


def digest(tensor: torch.Tensor | None) -> bytes:
    if tensor is None:
        return bytes(32)
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(repr((tensor.dtype, tensor.shape)).encode() + content).digest()


def stream(group: Group) -> None:
    """All frames go down the whole pipeline; the last stage reports how many were right."""
    if group.previous is None:
        for head, tensor in frames(group.team.rank):
            group.next.send(head, tensor)
    else:
        check_stream(group)
    if group.next:
        group.next.flush()
    if group.rank == 0:
        for rank, link in group.reports.items():
            if rank >= group.size - group.team.size:
                say("report", link.receive(60).head.decode())


def check_stream(group: Group) -> None:
    right = 0
    for head, tensor in frames(group.team.rank):
        frame = group.previous.receive(60)
        right += frame.head == head and digest(frame.tensor) == head[4:36] == digest(tensor)
        if group.next:
            group.next.send(frame.head, None if frame.tensor is None else frame.tensor.clone())
        group.advance()
    if group.next is None:
        group.reports[0].send(f"{right} right".encode())


def wait(group: Group) -> None:
    """Receives for ever; rank 0 sends no orders."""
    say("waiting")
    link = group.previous or group.next
    link.receive(None)


def pour(group: Group) -> None:
    """Sends large tensors for ever, or takes them."""
    say("waiting")
    tensor = torch.ones(1 << 20)
    while True:
        if group.previous:
            group.previous.receive(60)
        if group.next:
            group.next.send(b"", tensor)


def gather(group: Group) -> None:
    say("waiting")
    while True:
        group.team.all_gather(torch.ones(1000))


def meet_again(group: JoinedGroup) -> None:
    """Three generations, one after another, in one process."""
    for generation in range(1, 4):
        group.close()
        group = join_group(
            group.rank,
            group.size,
            init=f"tcp://127.0.0.1:{sys.argv[4]}",
            generation=generation,
            secret=SECRET,
            timeout_s=120,
        )
        if group.next:
            group.next.send(b"%d" % generation, torch.ones(generation))
        if group.previous:
            frame = group.previous.receive(30)
            say("generation", frame.head.decode(), frame.tensor.tolist())
    group.close()


def team(group: Group) -> None:
    members, rank = group.team, group.team.rank
    for turn in range(5):
        for count in (1, 3 + rank, 0 if rank else 5):
            mine = torch.full((2, count), float(rank + turn)).to(torch.bfloat16)
            for dim in (0, 1):
                laid = mine.T.contiguous() if dim == 0 else mine
                joined = members.all_gather(laid, dim)
                for member, part in enumerate(
                    joined.split([*counts_of(members.size, count, rank)], dim)
                ):
                    assert part.eq(member + turn).all(), (dim, part)
        given = [torch.full((to + 1, rank), 10 * rank + to) for to in range(members.size)]
        for member, came in enumerate(members.all_to_all(given)):
            assert came.equal(torch.full((rank + 1, member), 10 * member + rank))
        content = bytes([turn]) * (turn * 1000)
        assert members.broadcast(content if rank == 1 else b"?", 1) == content
        members.barrier()
    same = members.all_gather(torch.full((4,), rank), sizes=[4] * members.size)
    assert same.tolist() == [member for member in range(members.size) for _ in range(4)]


def counts_of(size: int, count: int, rank: int) -> list[int]:
    """How many every member gathers, as told by how many this member does."""
    if count == 1:
        return [1] * size
    if count == 3 + rank:
        return [3 + member for member in range(size)]
    return [0 if member else 5 for member in range(size)]


ACTS = {act.__name__: act for act in (stream, wait, pour, gather, meet_again, team)}


def main() -> None:
    poison_pickle()
    act, rank, size, port, *rest = sys.argv[1:]
    try:
        group = join_group(
            int(os.environ["RANK"] if rank == "env" else rank),
            int(os.environ["WORLD_SIZE"] if size == "env" else size),
            init="env://" if port == "env" else f"tcp://127.0.0.1:{port}",
            team=int(rest[0]) if rest else 1,
            secret=SECRET,
            timeout_s=120,
        )
        say("joined")
        ACTS[act](group)
        group.close()
        say("done")
    except LinkLost as lost:
        say("lost", lost.rank, lost)
    except EssError as wrong:
        say(type(wrong).__name__, wrong)


if __name__ == "__main__":
    main()
