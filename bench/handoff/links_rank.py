"""The second rank of the links benchmark: `python -m ess.bench.handoff.links_rank PORT`."""

from __future__ import annotations

import sys
import time

from ess.bench.handoff.links import COMPUTE_S
from ess.comm.link import LinkLost
from ess.comm.processes.meeting import join_group


def main() -> None:
    group = join_group(1, 2, init=f"tcp://127.0.0.1:{sys.argv[1]}", timeout_s=60)
    assert group.previous is not None, "rank 1 of two has a previous stage"
    try:
        while (frame := group.previous.receive(timeout_s=60)) is not None:
            if frame.head == b"work":
                time.sleep(COMPUTE_S)
            elif frame.head == b"echo":
                group.reports[0].send(frame.head)
    except LinkLost:
        return
    finally:
        group.close()


if __name__ == "__main__":
    main()
