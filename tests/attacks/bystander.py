"""A client that does nothing wrong, in a process of its own beside an attack.

    python -m tests.attacks.bystander PORT KEY

It reads streams one after another, asks /health ten times a second, and notes how late its own
clock is, so that a busy machine is not taken for a slow server. It says "going" at the first token,
and once its stdin ends, all it has seen as one JSON line. Times are of the monotonic clock, which
all processes share.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TICK_S = 0.02
PROBE_S = 0.1
LONGEST_S = 300.0
ASKED = {"prompt": "The tide", "stream": True, "max_tokens": 1500, "ignore_eos": True}


@dataclass
class Seen:
    """`tokens` and `late` by time; a probe is when it was sent, when answered, and its status."""

    tokens: list[float] = field(default_factory=list)
    late: list[tuple[float, float]] = field(default_factory=list)
    probes: list[tuple[float, float, int]] = field(default_factory=list)
    end: float = 0.0

    def gap_s(self, begin: float, end: float) -> float:
        """The longest time without a token that touches the window; it may be open at its end."""
        bounds = [*self.tokens, max(self.end, end)]
        touching = [min(b, end) - a for a, b in pairwise(bounds) if b > begin and a < end]
        return max(touching, default=end - begin)

    def late_s(self, begin: float, end: float) -> float:
        return max((late for at, late in self.late if begin <= at <= end + late), default=0.0)

    def health_s(self, begin: float, end: float) -> float:
        met = [(a, b) for a, b, _ in self.probes if b >= begin and a <= end]
        return max((b - a for a, b in met), default=0.0)

    def unhealthy(self, begin: float, end: float) -> int:
        """Probes without 200."""
        return sum(code != 200 for a, b, code in self.probes if b >= begin and a <= end)


class Bystander:
    """The other side of the pipe."""

    def __init__(self, port: int, key: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.bystander", str(port), key],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "going\n", "the bystander got no token"

    def __enter__(self) -> Bystander:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def seen(self) -> Seen:
        said, _ = self._process.communicate(timeout=LONGEST_S)
        return Seen(**json.loads(said))


class Watch:
    def __init__(self, port: int, key: str) -> None:
        self._port = port
        self._key = key
        self._over = threading.Event()
        self._pending_s: list[float] = []
        self.seen = Seen()
        self.going = threading.Event()

    def run(self) -> Seen:
        for act in (self._stream, self._probe, self._tick):
            threading.Thread(target=self._repeat, args=(act,), daemon=True).start()
        self.going.wait(LONGEST_S)
        print("going", flush=True)
        sys.stdin.read()
        self._over.set()
        self.seen.end = time.monotonic()
        waiting = [(sent_s, self.seen.end, 0) for sent_s in self._pending_s]
        return Seen(self.seen.tokens, self.seen.late, [*self.seen.probes, *waiting], self.seen.end)

    def _repeat(self, act) -> None:
        while not self._over.is_set():
            act()

    def _tick(self) -> None:
        began_s = time.monotonic()
        time.sleep(TICK_S)
        ended_s = time.monotonic()
        self.seen.late.append((ended_s, ended_s - began_s - TICK_S))

    def _probe(self) -> None:
        began_s = time.monotonic()
        self._pending_s.append(began_s)
        code = self._health()
        ended_s = time.monotonic()
        self.seen.probes.append((began_s, ended_s, code))
        self._pending_s.clear()
        time.sleep(max(0.0, began_s + PROBE_S - ended_s))

    def _health(self) -> int:
        made = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONGEST_S)
        try:
            made.request("GET", "/health")
            return made.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            made.close()

    def _stream(self) -> None:
        made = http.client.HTTPConnection("127.0.0.1", self._port, timeout=LONGEST_S)
        try:
            lines = {"content-type": "application/json"}
            if self._key:
                lines["authorization"] = f"Bearer {self._key}"
            made.request("POST", "/v1/completions", json.dumps(ASKED), lines)
            answer = made.getresponse()
            while line := answer.readline():
                if line.startswith(b'data: {"id"'):
                    self.seen.tokens.append(time.monotonic())
                    self.going.set()
        except (OSError, http.client.HTTPException):
            pass
        finally:
            made.close()
        time.sleep(TICK_S)


if __name__ == "__main__":
    print(json.dumps(asdict(Watch(int(sys.argv[1]), sys.argv[2]).run())))
