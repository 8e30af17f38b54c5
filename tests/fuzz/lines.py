"""Which lines of some files have run. What an input adds to them says whether it is kept.

Only lines of functions count: those of modules and classes run once, at import. A function whose
lines have all run is no longer watched, so watching costs less the longer it goes on.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
Line = tuple[str, int]


def sources(*patterns: str) -> list[Path]:
    """Files of the package by patterns below it, as the interpreter names them."""
    return sorted(path for pattern in patterns for path in (ROOT / "ess").glob(pattern))


class Lines:
    def __init__(self, files: Sequence[Path]) -> None:
        self._wanted = {str(path): _function_lines(path) for path in files}
        self.total = sum(len(lines) for lines in self._wanted.values())
        self.seen: set[Line] = set()
        self.is_off = False
        self._left: dict[int, set[int]] = {}

    @property
    def percent(self) -> float:
        return 100 * len(self.seen) / self.total

    def __enter__(self) -> Lines:
        """Watches this thread and those that start from now on."""
        self._before = sys.gettrace(), threading.gettrace()
        threading.settrace(self._on_call)
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before[0])
        threading.settrace(self._before[1])  # type: ignore[arg-type]

    def forget(self) -> None:
        self.seen.clear()
        self._left.clear()

    def add(self, seen: Iterable[Line]) -> None:
        """Lines that another process has watched."""
        self.seen.update(seen)

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if self.is_off or code.co_filename not in self._wanted:
            return None
        left = self._left.get(id(code))
        if left is None:
            left = self._left[id(code)] = _lines_of(code) & self._wanted[code.co_filename]
        self._note(left, frame)
        return self._on_line if left else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        left = self._left.get(id(frame.f_code))
        if not left:
            return None
        self._note(left, frame)
        return self._on_line

    def _note(self, left: set[int], frame: FrameType) -> None:
        if frame.f_lineno in left:
            left.discard(frame.f_lineno)
            self.seen.add((frame.f_code.co_filename, frame.f_lineno))


def _function_lines(path: Path) -> set[int]:
    module = compile(path.read_text(), str(path), "exec", dont_inherit=True)
    return {line for code in _functions(module) for line in _lines_of(code)}


def _functions(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            yield from _functions(inner)


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}
