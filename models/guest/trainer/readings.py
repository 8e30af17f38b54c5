"""The text that the indexer of a guest is trained on, which is on this machine already.

The doc strings and the sources of Python's standard library. Python's own reference is left out: it
is what the benchmarks read.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Final

DOC_CHARS_MIN: Final = 200
SOURCE_CHARS: Final = 6000
MODULES_LEFT_OUT: Final = ("test", "idlelib", "pydoc_data", "lib2to3", "site-packages", "encodings")


def texts(seed: int) -> list[str]:
    """The texts, in an order that the seed decides."""
    listed = list(_library())
    random.Random(seed).shuffle(listed)
    return listed


def _library() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if any(part in MODULES_LEFT_OUT for part in path.relative_to(root).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="ignore")
        yield from _doc_strings(source)
        yield source[: SOURCE_CHARS // 2]


def _doc_strings(source: str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= DOC_CHARS_MIN:
                yield text[:SOURCE_CHARS]
