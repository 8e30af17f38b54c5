"""Keys change and generation pauses under load; answers must be those of an undisturbed server.

    python -m tests.server.disturbed --rounds 2 --seed 1 [way ...]

Of each way to serve, the model in the box in float32 gets the same requests, eight at a time, while
another client pauses and resumes generation, in the words of vLLM or of SGLang, or adds a key, has
the server read it, and removes the key before. Exits with 1 if an answer is wrong. Behind a router
one of the workers is paused, since routers have no such routes.
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
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.pd.mixed import MODEL, Asked, Result, mixed, result_of
from tests.pd.stand import EXACT
from tests.server.harness import until
from tests.support.process import Process
from tests.support.routers import Answer, ask

ROOM: Final = ("--max-running", "8", "--max-waiting", "64", "--host-bytes", "384MiB")
WAYS: Final = {
    "plain": (),
    "mtp": ("--mtp", "3", "--depth", "1"),
    "tp": ("--tp-size", "2", "--mtp", "2"),
    "pp": ("--pp-size", "2"),
    "dp": ("--dp-size", "2"),
    "processes": ("--server-processes", "2", "--mtp", "2"),
    "pd": ("--pd", "1p2d", "--mtp", "2"),
}
PAUSES: Final = (
    ("/pause?mode=keep", {}, "/resume"),
    ("/pause_generation", {"mode": "in_place"}, "/continue_generation"),
)
COUNT: Final = 60
AT_ONCE: Final = 8
AGAIN: Final = (0, 401, 503)
"""Asked between two routers, with a key that was removed meanwhile, or while no engine is ready."""


class Keys:
    """The file of a server's keys."""

    def __init__(self) -> None:
        self._path = Path(tempfile.mkdtemp()) / "keys"
        self.newest = "key-0"
        self._write(self.newest)

    @property
    def flags(self) -> tuple[str, str]:
        return "--api-key-file", str(self._path)

    def change(self, process: Process) -> None:
        fresh = f"key-{int(self.newest.removeprefix('key-')) + 1}"
        self._write(self.newest, fresh)
        process.process.send_signal(signal.SIGHUP)
        until(lambda: {status(process.url, fresh) for _ in range(6)} == {200}, "the new key")
        self.newest = fresh
        self._write(fresh)

    def _write(self, *keys: str) -> None:
        other = self._path.with_suffix(".other")
        other.write_text("\n".join(keys))
        os.replace(other, self._path)


def said(url: str, key: str, path: str, body: object = None) -> Answer:
    return ask(url + path, body, authorization=f"Bearer {key}")


def status(url: str, key: str) -> int:
    """Of a route that needs a key at routers too."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    return said(url, key, "/v1/completions", body).status


def started(*way: str) -> Process:
    """Ready: a server with a router is when it greets, and its router has no /ready."""
    process = Process(*EXACT, *ROOM, *way)
    return process if "--pd" in way else process.wait_ready()


def paused_at(process: Process) -> list[str]:
    """The URLs at which generation is paused: of the workers, where a router is in front."""
    listed = process.greeting.get("processes", [])
    workers = [each["url"] for each in listed if each["role"] != "router"]
    return workers if len(workers) < len(listed) else [process.url]


def answers(process: Process, keys: Keys, asked: Sequence[Asked]) -> list[Result]:
    def one(each: Asked) -> Result:
        while True:
            answer = said(process.url, keys.newest, each.path, dict(each.body))
            if answer.status not in AGAIN:
                return result_of(each, answer)
            time.sleep(0.05)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, asked))


@contextmanager
def disturbed(process: Process, keys: Keys, draw: random.Random) -> Iterator[Counter[str]]:
    over, counts, urls = threading.Event(), Counter[str](), paused_at(process)

    def strike() -> None:
        while not over.is_set():
            if draw.random() < 0.3:
                keys.change(process)
                counts["keys"] += 1
            else:
                url, (stop, body, go_on) = draw.choice(urls), draw.choice(PAUSES)
                told = [said(url, keys.newest, stop, body).status]
                time.sleep(draw.uniform(0, 0.15))
                told.append(said(url, keys.newest, go_on, {}).status)
                counts["pauses" if told == [200, 200] else f"refused with {told}"] += 1
            time.sleep(draw.uniform(0, 0.2))

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        yield counts
    finally:
        over.set()
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ways", nargs="*", metavar="way", help=", ".join(WAYS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    asked, wrong_count = mixed(COUNT), 0
    keys = Keys()
    with started("--mtp", "1", *keys.flags) as alone:
        expected = answers(alone, keys, asked)
    print("| way | pauses | changes of keys | answers | wrong |\n|---|---:|---:|---:|---:|")
    for way in given.ways or WAYS:
        keys, draw = Keys(), random.Random(given.seed)
        with (
            started(*WAYS[way], *keys.flags) as process,
            disturbed(process, keys, draw) as counts,
        ):
            made = [answers(process, keys, asked) for _ in range(given.rounds)]
        wrong = sum(
            one != other for each in made for one, other in zip(each, expected, strict=True)
        )
        total = given.rounds * COUNT
        print(
            f"| {way} | {counts.pop('pauses', 0)} | {counts.pop('keys', 0)} | {total} | {wrong} |"
        )
        for refused in counts.items():
            print("pauses", *refused, flush=True)
        wrong_count += wrong
    sys.exit(wrong_count > 0)


if __name__ == "__main__":
    main()
