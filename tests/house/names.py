"""Modules and files that documents, comments and texts name: they must be there.

`ess.pool.lru` must be a module, or a name that stands in the text of `ess.pool`; a path must lead
to a file. In documents a module may also stand in backticks without its `ess`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set

DOTTED = re.compile(r"(?<![\w./@-])ess(?:\.[A-Za-z_]\w*)+")
SHORT = re.compile(r"`([a-z_]+(?:\.(?!json|toml|py)[a-z_]\w*)+)`")
PATH = re.compile(
    r"(?<![\w./{-])(?:ess|models|server|bench|csrc|tests|docs)"
    r"/[\w/.-]*?\w\.(?:py|cpp|h|cu|cuh|md)\b"
)


def lost_modules(text: str, sources: Mapping[str, str]) -> list[str]:
    """`sources`: the text of every module, by its name."""
    return [
        f"{line}: no module has {name}"
        for line, name in matches_in(DOTTED, text)
        if not is_there(name, sources)
    ]


def lost_short_modules(text: str, sources: Mapping[str, str]) -> list[str]:
    return [
        f"{line}: no module has ess.{name}"
        for line, name in matches_in(SHORT, text)
        if not is_there(f"ess.{name}", sources)
    ]


def lost_files(text: str, files: Set[str]) -> list[str]:
    """From the root, from `ess`, or, of a test, from the folder of the tests."""
    return [
        f"{line}: there is no {name}"
        for line, name in matches_in(PATH, text)
        if not {name, name.removeprefix("ess/"), f"tests/{name}"} & files
    ]


def matches_in(pattern: re.Pattern[str], text: str) -> Iterator[tuple[int, str]]:
    for line, content in enumerate(text.splitlines(), 1):
        for match in pattern.finditer(content):
            yield line, match[match.lastindex or 0]


def is_there(name: str, sources: Mapping[str, str]) -> bool:
    """What does not begin with a part of `ess` is no module: a setting, a socket, an attribute."""
    parts = name.split(".")
    if ".".join(parts[:2]) not in sources:
        return True
    depth = max(n for n in range(2, len(parts) + 1) if ".".join(parts[:n]) in sources)
    if depth == len(parts) or parts[depth].startswith("__"):
        return True
    return bool(re.search(rf"\b{parts[depth]}\b", sources[".".join(parts[:depth])]))
