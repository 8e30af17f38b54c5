"""An engine process does not outlive the server that started it, not even stopped or stuck.

The closed stdin ends an engine between two steps. The system ends one that gets no further: on
Linux the kernel sends SIGKILL when the parent has ended.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
