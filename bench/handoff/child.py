"""The other worker of a benchmark: a process that exchanges lines of JSON with this one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from select import select
from typing import Any

from ess.errors import BadState


def next_line(asked: FileIO, meanwhile: Callable[[], None]) -> bytes:
    """Runs in the other process. It reads no further than the line: lines read ahead would be
    lost."""
    while not select([asked], [], [], 0.0005)[0]:
        meanwhile()
    return asked.readline()


class Child:
    """Runs `python -m module words...`; at the end of the block the process is ended.

    Our side buffers nothing: a line that was read ahead would not show in `select`.
    """

    def __init__(self, module: str, *words: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, **said: Any) -> None:
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps(said).encode() + b"\n")

    def hear(self, *, meanwhile: Callable[[], None] | None = None) -> Any:
        """The next line; until it comes, `meanwhile` is called again and again."""
        assert self._process.stdout is not None, "stdout is a pipe"
        while meanwhile is not None and not select([self._process.stdout], [], [], 0.0005)[0]:
            meanwhile()
        line = self._process.stdout.readline()
        if not line:
            raise BadState(f"the other process ended with code {self._process.wait()}")
        return json.loads(line)
