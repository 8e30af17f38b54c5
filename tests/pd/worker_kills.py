"""Kills parts of a split under load, behind a stock router, and looks at what clients get.

    python -m tests.pd.worker_kills --count 300 [--router smg] [--engine model] [part ...]

One prefill and three decode workers, each a server of two processes and an engine of its own, the
latter with `--recover resume`. Clients ask one request after another, each for a drawn number of
tokens. A part is killed at a drawn moment; when another is in its place and the router calls all
healthy, the next is. Requests that are open at the kill are counted by how they end; the wait of
those that do not come to their end is from the kill. Requests that begin later, while a part is
missing, are counted by themselves. Every token that comes must be the right one, also of answers
that are cut off. Exits with 1 if a token is wrong.

The paced engine's tokens follow from the first token. The model's are those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.pd.stand import EXACT, Stand, Worker
from tests.server.engine_kills import follow
from tests.server.harness import until
from tests.server.test_fronts import fronts
from tests.support.kin import commands, is_running
from tests.support.routers import SGLANG, SMG, VLLM, Router
from tests.support.told import Told, told

PARTS: Final = tuple(
    f"{role} {part}" for role in ("prefill", "decode") for part in ("engine", "front", "server")
)
CLIENTS: Final = 6
TOKENS: Final = (8, 24, 80)
PROMPTS: Final = ("The server is", "a page of rows " * 20, "who asks for the next token? " * 30)
BACK_S: Final = 180.0
PAUSE_S: Final = 0.1
ROUTERS: Final = {kind.package: kind for kind in (SMG, VLLM, SGLANG)}
FLAGS: Final = (
    *("--server-processes", "2", "--engine-restarts", "1000"),
    *("--max-running", "16", "--max-waiting", "64"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client got, and when. `how` is `whole`, a status, `error` within a stream, or
    `cut`."""

    began_s: float
    ended_s: float
    prompt: int
    how: str
    made: Told


class Client(threading.Thread):
    """Asks one after another; `ended` has all that are over."""

    def __init__(self, url: str, seed: str, ended: list[Asked], over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._place = url.removeprefix("http://")
        self._draw = random.Random(seed)
        self._ended, self._over = ended, over

    def run(self) -> None:
        while not self._over.is_set():
            asked = self.ask(self._draw.randrange(len(PROMPTS)), self._draw.choice(TOKENS))
            self._ended.append(asked)
            if asked.how != "whole":
                self._over.wait(PAUSE_S)

    def ask(self, prompt: int, count: int) -> Asked:
        began_s, raw, status = time.monotonic(), b"", 0
        body = {"model": "ess-embedded", "prompt": PROMPTS[prompt], "max_tokens": count}
        body |= {"stream": True, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
        made = http.client.HTTPConnection(self._place, timeout=60)
        with contextlib.closing(made), contextlib.suppress(OSError, http.client.HTTPException):
            headers = {"content-type": "application/json"}
            made.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = made.getresponse()
            status = answer.status
            while line := answer.readline():
                raw += line
        seen = told(raw) if status == 200 else Told(error=f"{status}")
        return Asked(began_s, time.monotonic(), prompt, _end_of(seen, status), seen)


def _end_of(made: Told, status: int) -> str:
    if status != 200:
        return str(status) if status else "no answer"
    if made.error:
        return "error"
    is_whole = bool(made.choices) and all(each.finish for each in made.choices.values())
    return "whole" if is_whole else "cut"


@dataclass
class Found:
    """Of the kills of one part: requests that were open then, and `later` ones."""

    kill_count: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    later: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def row(self, part: str) -> str:
        waits_s = sorted(self.waits_s)
        ranks = [waits_s[min(len(waits_s) - 1, len(waits_s) * n // 100)] for n in (50, 99, 100)
                 ] if waits_s else []  # fmt: skip
        waited = ", ".join(f"{wait_s:.2f}" for wait_s in ranks) or "-"
        ends, later = _said(self.ends), _said(self.later)
        cells = (part, self.kill_count, ends, waited, later, len(self.wrong))
        return f"| {' | '.join(str(cell) for cell in cells)} |"


def _said(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {how}" for how, count in sorted(ends.items())) or "-"


class Killing:
    def __init__(self, stand: Stand, router: Router, *, seed: int, is_paced: bool) -> None:
        self.found = {part: Found() for part in PARTS}
        self._stand, self._router, self._is_paced = stand, router, is_paced
        self._draw = random.Random(seed)
        self._seed = seed
        self._everybody = {worker.url for worker in stand.workers.values()}
        self._ended: list[Asked] = []
        self._expected: list[list[int]] = []

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        over = threading.Event()
        url = self._router.url
        if not self._is_paced:
            alone = Client(url, "", [], over)
            whole = [alone.ask(prompt, max(TOKENS)) for prompt in range(len(PROMPTS))]
            assert all(asked.how == "whole" for asked in whole), f"undisturbed: {whole}"
            self._expected = [asked.made.choices[0].ids for asked in whole]
        clients = [Client(url, f"{self._seed} {n}", self._ended, over) for n in range(CLIENTS)]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            over.set()
            for client in clients:
                client.join(BACK_S)

    def kill(self, part: str) -> None:
        """When some more answers have come, and from there until all is well again."""
        self._answered(self._draw.randrange(2 * CLIENTS))
        time.sleep(self._draw.random() / 2)  # of no meaning: a drawn moment
        role, kind = part.split()
        workers = [worker for worker in self._stand.workers.values() if worker.role == role]
        worker, before = self._draw.choice(workers), len(self._ended)
        killed_s = time.monotonic()
        is_back = self._killed(worker, kind)
        until(is_back, f"another {part}", within_s=BACK_S)
        until(lambda: self._router.healthy() == self._everybody, "all healthy", within_s=BACK_S)
        self._answered(CLIENTS)
        self._note(self.found[part], self._ended[before:], killed_s)

    def _answered(self, count: int) -> None:
        """As many whole answers more; a part that is back is then in use."""
        before = len(self._ended)
        until(
            lambda: sum(asked.how == "whole" for asked in self._ended[before:]) >= count,
            "more answers",
            within_s=BACK_S,
        )

    def _killed(self, worker: Worker, kind: str) -> Callable[[], bool]:
        """What is true when another is in its place."""
        if kind == "server":
            worker.process.kill()
            self._stand.put_back(worker.name)
            return lambda: True
        listed = engines if kind == "engine" else fronts
        until(lambda: bool(listed(worker)), "a process to kill")
        victim = self._draw.choice(listed(worker))
        os.kill(victim, signal.SIGKILL)
        until(lambda: not is_running(victim), "its end")
        return lambda: {*listed(worker)} - {victim} != set() and worker.status("/ready") == 200

    def _note(self, sums: Found, ended: Sequence[Asked], killed_s: float) -> None:
        sums.kill_count += 1
        for asked in ended:
            is_open = asked.began_s < killed_s < asked.ended_s
            (sums.ends if is_open else sums.later)[asked.how] += 1
            if is_open and asked.how != "whole":
                sums.waits_s.append(asked.ended_s - killed_s)
            if not self._is_right(asked):
                sums.wrong.append(f"{asked}")

    def _is_right(self, asked: Asked) -> bool:
        """Of a conversation that was cut off, what has come."""
        listed = [choice.ids for choice in asked.made.choices.values()]
        if self._is_paced:
            return all(map(follow, listed))
        return all(ids == self._expected[asked.prompt][: len(ids)] for ids in listed)


def engines(worker: Worker) -> list[int]:
    below = commands(worker.process.pid)
    return [pid for pid, words in below.items() if "ess.engine.process" in words]


def campaign(
    parts: Sequence[str], *, count: int, router: str, is_paced: bool, seed: int
) -> dict[str, Found]:
    engine = ("--engine", "paced", "--pace-ms", "10") if is_paced else (*EXACT, "--deterministic")
    draw = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        Stand(Path(folder), *engine, *FLAGS, decode=("--recover", "resume")) as stand,
        stand.behind(ROUTERS[router]) as front,
    ):
        killing = Killing(stand, front, seed=seed, is_paced=is_paced)
        with killing.load():
            for number in range(count):
                part = draw.choice(parts)
                print(f"{number + 1} of {count}: {part} ...", file=sys.stderr, flush=True)
                try:
                    killing.kill(part)
                except AssertionError as error:
                    print(f"it ends here: {error}", file=sys.stderr)
                    break
        return killing.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--router", choices=tuple(ROUTERS), default=VLLM.package)
    parser.add_argument("--engine", choices=("paced", "model"), default="paced")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sums_of = campaign(
        given.parts or PARTS,
        count=given.count,
        router=given.router,
        is_paced=given.engine == "paced",
        seed=given.seed,
    )
    print("| killed | kills | open then | waits p50, p99, longest, s | begun later | wrong |")
    print("|---|---:|---|---|---|---:|")
    for part, seen in sums_of.items():
        print(seen.row(part))
        for wrong in seen.wrong[:3]:
            print(wrong, file=sys.stderr)
    return int(any(seen.wrong for seen in sums_of.values()))


if __name__ == "__main__":
    sys.exit(main())
