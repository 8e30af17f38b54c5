"""The user's folder for files that ESS can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`ess` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ess"
