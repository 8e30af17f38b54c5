"""Models in the cache that `hf download` fills, found by their names of the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_HOME: Final = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def snapshot_of(name: str, environment: Mapping[str, str]) -> Path | None:
    """The snapshot of a model ORG/NAME that was fetched last, if one was."""
    home = _hub_folder(environment) / f"models--{name.replace('/', '--')}"
    try:
        revision = (home / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    folder = home / "snapshots" / Path(revision).name
    return folder if folder.is_dir() else None


def name_of(snapshot: Path) -> str | None:
    """ORG/NAME of a folder that is a snapshot of such a cache: its own name is a hash."""
    if snapshot.parent.name != "snapshots":
        return None
    home = _HOME.fullmatch(snapshot.parent.parent.name)
    return f"{home[1]}/{home[2]}" if home else None


def _hub_folder(environment: Mapping[str, str]) -> Path:
    """The folder that the hub's own programs use, by their environment variables."""
    if given := environment.get("HF_HUB_CACHE"):
        return Path(given).expanduser()
    caches = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = environment.get("HF_HOME") or f"{caches}/huggingface"
    return Path(home).expanduser() / "hub"
