"""What the two targets over the whole application share: its costs, and what stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.lines import Lines, sources
from tests.fuzz.responses import Response, responses
from tests.fuzz.rig import HELD_BYTES_MAX, KEEP_ALIVE_S, Rig

SERVER_FILES = (
    *("server/http/**/*.py", "server/dialects/**/*.py", "server/process/link.py"),
    *("server/process/service.py", "server/process/tally.py", "engine/tokens/stops.py"),
    *("models/chat/deepseek_v32.py", "models/chat/dsml.py", "models/chat/[mqt]*.py"),
    *("models/chat/reply.py", "models/chat/styles.py", "models/text/*.py"),
    *(f"models/chat/parsers/{name}.py" for name in ("deepseek_v32", "glm", "stream", "tagged")),
    *(
        "models/chat/grammars/calls.py",
        "models/chat/grammars/dsml.py",
        "models/chat/grammars/glm.py",
    ),
)
CPU_S_MAX = 1.0
GROWTH_BYTES_MAX = 64 << 20
CENSUS_EVERY = 500
TIMERS_S = 2 * KEEP_ALIVE_S
LEAK_MIN = 25
REPEATS = 8


class ServedTarget:
    """A subclass says what an input does on a connection and what its answer must be."""

    name = ""
    patterns: Sequence[str] = SERVER_FILES

    def __init__(self, *, extra: Sequence[Path] = (), census_every: int = CENSUS_EVERY) -> None:
        self.lines = Lines([*sources(*self.patterns), *extra])
        self._census_every = census_every
        self._since_census: list[Value] = []
        self._before: Counter[str] | None = None
        self.document: dict[str, Any] = {}

    def __enter__(self) -> ServedTarget:
        self.lines.__enter__()
        self._open()
        self.document = json.loads(self._get("/openapi.json").body)
        self.begin()
        return self

    def __exit__(self, *error: object) -> None:
        self.lines.__exit__()
        self._rig.__exit__()

    def restart(self) -> None:
        self.lines.is_off = False
        self._rig.__exit__()
        self._open()

    def _open(self) -> None:
        self._rig = self.make_rig().__enter__()
        self._before, self._since_census = None, []

    # ---- for the subclass

    def make_rig(self) -> Rig:
        return Rig()

    def begin(self) -> None:
        """The document is there."""

    async def talk(self, value: Value) -> list[Response]:
        raise NotImplementedError

    def judge(self, value: Value, answers: list[Response]) -> None:
        raise NotImplementedError

    def place(self, value: Value) -> str:
        return str(value.get("path", self.name))

    # ---- running

    def run(self, value: Value) -> None:
        if "repeat" in value:
            self._run_repeated(value)
            return
        self._run_once(value)
        self._since_census.append(value)
        if len(self._since_census) >= self._census_every:
            self._take_census()

    def _run_once(self, value: Value) -> None:
        rss, began_s = rss_bytes(), time.process_time()
        answers = self._rig.run(lambda: self.talk(value))
        spent_s, grown = time.process_time() - began_s, rss_bytes() - rss
        self._rig.check_errors()
        self.judge(value, answers)
        if grown > GROWTH_BYTES_MAX:
            raise Finding("memory", self.place(value), f"the process grew by {grown:,} bytes")
        if spent_s > CPU_S_MAX:
            self._check_cpu(value)

    def _check_cpu(self, value: Value) -> None:
        """Again, and unwatched: watching lines takes most of the time."""
        self.lines.is_off, began_s = True, time.process_time()
        try:
            self._rig.run(lambda: self.talk(value))
        finally:
            self.lines.is_off = False
        spent_s = time.process_time() - began_s
        if spent_s > CPU_S_MAX:
            sentence = f"{spent_s:.1f} s of CPU for one input of {len(str(value)):,} characters"
            raise Finding("cpu", self.place(value), sentence)

    # ---- what stays behind

    def _take_census(self) -> None:
        """The first one is what the others are compared with: caches fill up once."""
        values, self._since_census = self._since_census, []
        census = self._count()
        if self._before is None:
            self._before = census
            return
        kind, grown = most_grown(self._before, census)
        if grown < LEAK_MIN:
            return
        while len(values) > 1:
            half = values[: len(values) // 2]
            values = half if self._grows(half, kind) else values[len(values) // 2 :]
        raise Finding(
            "leak", kind, f"{grown} more are alive than before", value={**values[0], "repeat": kind}
        )

    def _grows(self, values: Sequence[Value], kind: str) -> bool:
        before = self._count()[kind]
        for _ in range(REPEATS):
            for value in values:
                self._run_once(value)
        return self._count()[kind] >= before + REPEATS

    def _run_repeated(self, value: Value) -> None:
        once = {name: item for name, item in value.items() if name != "repeat"}
        self._run_once(once)
        if self._grows([once], value["repeat"]):
            raise Finding("leak", value["repeat"], f"one more with every of {REPEATS} runs")

    def _count(self) -> Counter[str]:
        self._rig.run(lambda: asyncio.sleep(TIMERS_S))
        return self._rig.census()

    # ---- a plain exchange

    def _get(self, path: str) -> Response:
        head = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n"
        return self._rig.run(lambda: self.exchange(head.encode()))

    async def exchange(self, raw: bytes) -> Response:
        """One request, awaited to its end."""
        connection, protocol = self._rig.connect()
        connection.feed(raw)
        deadline_s = time.monotonic() + 60
        while protocol.cycle is None or not protocol.cycle.response_complete:
            if connection.is_over:
                break
            if time.monotonic() > deadline_s:
                raise Finding("stuck", self.name, f"no answer within 60 s to {raw[:300]!r}")
            await asyncio.sleep(0)
        connection.leave(is_reset=False)
        await self._rig.drained()
        [answer] = responses(bytes(connection.written), has_heads=False)
        return answer


def most_grown(before: Counter[str], after: Counter[str]) -> tuple[str, int]:
    return max(((kind, after[kind] - before[kind]) for kind in after), key=lambda pair: pair[1])


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def check_held(protocol: Any) -> None:
    """A connection may hold its head and a piece of its body, and no more."""
    owners = {"protocol": protocol, "cycle": protocol.cycle}
    for owner, thing in owners.items():
        for name, item in vars(thing).items() if thing is not None else ():
            held = held_bytes(item)
            if held > HELD_BYTES_MAX:
                raise Finding("held", f"{owner}.{name}", f"{held:,} bytes on one connection")


def held_bytes(item: Any) -> int:
    if isinstance(item, bytes | bytearray | str):
        return len(item)
    if isinstance(item, list | tuple):
        return sum(held_bytes(part) + 16 for part in item)
    return 0
