"""Python in a process of its own, from the top of the tree."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python(
    *words: object, timeout_s: float = 120.0, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """However it ends; what it printed and said is kept."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
