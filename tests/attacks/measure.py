"""One attack on one server: what it costs the machine, the other clients and the operator."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.attacks.bystander import Bystander
from tests.attacks.processes import birth, forget_peak, own_bytes, peak_bytes, resident_bytes
from tests.support.kin import kin
from tests.support.process import Process

SAMPLE_S = 0.02
AFTER_S = 2.0
DRAIN_S = 2.0
EXIT_S = 30.0
LAST_S = 30.0
LIMIT_S = 60.0
CEILING_BYTES = 6 << 30


class Figures(msgspec.Struct, kw_only=True):
    """None where a figure has no meaning: a killed server has no gap. Bytes are above idle."""

    name: str
    got: str
    server_bytes: int | None = None
    all_bytes: int | None = None
    gap_s: float | None = None
    late_s: float | None = None
    health_s: float | None = None
    unhealthy: int = 0
    exit_s: float | None = None
    code: int | None = None
    left: int = 0
    tracebacks: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    process: Process
    limit_s: float

    @property
    def port(self) -> int:
        return self.process.port

    @contextmanager
    def connection(self, *, room: int | None = None) -> Iterator[socket.socket]:
        """`room` is how much of an answer the system takes before we read it."""
        with socket.socket() as made:
            if room:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
            made.settimeout(self.limit_s)
            made.connect(("127.0.0.1", self.port))
            yield made


@contextmanager
def kept_log() -> Iterator[int]:
    with tempfile.TemporaryFile() as made:
        yield made.fileno()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`act` says what the attacker got. `flags` follow those of every attack.

    `server_mib` and `all_mib` are the most that it may add: to the server's process, to them all.
    """

    name: str
    act: Callable[[Target], str]
    flags: tuple[str, ...] = ()
    log: Callable[[], AbstractContextManager[int]] = kept_log
    needs_model: bool = False
    ends: bool = False
    limit_s: float = LIMIT_S
    server_mib: int = 24
    all_mib: int = 32

    def all_flags(self) -> tuple[str, ...]:
        paced = () if self.needs_model else ("--engine", "paced", "--pace-ms", "100")
        running = () if "--max-running" in self.flags else ("--max-running", "16")
        return (*paced, *running, "--drain-s", f"{DRAIN_S:g}", *self.flags)

    @property
    def key(self) -> str:
        given = dict(zip(self.flags, self.flags[1:], strict=False))
        return given.get("--api-key", "")


@dataclass
class Memory:
    """Samples what a server and all processes below it hold; ends them at the ceiling."""

    server: int
    idle_bytes: int = 0
    peak_bytes: int = 0
    is_over: bool = False
    met: dict[int, int] = field(default_factory=dict)

    def __enter__(self) -> Memory:
        self._idle_server_bytes = resident_bytes(self.server)
        self.idle_bytes = self._sample()
        forget_peak(self.server)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def server_bytes(self) -> int:
        return max(0, peak_bytes(self.server) - self._idle_server_bytes)

    def all_bytes(self) -> int:
        return max(0, self.peak_bytes - self.idle_bytes)

    def left(self) -> int:
        """Processes that are still there."""
        return sum(birth(pid) == born for pid, born in self.met.items())

    def end_all(self) -> None:
        for pid, born in self.met.items():
            if birth(pid) == born:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            held = self._sample()
            self.peak_bytes = max(self.peak_bytes, held)
            if held > CEILING_BYTES and not self.is_over:
                self.is_over = True
                self.end_all()

    def _sample(self) -> int:
        pids = [self.server, *kin(self.server)]
        for pid in pids:
            if pid not in self.met and (born := birth(pid)):
                self.met[pid] = born
        return sum(map(own_bytes, pids))


def measure(attack: Attack, tree: Path) -> Figures:
    with contextlib.ExitStack() as held:
        log = held.enter_context(attack.log())
        process = held.enter_context(
            Process(*attack.all_flags(), stderr=log, tree=tree, is_real=True)
        )
        if not is_ready(process):
            return Figures(name=attack.name, got="never ready")
        bystander = held.enter_context(Bystander(process.port, attack.key))
        memory = Memory(process.process.pid)
        held.callback(memory.end_all)
        with memory:
            began_s = time.monotonic()
            got = attacked(attack, process)
            figures = Figures(name=attack.name, got=got)
            ended_s = time.monotonic()
            if not attack.ends:
                time.sleep(AFTER_S)
                figures.server_bytes = None if memory.is_over else memory.server_bytes()
            figures.exit_s, figures.code = ended(process, attack)
        figures.all_bytes = memory.all_bytes()
        figures.left = left_after(memory)
        seen = bystander.seen()
        window = began_s, ended_s + AFTER_S
        if not attack.ends:
            figures.gap_s, figures.health_s = seen.gap_s(*window), seen.health_s(*window)
            figures.late_s, figures.unhealthy = seen.late_s(*window), seen.unhealthy(*window)
        if memory.is_over:
            figures.got = f"ended by us at {CEILING_BYTES >> 30} GiB"
        figures.tracebacks = tracebacks_in(log) if attack.log is kept_log else 0
    return figures


def measure_start(name: str, flags: tuple[str, ...], tree: Path) -> Figures:
    """Does a server start with these flags?"""
    try:
        with Process("--engine", "paced", *flags, tree=tree, is_real=True):
            return Figures(name=name, got="starts")
    except AssertionError:
        return Figures(name=name, got="refused")


def is_ready(process: Process) -> bool:
    """One that waits for its log never is."""
    with contextlib.suppress(TimeoutError):
        process.wait_ready()
        return True
    return False


def attacked(attack: Attack, process: Process) -> str:
    try:
        return attack.act(Target(process, attack.limit_s))
    except TimeoutError:
        return f"none in {attack.limit_s:g} s"
    except OSError:
        return "closed"


def ended(process: Process, attack: Attack) -> tuple[float | None, int | None]:
    """Seconds and exit code from SIGTERM on, or from an attack that ends the server."""
    began_s = time.monotonic()
    if not attack.ends:
        process.process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.process.wait(EXIT_S)
        return time.monotonic() - began_s, code
    return None, None


def left_after(memory: Memory) -> int:
    deadline_s = time.monotonic() + LAST_S
    while (left := memory.left()) and time.monotonic() < deadline_s:
        time.sleep(SAMPLE_S)
    return left


def tracebacks_in(log: int) -> int:
    os.lseek(log, 0, os.SEEK_SET)
    with os.fdopen(os.dup(log), "rb") as told:
        return told.read().count(b"Traceback")
