"""A worker of its own process: `python -m tests.transfer.peer_process KIND ROLE`.

It prints its metadata, reads its peer's from standard input, and then receives, or sends pages
without end, until it is killed.
"""

from __future__ import annotations

import os
import sys

from ess.clock import RealClock
from ess.transfer.transport import Completed, PeerLost
from tests.transfer.rigs import Rig, identity, region, write

SIZE = 1 << 22
PAGE = 41_984
PAGE_COUNT = SIZE // PAGE
PATIENT_S = 600.0


def main(kind: str, role: str) -> None:
    rig = Rig(kind, RealClock())
    end = rig.end(identity(silent_s=PATIENT_S))  # a loaded machine is no fault of the peer
    end.register([region(kind, SIZE, fill=3)])
    print(end.metadata().hex(), flush=True)
    peer = end.connect(bytes.fromhex(sys.stdin.readline()))
    number, completed_count = 0, 0
    while True:
        if role == "send" and number - completed_count < 4:
            numbers = range(PAGE_COUNT)
            end.post(write(peer, numbers, numbers, PAGE, note=number.to_bytes(4, "little")))
            number += 1
        events = end.poll()
        if any(isinstance(event, PeerLost) for event in events):
            return
        completed_count += sum(isinstance(event, Completed) for event in events)
        os.sched_yield()


if __name__ == "__main__":
    main(*sys.argv[1:])
