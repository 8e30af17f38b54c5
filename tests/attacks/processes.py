"""What /proc says of processes: how large they are, and whether they go on."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from pathlib import Path

from tests.support.kin import fields, told

PAGE = os.sysconf("SC_PAGE_SIZE")
KCMP, KCMP_VM = {"x86_64": 312, "aarch64": 272}.get(platform.machine(), -1), 1


def peak_bytes(process: int) -> int:
    """The most that it has held since `forget_peak`, or ever; 0 if it has ended."""
    line = re.search(r"VmHWM:\s+(\d+)", told(process, "status"))
    return int(line[1]) << 10 if line else 0


def forget_peak(process: int) -> None:
    Path(f"/proc/{process}/clear_refs").write_text("5")


def resident_bytes(process: int) -> int:
    """0 if it has ended."""
    pages = told(process, "statm").split()
    return int(pages[1]) * PAGE if pages else 0


def own_bytes(process: int) -> int:
    """As `resident_bytes`, but 0 for a child that still works in its parent's memory, as one does
    (`vfork`) until it has begun the program that it is started for."""
    words = fields(process)
    asked = (int(words[1]), process, KCMP_VM, 0, 0) if words else ()
    is_parents = asked and ctypes.CDLL(None).syscall(KCMP, *asked) == 0
    return 0 if is_parents else resident_bytes(process)


def birth(process: int) -> int:
    """Its start in ticks, which tells it from a later process of this number; 0 if it has ended.

    A process that has ended counts as ended even if its parent has not waited for it.
    """
    words = fields(process)
    return int(words[19]) if words and words[0] not in "ZX" else 0
