"""What /proc says of processes: how large they are, and whether they go on."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.support.kin import fields, told

PAGE = os.sysconf("SC_PAGE_SIZE")


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


def birth(process: int) -> int:
    """Its start in ticks, which tells it from a later process of this number; 0 if it has ended.

    A process that has ended counts as ended even if its parent has not waited for it.
    """
    words = fields(process)
    return int(words[19]) if words and words[0] not in "ZX" else 0
