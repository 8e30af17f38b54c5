"""An engine process does not outlive the server that started it, not even stopped or stuck.

The closed stdin ends an engine between two steps. An engine that is stuck in a step is ended by the
system: on Linux the kernel sends SIGKILL when the parent has ended.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from select import select
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_parent() -> None:
    """Ignores signals to end and to read files again: systemd may send them to all processes of a
    unit, and `pkill` to all of a name. The parent heeds them, and needs this process until it has
    ended its own work."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def first_line() -> bytes:
    """What the parent writes to our stdin first. Where the parent has ended, this process ends here
    without a word: of an end before `die_with_parent` the system tells nothing, and loading a model
    takes minutes."""
    leave_signals_to_parent()
    die_with_parent()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n") or is_closed(sys.stdin.fileno()):
        raise SystemExit(0)
    return line


def leave_objects() -> None:
    """Hides all objects from the garbage collector, just before the process ends. Otherwise the end
    of the interpreter walks through them, which takes half a second with those of torch."""
    gc.freeze()


def is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe, to which nothing is written, has been closed."""
    readable, _, _ = select([descriptor], [], [], 0.0)
    return bool(readable) and not os.read(descriptor, 1)
