"""The commands `ess` and `ess-bench` as they are installed.

What they import takes up to seconds: a benchmark imports torch. Ctrl-C ends that too with a
sentence, not with a traceback, so this module itself imports nothing that takes time. SIGHUP, as of
`systemctl reload`, has servers read their files again; it must not end one that has not come to
read them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys

INTERRUPTED = 130
SERVERS = ("serve", "prefill", "decode")


def ess() -> int:
    is_default = signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if sys.argv[1:2] and sys.argv[1] in SERVERS and is_default and not os.isatty(0):
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    return _run("ess.server.commands.cli", name="ess")


def ess_bench() -> int:
    return _run("ess.bench.cli", name="ess-bench")


def _run(module: str, *, name: str) -> int:
    _open_what_is_closed()
    try:
        code: int = importlib.import_module(module).main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _open_what_is_closed() -> None:
    """Where the shell has closed a stream, as in `ess plan >&-`, Python has None for it, here and
    in the processes that a command starts. The next file or socket would take the stream's number,
    and get what is printed."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
