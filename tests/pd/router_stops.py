"""A router stands still in the middle of answers and goes on; they must be those of one server.

    python -m tests.pd.router_stops --rounds 2 --seed 1

Each stock router stands before one prefill and three decode workers, the model in the box in
float32. Its processes are stopped for 0.2 to 6 s again and again while six requests are open.
Exits with 1 if an answer is wrong, or a worker has missed, lost or kept a request.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.pd.mixed import mixed, results
from tests.pd.stand import EXACT, Stand
from tests.server.harness import until
from tests.support.kin import kin
from tests.support.process import Process
from tests.support.routers import SGLANG, SMG, VLLM, ask

ROOM: Final = ("--max-running", "16", "--max-waiting", "64", "--host-bytes", "192MiB")
COUNT: Final = 40
STOPS_S: Final = (0.2, 0.5, 2.0, 6.0)


@contextmanager
def stopping(pids: Sequence[int], draw: random.Random) -> Iterator[list[float]]:
    """For how long these processes have stood still, each time."""
    over, stops = threading.Event(), list[float]()

    def stop() -> None:
        while not over.wait(draw.uniform(0.1, 0.4)):
            stops.append(draw.choice(STOPS_S))
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            over.wait(stops[-1])
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield stops
    finally:
        over.set()
        thread.join()


def left_over(stand: Stand) -> list[str]:
    """What a handoff has missed, lost or kept."""
    workers = (stand.prefill, *stand.decodes)
    until(lambda: not any(ask(f"{w.url}/load").document["server_load"] for w in workers), "rest")
    ends = [(worker.name, worker.handoffs) for worker in workers]
    return [f"{name}: {how}" for name, how in ends if how["missed"] or how["lapsed"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked, faults, draw = mixed(COUNT), 0, random.Random(given.seed)
    with Process(*EXACT, *ROOM, "--mtp", "1").wait_ready() as alone:
        expected = results(alone.url, asked)
    print(
        "| router | stops | stood still | time | answers | wrong |\n|---|---:|---:|---:|---:|---:|"
    )
    with Stand(Path(tempfile.mkdtemp()), *EXACT, *ROOM, "--mtp", "2") as stand:
        for kind in (SMG, VLLM, SGLANG):
            began_s = time.monotonic()
            with stand.behind(kind) as router:
                pid = router._process.pid
                with stopping([pid, *kin(pid)], draw) as stops:
                    made = [results(router.url, asked) for _ in range(given.rounds)]
            pairs = [pair for each in made for pair in zip(each, expected, strict=True)]
            wrong, took_s = sum(one != other for one, other in pairs), time.monotonic() - began_s
            still = f"{sum(stops):.0f} s | {took_s:.0f} s"
            print(f"| {kind.package} | {len(stops)} | {still} | {len(pairs)} | {wrong} |")
            lost = left_over(stand)
            print(*lost, sep="\n", end="\n" if lost else "", flush=True)
            faults += wrong + len(lost)
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
