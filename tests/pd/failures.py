"""What clients see when a worker of a split dies or hangs, behind each stock router, and how long.

    python -m tests.pd.failures [--engine paced] [--load-s 6] [router ...]

One prefill and three decode workers; short requests all the time, and six long streams that run
when it happens. Then the worker is put back at its port, or goes on. Times are from the event:
`left out` until the router lists it as unhealthy, `served` until short requests succeed again, one
for each decode worker in a row; and from the worker's return: `back` until it is listed as healthy,
`served` as before.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.pd.stand import DECODE_COUNT, EXACT, Stand, Worker
from tests.support.crowd import Crowd
from tests.support.routers import SGLANG, SMG, VLLM, Kind, Router, ask

SHORT: Final = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 4}
LONG: Final = {**SHORT, "max_tokens": 600, "ignore_eos": True}
STREAMS: Final = 6
CLIENTS: Final = 3
WAIT_S: Final = 60.0
PAUSE_S: Final = 0.1
ROOM: Final = ("--max-running", "16", "--max-waiting", "64", "--host-bytes", "192MiB")
COLUMNS: Final = (
    *("router", "event", "streams", "short requests", "left out", "served"),
    *("back", "served again"),
)


@dataclass
class Load:
    """Short requests by several clients, one after the other each; when each ended, and how."""

    url: str
    ended: list[tuple[float, int, float]] = field(default_factory=list)
    is_over: bool = False

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        clients = [threading.Thread(target=self._ask) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            self.is_over = True
            for client in clients:
                client.join()

    def _ask(self) -> None:
        while not self.is_over:
            began_s = time.monotonic()
            status = ask(f"{self.url}/v1/completions", SHORT).status
            now_s = time.monotonic()
            self.ended.append((now_s, status, now_s - began_s))
            if status != 200:
                time.sleep(PAUSE_S)

    def seen_since(self, at_s: float) -> str:
        """Statuses, and the longest that a good answer took; 0 is no answer within 30 s."""
        after = [(status, took_s) for now_s, status, took_s in self.ended if now_s > at_s]
        counted = Counter(status for status, _ in after)
        listed = ", ".join(f"{count} x {status}" for status, count in sorted(counted.items()))
        slowest = max((took_s for status, took_s in after if status == 200), default=0.0)
        return f"{listed}; slowest {slowest:.1f} s"

    def is_served_since(self, at_s: float) -> bool:
        """As many good answers as reach every decode worker, with no other between them."""
        last = [status for now_s, status, _ in self.ended if now_s > at_s][-2 * DECODE_COUNT :]
        return last == [200] * (2 * DECODE_COUNT)


def passed(at_s: float, true: Callable[[], bool]) -> str:
    while not true():
        if time.monotonic() - at_s > WAIT_S:
            return f"> {WAIT_S:.0f} s"
        time.sleep(0.02)
    return f"{time.monotonic() - at_s:.1f} s"


def fate_of(text: bytes, is_over: bool) -> str:
    if not is_over:
        return "hang"
    if b'"finish_reason":"length"' in text:
        return "whole"
    return "error event" if b'"error"' in text else "cut"


def kill(worker: Worker) -> None:
    worker.process.kill()


def stop(worker: Worker) -> None:
    worker.signal_all(signal.SIGSTOP)


def go_on(stand: Stand, name: str) -> None:
    stand.workers[name].signal_all(signal.SIGCONT)


def put_back(stand: Stand, name: str) -> None:
    stand.put_back(name)


EVENTS: Final = (
    ("decode worker killed", "decode-2", kill, put_back),
    ("prefill worker killed", "prefill-1", kill, put_back),
    ("decode worker stopped", "decode-2", stop, go_on),
    ("prefill worker stopped", "prefill-1", stop, go_on),
)


def happens(
    stand: Stand,
    router: Router,
    name: str,
    act: Callable[[Worker], None],
    undo: Callable[[Stand, str], None],
    load_s: float,
) -> list[str]:
    everybody = {worker.url for worker in stand.workers.values()}
    worker = stand.workers[name]
    load = Load(router.url)
    with load.going(), Crowd(router.url, [LONG] * STREAMS) as crowd:
        passed(time.monotonic(), lambda: all(b'"text"' in text for text in crowd.texts))
        at_s = time.monotonic()
        act(worker)
        left_out = passed(at_s, lambda: worker.url not in router.healthy())
        served = "-"
        if name.startswith("decode"):
            served = passed(at_s, lambda: load.is_served_since(at_s))
        time.sleep(max(0.0, load_s - (time.monotonic() - at_s)))
        undo(stand, name)
        back_s = time.monotonic()
        back = passed(back_s, lambda: router.healthy() == everybody)
        again = passed(back_s, lambda: load.is_served_since(back_s))
        passed(back_s, lambda: all(map(crowd.is_over, range(STREAMS))))
        fates = Counter(fate_of(t, crowd.is_over(i)) for i, t in enumerate(crowd.texts))
        streams = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()))
        seen = load.seen_since(at_s)
    return [streams, seen, left_out, served, back, again]


def campaign(kinds: list[Kind], flags: tuple[str, ...], load_s: float) -> Iterator[list[str]]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Stand(Path(folder), *flags, *ROOM, has_real_children=True) as stand,
    ):
        for kind in kinds:
            for event, name, act, undo in EVENTS:
                with stand.behind(kind) as router:
                    row = happens(stand, router, name, act, undo, load_s)
                    yield [kind.package, event, *row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("routers", nargs="*")
    parser.add_argument("--engine", choices=("model", "paced"), default="model")
    parser.add_argument("--load-s", type=float, default=6.0)
    given = parser.parse_args()
    kinds = [k for k in (SMG, VLLM, SGLANG) if not given.routers or k.package in given.routers]
    flags = ("--engine", "paced", "--pace-ms", "10") if given.engine == "paced" else EXACT
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for row in campaign(kinds, flags, given.load_s):
        print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
