"""`ess-bench serve`: the HTTP server's cost per token, with an engine that costs nothing.

Streams read the paced engine's tokens through `ess serve`, two real processes and real sockets. A
shared machine may give the server less than a core, so events are counted per second of the server
process's own processor time. The time from the engine to the socket is wall time, of the last
stream of a step, once all streams run: `waited_for_a_core` says how much of it other programs had.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from ess.bench.harness.report import Row, compare
from ess.errors import BadState

EVENTS_TARGET: Final = 60_000
SOCKET_MS_TARGET: Final = 5.0
RUN: Final = "from ess.server.commands.cli import main; raise SystemExit(main())"
FRONT: Final = "ess.server.commands.start.front"
READY_S: Final = 180.0
EVENT_S: Final = 60.0
Counts = dict[float, float]
BUCKET: Final = re.compile(r'^ess_token_to_socket_seconds_bucket\{le="([^"]+)"\} (\S+)$', re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArm:
    """`pace_ms` 0 is as fast as the engine can; any other value is the pace of a decode worker."""

    name: str
    stream_count: int
    pace_ms: float
    process_count: int = 1


ARMS: Final = (
    ServeArm(name="as fast as it goes", stream_count=64, pace_ms=0.0),
    ServeArm(name="256 streams at 40 tokens/s", stream_count=256, pace_ms=25.0),
    ServeArm(
        name="the same, two server processes", stream_count=256, pace_ms=25.0, process_count=2
    ),
)


def serve_benchmark(*, smoke: bool) -> list[Row]:
    seconds = 1.0 if smoke else 8.0
    return [row for arm in ARMS for row in _measure(arm, seconds)]


def _measure(arm: ServeArm, seconds: float) -> list[Row]:
    with served(arm) as (url, pids):
        began_s, began_cpu_s, began_queued_s = time.monotonic(), cpu_s(pids), queued_s(pids)
        event_count, before = asyncio.run(_read(url, arm, seconds))
        spent_s, spent_cpu_s = time.monotonic() - began_s, cpu_s(pids) - began_cpu_s
        spent_queued_s = queued_s(pids) - began_queued_s
        slowest_s = _quantile(before, _waits(url), 0.99)
    per_core = event_count / max(spent_cpu_s, 1e-9)
    config: dict[str, Any] = {
        "streams": arm.stream_count,
        "server_processes": arm.process_count,
        "pace_ms": arm.pace_ms,
        "events": event_count,
        "us_per_event": round(1e6 / per_core, 1),
        "cores_used": round(spent_cpu_s / spent_s, 3),
        "waited_for_a_core": round(spent_queued_s / spent_s, 3),
    }
    if arm.pace_ms == 0.0:
        return [_row(arm, per_core, EVENTS_TARGET, unit="events/s per core", config=config)]
    return [_row(arm, slowest_s * 1e3, SOCKET_MS_TARGET, unit="ms p99 to socket", config=config)]


def _row(arm: ServeArm, value: float, target: float, *, unit: str, config: dict[str, Any]) -> Row:
    return compare(
        name=f"serve, {arm.name}",
        unit=unit,
        ours=[value],
        baseline=("target", [target]),
        better="lower" if unit.startswith("ms") else "higher",
        target=1.0,
        config=config,
    )


@contextlib.contextmanager
def served(arm: ServeArm) -> Iterator[tuple[str, list[int]]]:
    """`ess serve` with the paced engine on a free port; yields the URL and its processes' pids."""
    flags = ["--engine", "paced", "--pace-ms", str(arm.pace_ms)]
    flags += ["--max-running", str(arm.stream_count)]
    flags += ["--server-processes", str(arm.process_count)]
    with started("serve", *flags) as (process, url):
        yield url, _pids(process.pid)


@contextlib.contextmanager
def started(
    command: str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """An `ess serve`, `prefill` or `decode` on a free port, when it is ready, and its URL."""
    with launched(command, *flags, environment=environment) as (process, told):
        _wait_ready(told["url"])
        yield process, told["url"]


@contextlib.contextmanager
def launched(
    command: str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The same once it has printed its JSON document, with which `ess serve --pd` is ready."""
    flags = ("--port", "0", "--json", "--drain-grace-s", "0", "--drain-s", "1", *flags)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, command, *flags],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield process, _told(process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None, "stdout is a pipe"
    text = ""
    while not text.endswith("\n}\n"):
        line = process.stdout.readline()
        if not line:
            raise BadState(f"a server ended with code {process.wait()}")
        text += line
    return dict(json.loads(text))


def _wait_ready(url: str) -> None:
    """A worker that decodes is ready before it has met its peers: then it names those missing."""
    deadline_s = time.monotonic() + READY_S
    while True:
        asked = functools.partial(urllib.request.urlopen, f"{url}/ready", timeout=5)
        with contextlib.suppress(OSError), asked() as answer:
            if not json.load(answer).get("missing"):
                return
        if time.monotonic() > deadline_s:
            raise BadState(f"a server was not ready within {READY_S:g} s")
        time.sleep(0.05)


def _pids(pid: int) -> list[int]:
    """The pids of the server's processes: the first, and its children except engines."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fronts = [c for c in children if FRONT.encode() in Path(f"/proc/{c}/cmdline").read_bytes()]
    return [pid, *map(int, fronts)]


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of processes so far, user and system."""
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def queued_s(pids: Sequence[int]) -> float:
    """Time that processes were ready to run and something else had the core."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.read_text().split()[1]) for task in tasks) / 1e9


async def _read(url: str, arm: ServeArm, seconds: float) -> tuple[int, Counts]:
    """Events of all streams, and the times to the socket when the last of them had begun."""
    begun, over = [asyncio.Event() for _ in range(arm.stream_count)], asyncio.Event()
    streams = [asyncio.ensure_future(_stream(url, event, over)) for event in begun]
    await asyncio.gather(*(event.wait() for event in begun))
    before = await asyncio.to_thread(_waits, url)
    await asyncio.sleep(seconds)
    over.set()
    return sum(await asyncio.gather(*streams)), before


async def _stream(url: str, begun: asyncio.Event, over: asyncio.Event) -> int:
    """Counts events of one endless stream, looking only for their marks, so the reader is cheap.
    Sets `begun` at the first event, or on failure."""
    body = b'{"prompt":[5,6,7],"max_tokens":100000,"ignore_eos":true,"stream":true}'
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 20)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    writer.write(head + body)
    count = 0
    try:
        while not over.is_set():
            piece = await asyncio.wait_for(reader.read(1 << 16), EVENT_S)
            if not piece:
                raise BadState("a stream ended before the measurement did")
            count += piece.count(b"data: ")
            if count:
                begun.set()
    finally:
        begun.set()
        writer.close()
    return count


def _waits(url: str) -> Counts:
    """How many tokens reached their socket within each bound."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return {float(bound): float(count) for bound, count in BUCKET.findall(text)}


def _quantile(before: Counts, after: Counts, share: float) -> float:
    """The upper bound of the bucket that holds the quantile, or the last finite bound."""
    counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = counts.pop(math.inf, 0.0)
    if not total:
        raise BadState("the server reports no time of any token to its socket")
    return next((bound for bound, count in counts.items() if count >= share * total), max(counts))
