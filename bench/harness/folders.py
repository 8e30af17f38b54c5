"""Where benchmarks keep what is expensive to compute again, and how they write a file."""

from __future__ import annotations

import os
from pathlib import Path

from ess.caches import cache_folder


def default_folder() -> Path:
    return cache_folder() / "prefix"


def write_whole(path: Path, content: bytes) -> None:
    """Writes the whole file or none of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(content)
    os.replace(draft, path)
