"""Kills engines under load and checks what clients get.

    python -m tests.server.engine_kills --count 300 [--engine model] [--recover fail] [--seed N]

A round starts some answers of every kind, kills the engine once or more when a drawn number of
tokens has come, and waits for their ends. With `resume` every answer must be that of a server whose
engine was never killed, without an error; with `fail` it is that or ends with an error, and the
table has the longest time from a kill to such an end. Exits with 1 where an answer is wrong.

The paced engine has no model: its tokens follow from the first one, so that none can be left out or
said twice unseen. The model is the one in the box, in float32.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.server.harness import VOCABULARY, until
from tests.server.test_dashboard import metrics
from tests.support.crowd import Crowd
from tests.support.kin import commands, is_running, worker_of
from tests.support.process import Process
from tests.support.told import Told, told

Asked = dict[str, object]
COUNT = 48
COLD = {"temperature": 0}
WARM = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
OFTEN = {"frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.2}
USAGE = {"stream_options": {"include_usage": True}}
TALK = {
    "path": "/v1/chat/completions",
    "messages": [{"role": "user", "content": "Name a module."}],
    "logprobs": True,
    "top_logprobs": 2,
}
EVERY = {"max_tokens": COUNT, "ignore_eos": True}
LONG = " ".join(f"The server of number {n} is" for n in range(60))
KINDS: Sequence[Asked] = (
    {"prompt": "The server is", "logprobs": 2, **EVERY, **COLD, **USAGE},
    {"prompt": "The server is", "logprobs": 1, "n": 3, **EVERY, **WARM, **USAGE},
    {"prompt": "The module", "logprobs": 0, "min_tokens": 20, **EVERY, **WARM, **OFTEN, **USAGE},
    {"prompt": LONG, "logprobs": 1, "echo": True, **EVERY, **COLD, **USAGE},
    {"prompt": "The date", "logprobs": 1, **WARM, **USAGE, "max_tokens": COUNT,
     "structured_outputs": {"regex": "[a-z]{3}( [a-z]{2,5}){12}"}},
    {**TALK, **EVERY, **WARM, **USAGE},
    {**TALK, **EVERY, "stream": False, "n": 2, **COLD},
    {"prompt": ["The engine", "A page"], "logprobs": 1, **EVERY, **WARM, "stream": False},
)  # fmt: skip
STEPPED: Sequence[Asked] = (
    {"prompt": [5, 6, 7], "return_token_ids": True, "logprobs": 0, **EVERY, **USAGE},
    {"prompt": [5, 6], "return_token_ids": True, "logprobs": 0, "n": 3, **EVERY, **USAGE},
    {"prompt": [5, 6, 9], "return_token_ids": True, "logprobs": 0, "stream": False, **EVERY},
)
"""For the paced engine."""


@dataclass
class Found:
    kill_count: int = 0
    resumed_count: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


class Killing:
    """A server whose engine is killed, and what its answers should be."""

    def __init__(
        self, process: Process, kinds: Sequence[Asked], *, is_paced: bool, drawn: random.Random
    ) -> None:
        self.found = Found()
        self._process = process
        self._is_paced = is_paced
        self._drawn = drawn
        self._kinds = kinds
        self._expected: dict[int, Told] = {}
        if not is_paced:
            self._expected = self._undisturbed()

    def _undisturbed(self) -> dict[int, Told]:
        with Crowd(self._process.url, self._kinds) as going:
            until(lambda: _is_over(going), "the answers without a kill")
            made = {number: told(raw) for number, raw in enumerate(going.texts)}
        assert not any(each.error for each in made.values()), made
        return made

    def round(self, kill_count: int) -> None:
        numbers = [*range(len(self._kinds)), self._drawn.randrange(len(self._kinds))]
        began_s: list[float] = []
        with Crowd(self._process.url, [self._kinds[number] for number in numbers]) as going:
            seen = 0
            for _ in range(kill_count):
                seen = self._drawn.randrange(seen, seen + 3 * COUNT)
                until(lambda at=seen: _events(going) >= at or _is_over(going), "the drawn token")
                began_s.append(self._kill())
            until(lambda: self._waits(going, began_s[-1]), "all answers' ends", within_s=180)
            self._process.wait_ready()
            counts = metrics(self._process.url)
            self.found.resumed_count = int(counts["ess_resumed_total", ""])
            for number, raw in zip(numbers, going.texts, strict=True):
                self._judge(number, told(raw))

    def _waits(self, going: Crowd, killed_s: float) -> bool:
        """Whether all are over; and notes how long the last error took."""
        is_over = _is_over(going)
        if is_over and any(told(raw).error for raw in going.texts):
            self.found.slowest_s = max(self.found.slowest_s, time.monotonic() - killed_s)
        return is_over

    def _kill(self) -> float:
        """When an engine is there. The moment of the kill."""
        until(lambda: bool(self._engines()), "an engine")
        [pid] = self._engines()
        os.kill(worker_of(pid), signal.SIGKILL)
        killed_s = time.monotonic()
        self.found.kill_count += 1
        until(lambda: not is_running(pid), "its end")
        until(lambda: self._engines() not in ([], [pid]), "the next engine")
        return killed_s

    def _engines(self) -> list[int]:
        below = commands(self._process.process.pid)
        return [pid for pid, words in below.items() if "ess.engine.process" in words]

    def _judge(self, number: int, made: Told) -> None:
        if made.error:
            self.found.answers["ended with an error"] += 1
            return
        self.found.answers["went on to its end"] += 1
        is_right = walks(made) if self._is_paced else made == self._expected[number]
        if not is_right:
            self.found.wrong.append(f"kind {number}: {made}, not {self._expected.get(number)}")


def walks(made: Told) -> bool:
    """Whether each token follows from the one before, as the paced engine says them."""
    return bool(made.choices) and all(
        len(choice.ids) == len(choice.scores) == COUNT
        and choice.finish == "length"
        and follow(choice.ids)
        for choice in made.choices.values()
    )


def follow(ids: Sequence[int]) -> bool:
    """Whether each of these is the paced engine's next."""
    span = VOCABULARY - min(300, VOCABULARY // 2)
    return all((b - a - 7919) % span == 0 for a, b in itertools.pairwise(ids))


def _events(going: Crowd) -> int:
    """About as many as tokens have come."""
    return sum(raw.count(b"data: ") for raw in going.texts)


def _is_over(going: Crowd) -> bool:
    return all(map(going.is_over, range(len(going.texts))))


def flags_of(*, is_paced: bool, recover: str) -> list[str]:
    """The limit of restarts is beyond any campaign."""
    kind = ["--engine", "paced", "--pace-ms", "10"] if is_paced else ["--deterministic"]
    form = [] if is_paced else ["--form", "f32", "--row", "f32"]
    return [*kind, *form, "--recover", recover, "--engine-restarts", "1000", "--max-running", "8"]


def campaign(*, count: int, is_paced: bool, recover: str, seed: int) -> Found:
    drawn = random.Random(seed)
    flags = flags_of(is_paced=is_paced, recover=recover)
    with Process(*flags).wait_ready() as process:
        kinds = STEPPED if is_paced else KINDS
        killing = Killing(process, kinds, is_paced=is_paced, drawn=drawn)
        while killing.found.kill_count < count:
            left = count - killing.found.kill_count
            killing.round(min(left, drawn.choice((1, 1, 2))))
            print(f"{killing.found.kill_count} of {count} kills ...", file=sys.stderr, flush=True)
        return killing.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--engine", choices=("paced", "model"), default="paced")
    parser.add_argument("--recover", choices=("resume", "fail"), default="resume")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    is_paced = given.engine == "paced"
    sums = campaign(count=given.count, is_paced=is_paced, recover=given.recover, seed=given.seed)
    print(f"| --recover {given.recover}, {given.engine} engine | |\n|---|---:|")
    print(f"| kills | {sums.kill_count:,} |")
    print(f"| requests that went on in another engine | {sums.resumed_count:,} |")
    for how, count in sorted(sums.answers.items()):
        print(f"| answers that {how} | {count:,} |")
    print(f"| wrong answers | {len(sums.wrong)} |")
    if sums.slowest_s:
        print(f"| slowest error behind a kill | {sums.slowest_s:.2f} s |")
    for wrong in sums.wrong:
        print(wrong, file=sys.stderr)
    is_short = given.recover == "resume" and sums.answers["ended with an error"] > 0
    return 1 if sums.wrong or is_short else 0


if __name__ == "__main__":
    sys.exit(main())
