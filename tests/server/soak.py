"""A real server at twice its capacity for minutes, and what it has cost when all is over.

    python -m tests.server.soak --minutes 30 [--kill-every SECONDS] [--recover fail] [--json FILE]

Clients stay, leave in the middle, cancel, read slowly, or send what is refused. Answers are greedy
and deterministic: those to one prompt must begin alike, whatever happens beside them. Memory and
descriptors of the server and all processes below it are sampled; the first quarter warms, and a
line is fitted through the rest. The server's own process is looked at by itself too: it alone lives
on behind kills.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import http.client
import json
import math
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.kin import kin, told
from tests.support.process import Process

RUNNING = 4
SAMPLE_S = 1.0
CLIENTS = 2 * RUNNING
TOKENS = 48
PROMPTS = 16
WARM_SHARE = 0.25
MIB = 1 << 20
MANNERS = ("stay", "stay", "leave", "cancel", "slow", "wrong")


@dataclass
class Seen:
    """By all clients together. `wrong` are answers unlike those of before to the same prompt."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def ended(self, how: str) -> None:
        with self.lock:
            self.ends[how] += 1

    def said(self, prompt: int, text: str) -> None:
        with self.lock:
            known = self.texts.get(prompt, "")
            if not (known.startswith(text) or text.startswith(known)):
                self.wrong.append(f"prompt {prompt}: {text[:80]!r} and {known[:80]!r}")
            self.texts[prompt] = max(known, text, key=len)


class Client(threading.Thread):
    def __init__(self, server: Process, number: int, seed: int, seen: Seen, over: threading.Event):
        super().__init__(daemon=True)
        self._server, self._seen, self._over = server, seen, over
        self._draw = random.Random(f"{seed} {number}")
        self._name = f"soak-{number}"
        self._count = 0

    def run(self) -> None:
        while not self._over.is_set():
            self._count += 1
            manner = self._draw.choice(MANNERS)
            try:
                self._seen.ended(f"{manner}: {self._ask(manner)}")
            except (OSError, http.client.HTTPException) as error:
                self._seen.ended(f"{manner}: {type(error).__name__}")
                self._over.wait(0.2)

    def _ask(self, manner: str) -> str:
        """How it ended, in a word."""
        prompt = self._draw.randrange(PROMPTS)
        asked: dict[str, Any] = {
            "model": "ess-embedded",
            "prompt": [7 + prompt] * (10 + 40 * prompt),
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        if manner == "wrong":
            asked["max_tokens"] = -1
        made = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=120)
        with contextlib.closing(made):
            began_s = time.monotonic()
            identity = f"{self._name}-{self._count}"
            headers = {"content-type": "application/json", "x-request-id": identity}
            made.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = made.getresponse()
            if answer.status != 200:
                answer.read()
                self._over.wait(0.1 if answer.status == 503 else 0.0)
                return str(answer.status)
            return self._read(answer, manner, prompt, began_s, identity)

    def _read(
        self,
        answer: http.client.HTTPResponse,
        manner: str,
        prompt: int,
        began_s: float,
        identity: str,
    ) -> str:
        """Until its end, or until the client has had enough. A stream ends in [DONE] or in an
        error."""
        text, events, leave_at = "", 0, self._draw.randrange(TOKENS)
        while line := answer.readline():
            said = line.removeprefix(b"data: ").strip()
            if not line.startswith(b"data: "):
                continue
            if said == b"[DONE]":
                self._seen.said(prompt, text)
                self._seen.whole_s.append(time.monotonic() - began_s)
                return "answered"
            event = json.loads(said)
            if "error" in event:
                return "told of an error"
            if not events:
                self._seen.first_s.append(time.monotonic() - began_s)
            text += event["choices"][0]["text"]
            events += 1
            if manner == "leave" and events >= leave_at:
                return "left"
            if manner == "cancel" and events == leave_at + 1:
                self._cancel(identity)
            if manner == "slow":
                self._over.wait(0.05)
        self._seen.said(prompt, text)
        return "cut off"

    def _cancel(self, identity: str) -> None:
        body = json.dumps({"rid": identity})
        made = http.client.HTTPConnection("127.0.0.1", self._server.port, timeout=30)
        with contextlib.closing(made):
            made.request("POST", "/abort_request", body, {"content-type": "application/json"})
            made.getresponse().read()


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    memory_mib: float
    server_mib: float
    descriptors: int


def sampled(server: Process, began_s: float) -> Sample:
    family = [server.process.pid, *kin(server.process.pid)]
    sizes = [told(pid, "statm").split() for pid in family]
    page_mib = os.sysconf("SC_PAGE_SIZE") / MIB
    held_mib = [int(words[1]) * page_mib for words in sizes if words]
    counts = []
    for pid in family:
        with contextlib.suppress(OSError):
            counts.append(len(os.listdir(f"/proc/{pid}/fd")))
    return Sample(time.monotonic() - began_s, sum(held_mib), held_mib[0], sum(counts))


@dataclass(frozen=True, slots=True)
class Slope:
    """Of a line by least squares, per minute, and the standard error of it."""

    per_minute: float
    error: float

    @classmethod
    def of(cls, minutes: Sequence[float], values: Sequence[float]) -> Slope:
        count = len(minutes)
        if count < 3:
            return cls(math.nan, math.nan)
        middle, level = sum(minutes) / count, sum(values) / count
        spread = sum((at - middle) ** 2 for at in minutes)
        pairs = list(zip(minutes, values, strict=True))
        slope = sum((at - middle) * (value - level) for at, value in pairs) / spread
        left = sum((value - level - slope * (at - middle)) ** 2 for at, value in pairs)
        return cls(slope, math.sqrt(left / (count - 2) / spread))

    def __str__(self) -> str:
        return f"{self.per_minute:+.3f} +- {self.error:.3f} a minute"


@dataclass(frozen=True)
class Told:
    minutes: float
    seen: Seen
    samples: list[Sample]
    kills: int

    @property
    def steady(self) -> list[Sample]:
        return self.samples[int(len(self.samples) * WARM_SHARE) :]

    def slope(self, name: str, *, share: float = 1.0) -> Slope:
        """Of the last share of what is steady."""
        late = self.steady[int(len(self.steady) * (1 - share)) :]
        minutes = [sample.at_s / 60 for sample in late]
        return Slope.of(minutes, [getattr(sample, name) for sample in late])

    def lines(self) -> list[str]:
        ends = self.seen.ends
        last = self.samples[-1]
        return [
            f"{self.minutes:.1f} minutes, {sum(ends.values()):,} requests of {CLIENTS} clients over"
            f" {RUNNING} places, {self.kills} engines killed",
            *(f"  {how:<28}{count:>8,}" for how, count in sorted(ends.items())),
            f"answers unlike those of before: {len(self.seen.wrong)}",
            f"first token, seconds:  {_quantiles(self.seen.first_s)}",
            f"whole answer, seconds: {_quantiles(self.seen.whole_s)}",
            f"memory: {last.memory_mib:.1f} MiB at the end, {self.slope('memory_mib')}",
            f"  the server's own process: {last.server_mib:.1f} MiB, {self.slope('server_mib')},"
            f" in the last third {self.slope('server_mib', share=1 / 3)}",
            f"descriptors: {last.descriptors} at the end, {self.slope('descriptors')}",
        ]


def _quantiles(seconds: list[float]) -> str:
    ranked = sorted(seconds)
    if not ranked:
        return "none"
    picked = {
        share: ranked[min(len(ranked) - 1, share * len(ranked) // 100)] for share in (50, 95, 99)
    }
    return ", ".join(f"p{share} {value:.3f}" for share, value in picked.items())


def soak(
    seconds: float,
    *,
    seed: int = 1,
    kill_every_s: float = 0.0,
    recover: str = "resume",
) -> Told:
    seen, over = Seen(), threading.Event()
    flags = ("--max-running", str(RUNNING), "--deterministic", "--engine-restarts", "1000")
    flags += ("--recover", recover)
    with Process(*flags, stderr=sys.stderr.fileno(), is_real=True) as server:
        server.wait_ready()
        clients = [Client(server, number, seed, seen, over) for number in range(CLIENTS)]
        began_s = time.monotonic()
        for client in clients:
            client.start()
        samples, kills = [sampled(server, began_s)], 0
        while (passed_s := time.monotonic() - began_s) < seconds:
            over.wait(min(SAMPLE_S, seconds - passed_s))
            samples.append(sampled(server, began_s))
            if kill_every_s and passed_s > (kills + 1) * kill_every_s:
                with contextlib.suppress(ValueError, ProcessLookupError):
                    server.kill_engine()
                    kills += 1
        over.set()
        for client in clients:
            client.join(150)
        assert not any(client.is_alive() for client in clients), "a stream never ends"
        server.wait_ready()
    return Told(seconds / 60, seen, samples, kills)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.server.soak", usage=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kill-every", type=float, default=0.0)
    parser.add_argument("--recover", choices=("fail", "resume"), default="resume")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    told = soak(
        asked.minutes * 60,
        seed=asked.seed,
        kill_every_s=asked.kill_every,
        recover=asked.recover,
    )
    print("\n".join([*told.lines(), *told.seen.wrong[:5]]))
    if asked.json is not None:
        rows = [dataclasses.astuple(sample) for sample in told.samples]
        asked.json.write_text(json.dumps({"ends": told.seen.ends, "samples": rows}))
    return int(bool(told.seen.wrong))


if __name__ == "__main__":
    sys.exit(main())
