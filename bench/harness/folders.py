"""Where benchmarks keep what is expensive to make again, and how they write a file."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "ess" / "prefix"


def write_whole(path: Path, content: bytes) -> None:
    """The whole file or nothing of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, path)
