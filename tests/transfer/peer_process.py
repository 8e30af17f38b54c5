"""A worker of its own process: `python -m tests.transfer.peer_process KIND ROLE`.

It prints its metadata, reads its peer's from standard input, and then receives, or sends pages
without end, until it is killed.
"""

from __future__ import annotations

import os
import sys

from ess.clock import RealClock
from ess.transfer.transport import PeerLost
from tests.transfer.rigs import Rig, region, write

SIZE = 1 << 22
PAGE = 41_984
PAGE_COUNT = SIZE // PAGE
PATIENT_S = 600.0


def main(kind: str, role: str) -> None:
    rig = Rig(kind, RealClock())
    end = rig.end()
    end._lost_s = PATIENT_S  # a loaded machine is no fault of the peer
    end.register([region(kind, SIZE, fill=3)])
    print(end.metadata().hex(), flush=True)
    peer = end.connect(bytes.fromhex(sys.stdin.readline()))
    number = 0
    while True:
        stats = end.stats()
        if role == "send" and stats.posted_count - stats.completed_count < 4:
            numbers = range(PAGE_COUNT)
            end.post(write(peer, numbers, numbers, PAGE, note=number.to_bytes(4, "little")))
            number += 1
        if any(isinstance(event, PeerLost) for event in end.poll()):
            return
        os.sched_yield()


if __name__ == "__main__":
    main(*sys.argv[1:])
