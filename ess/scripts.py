"""The commands `ess` and `ess-bench` as they are installed.

What they import takes up to seconds: a benchmark imports torch. Ctrl-C ends that too with a
sentence, not with a traceback, so this module itself imports nothing that takes time.
"""

from __future__ import annotations

import importlib
import sys

INTERRUPTED = 130


def ess() -> int:
    return _run("ess.server.commands.cli", name="ess")


def ess_bench() -> int:
    return _run("ess.bench.cli", name="ess-bench")


def _run(module: str, *, name: str) -> int:
    try:
        code: int = importlib.import_module(module).main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code
