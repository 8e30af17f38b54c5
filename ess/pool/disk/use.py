"""What an engine says of its disk tier; a server that only reads this loads no database."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskUse:
    """Pages there are and may be, pages that wait to be stored, and since the start pages and
    seconds of stores and loads. `dropped_count` pages were not stored, `damaged_count` were damaged
    and forgotten. `fault` says why no page is stored."""

    page_count: int = 0
    page_max: int = 0
    page_bytes: int = 0
    queue_count: int = 0
    stored_count: int = 0
    dropped_count: int = 0
    loaded_count: int = 0
    damaged_count: int = 0
    store_s: float = 0.0
    load_s: float = 0.0
    fault: str = ""
