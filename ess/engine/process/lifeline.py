"""An engine process does not outlive the server that started it, not even stopped or stuck.

The closed stdin ends an engine between two steps. An engine that is stuck in a step is ended by the
system: on Linux the kernel sends SIGKILL when the parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from select import select
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe, to which nothing is written, has been closed."""
    readable, _, _ = select([descriptor], [], [], 0.0)
    return bool(readable) and not os.read(descriptor, 1)
