"""How long the other ranks take to report a lost rank.

    python -m tests.ranks.kills [--count 3]

Two engines divide the experts of the model in the box, as processes; one decodes, the other stands
by and is killed, or stopped where it stands. Printed is the longest time, of so many, from the
signal to the sentence that the engine sends its server. Then the server of a rank is killed, with
its engine: how long after it the other server answers 503, and both answer 200 again. At last four
servers on four hosts (network namespaces): how long after one is killed the three others have said
so, and all have answered a request.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path

from tests.ranks.test_hosts import asked, launched
from tests.ranks.test_processes import add, fault, ranks
from tests.ranks.test_serve import said, tokens
from tests.server.harness import until
from tests.support.hosts import hosts
from tests.support.routers import ask


def lost_s(folder: Path, number: signal.Signals) -> float:
    folder.mkdir()
    with ranks(folder, 2) as made:
        for engine in made:
            engine.ready()
        made[0].say(add(0, 100, 1000))
        made[0].until(lambda _: bool(made[0].tokens(0)))
        began_s = time.monotonic()
        made[1].process.send_signal(number)
        fault(made[0])
        return time.monotonic() - began_s


def server_lost_s(folder: Path, victim: int) -> tuple[float, float]:
    folder.mkdir()
    with said(folder) as (process, _):
        lines = process.greeting["processes"]
        urls = [line["url"] for line in lines]
        going = tokens(urls[1 - victim])
        next(going)
        began_s = time.monotonic()
        os.kill(lines[victim]["pid"], signal.SIGKILL)
        until(lambda: ask(f"{urls[1 - victim]}/ready").status == 503, "503")
        missed_s = time.monotonic() - began_s
        until(lambda: all(ask(f"{url}/ready").status == 200 for url in urls), "200")
        return missed_s, time.monotonic() - began_s


def host_lost_s(folder: Path) -> tuple[float, float]:
    folder.mkdir()
    with hosts(4) as net, launched(net, folder) as launchers:
        began_s = time.monotonic()
        os.kill(launchers[2].server, signal.SIGKILL)
        others = [launchers[host] for host in (0, 1, 3)]
        until(lambda: all(other.said("LinkLost.*is lost") for other in others), "three sentences")
        said_s = time.monotonic() - began_s
        assert len(asked(net, 0, [each.url for each in launchers])) == 4
        return said_s, time.monotonic() - began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=3)
    count = parser.parse_args().count
    for number in (signal.SIGKILL, signal.SIGSTOP):
        with tempfile.TemporaryDirectory() as folder:
            places = [Path(folder) / str(at) for at in range(count)]
            seconds = [lost_s(place, number) for place in places]
        print(f"{number.name}: {max(seconds):.1f} s at most, of {count}", flush=True)
    for victim in (0, 1):
        with tempfile.TemporaryDirectory() as folder:
            both = [server_lost_s(Path(folder) / str(at), victim) for at in range(count)]
        missed_s, back_s = (max(seconds) for seconds in zip(*both, strict=True))
        said_s = f"503 after {missed_s:.1f} s at most, 200 after {back_s:.1f} s"
        print(f"server of rank {victim}: {said_s}, of {count}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        both = [host_lost_s(Path(folder) / str(at)) for at in range(count)]
    said_s, back_s = (max(seconds) for seconds in zip(*both, strict=True))
    print(
        f"four hosts: said after {said_s:.1f} s at most, answers after {back_s:.1f} s, of {count}"
    )


if __name__ == "__main__":
    main()
