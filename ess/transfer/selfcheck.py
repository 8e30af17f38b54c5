"""Times 64 MiB over a transport to another process of this machine, against a copy in memory.

    python -m ess.transfer.selfcheck KIND HOST         prints one JSON line

The other process is a child, so it shares the user and the process namespace: what works here works
between such workers.
"""

from __future__ import annotations

import secrets
import select
import subprocess
import sys
import time
from typing import Final

import msgspec
import numpy as np

from ess.errors import EssError, Unavailable
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Seal, new_epoch
from ess.transfer.runs import Region
from ess.transfer.transport import Completed, Failed, PeerLost, Transfer, Transport
from ess.transfer.transports.kinds import Kind, kind_of, open_transport
from ess.transfer.transports.shared import shared_region

SIZE: Final = 64 << 20
PART: Final = 1 << 20
REPEATS: Final = 3
WITHIN_S: Final = 20.0
TICKET: Final = 1
ANSWER: Final = "answer"


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    gb_per_s: float
    memcpy_gb_per_s: float


def trial(kind: Kind, host: str) -> Moved:
    secret = secrets.token_bytes(32)
    memory = _region(kind)
    memory.memory[:] = np.frombuffer(secrets.token_bytes(SIZE), np.uint8)
    end = _end(kind, host, secret)
    end.register([memory])
    words = [sys.executable, "-m", "ess.transfer.selfcheck", kind, host, ANSWER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None, "the child's input is no pipe"
        assert child.stdout is not None, "the child's output is no pipe"
        try:
            print(secret.hex(), end.metadata().hex(), file=child.stdin, flush=True)
            peer = end.connect(bytes.fromhex(child.stdout.readline()))
            took_s = min(_push(end, peer) for _ in range(REPEATS))
            print(_sum(memory), file=child.stdin, flush=True)
            if child.stdout.readline().strip() != "same":
                raise Unavailable("other bytes came than were sent")
        finally:
            end.close()
            child.kill()
    return Moved(gb_per_s=SIZE / took_s / 1e9, memcpy_gb_per_s=SIZE / _copy_s(memory) / 1e9)


def answer(kind: Kind, host: str) -> None:
    """The child: takes transfers until it is asked for the sum of its bytes."""
    secret, metadata = map(bytes.fromhex, sys.stdin.readline().split())
    memory = _region(kind)
    end = _end(kind, host, secret)
    end.register([memory])
    end.allow(TICKET)
    end.connect(metadata)
    print(end.metadata().hex(), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        end.poll()
    print("same" if sys.stdin.readline().strip() == str(_sum(memory)) else "other", flush=True)
    end.close()


def _end(kind: Kind, host: str, secret: bytes) -> Transport:
    identity = Identity(epoch=new_epoch(), seal=Seal(secret), layout=bytes(32))
    return open_transport(kind, identity, host=host)


def _region(kind: Kind) -> Region:
    return shared_region(1, SIZE) if kind == "shared" else Region(1, np.zeros(SIZE, np.uint8))


def _push(end: Transport, peer: int) -> float:
    began_s = time.perf_counter()
    runs = np.array([(1, at, PART) for at in range(0, SIZE, PART)], np.int64)
    left = len(runs)
    for run in np.split(runs, left):
        transfer = Transfer(peer=peer, local=run, remote=run, ticket=TICKET, within_s=WITHIN_S)
        end.post(transfer)
    while left:
        for event in end.poll():
            if isinstance(event, Failed | PeerLost):
                raise Unavailable(event.reason)
            left -= isinstance(event, Completed)
    return time.perf_counter() - began_s


def _copy_s(memory: Region) -> float:
    target = np.zeros_like(memory.memory)
    took_s = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        np.copyto(target, memory.memory)
        took_s.append(time.perf_counter() - began_s)
    return min(took_s)


def _sum(memory: Region) -> int:
    return int(memory.memory.view(np.uint64).sum())


def main(arguments: list[str]) -> int:
    name, host, *child = arguments
    try:
        kind = kind_of(name)
        if child == [ANSWER]:
            answer(kind, host)
            return 0
        result = trial(kind, host)
    except (EssError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(msgspec.json.encode(result).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
