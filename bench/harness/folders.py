"""Where benchmarks keep what is expensive to make again."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ess" / "prefix"
