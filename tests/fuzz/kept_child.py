"""A process that answers one JSON line with JSON lines, and may be killed for what it does.

What it costs is counted in its own CPU seconds, so that a busy machine is not taken for a slow
answer.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from typing import Any

from tests.fuzz.fuzzer import Finding
from tests.fuzz.lines import ROOT
from tests.support.kin import fields

WALL_S_MAX = 120.0


class KeptChild:
    """`module` is run as a script. Its last line of an answer has "is_last"."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, question: Any, *, place: str, cpu_s_max: float) -> dict[str, Any]:
        """The last line; a Finding if the process ends first, or takes too long: both end it."""
        process = self._started()
        assert process.stdin is not None
        began_s, deadline_s, stage = cpu_s(process.pid), time.monotonic() + WALL_S_MAX, "begin"
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        while True:
            line = self._line(process)
            if line is not None:
                if line.get("is_last"):
                    return line
                stage = line["stage"]
            elif process.poll() is not None:
                self.close()
                raise Finding("died", f"{place} {stage}", f"ended by {process.returncode}")
            elif cpu_s(process.pid) - began_s > cpu_s_max:
                self.close()
                raise Finding("cpu", f"{place} {stage}", f"more than {cpu_s_max:g} s of CPU")
            elif time.monotonic() > deadline_s:
                self.close()
                raise Finding("stuck", f"{place} {stage}", f"no answer within {WALL_S_MAX:g} s")

    def close(self) -> None:
        process, self._process, self._rest = self._process, None, b""
        if process is not None:
            process.kill()
            process.communicate()

    def _started(self) -> subprocess.Popen[bytes]:
        """Awaits its first line, so that no answer pays for the start."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            while self._line(self._process) is None:
                assert self._process.poll() is None, f"{self._module} ended at its start"
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """None if there is none yet."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        if b"\n" not in self._rest and select.select([descriptor], [], [], 0.1)[0]:
            self._rest += os.read(descriptor, 1 << 20)
        line, mark, rest = self._rest.partition(b"\n")
        if not mark:
            return None
        self._rest = rest
        document: dict[str, Any] = json.loads(line)
        return document


def cpu_s(pid: int) -> float:
    """Of the process and of its children that have ended."""
    return sum(map(int, fields(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
