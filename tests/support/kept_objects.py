"""Objects that building the package in place has left: what compiles the same sources takes them.

As a program this is a compiler (`CXX="python kept_objects.py"`). Where the folder that it runs in
has every source and header as it is here, it takes such an object, and else it calls g++. So a test
that a package can be built from what it contains compiles nothing twice, and sees what is missing.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for folder in ("csrc/cpu", "csrc/residency")
    for suffix in ("cpp", "h")
    for path in (ROOT / folder).rglob(f"*.{suffix}")
]


def kept_object(source: str) -> Path | None:
    """That of a source, unless any source is newer."""
    newest_s = max(path.stat().st_mtime for path in [*SOURCES, ROOT / "pyproject.toml"])
    objects = ROOT.glob(f"build/temp.*/{Path(source).with_suffix('.o')}")
    return next((kept for kept in objects if kept.stat().st_mtime > newest_s), None)


def has_our_sources(folder: Path) -> bool:
    theirs = [folder / path.relative_to(ROOT) for path in SOURCES]
    return all(map(Path.is_file, theirs)) and all(
        filecmp.cmp(ours, path, shallow=False) for ours, path in zip(SOURCES, theirs, strict=True)
    )


def main(words: list[str]) -> None:
    if "-c" in words and "-o" in words and has_our_sources(Path.cwd()):
        source, made = (words[words.index(flag) + 1] for flag in ("-c", "-o"))
        if kept := kept_object(source):
            shutil.copyfile(kept, made)
            return
    os.execvp("g++", ["g++", *words])


if __name__ == "__main__":
    main(sys.argv[1:])
