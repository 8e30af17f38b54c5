"""The log as JSON, for collectors: a record a line, `{"time", "level", "message"}`.

Text becomes a record line by line, wherever it comes from: notes, libraries, the engine process. A
traceback is one record, of the level "error". A line that is a record already, as `request_log`
writes them, passes as it is. A record that one of our processes has passed on gets the name of that
process.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from ess.decoding import UNDECODABLE

LogFormat = Literal["text", "plain", "json"]
OURS: Final = b'{"time":'
FAULTS: Final = (
    b"Traceback (most recent call last):",
    b"  + Exception Group Traceback (most recent call last):",
)
GROUP_END: Final = b"+------------------------------------"
GROUP_SIZE: Final = re.compile(rb".*\(([0-9]{1,9}) sub-exceptions?\)")
GROUP_CHILD: Final = re.compile(rb"( *(?:\+-)?)\+-+ ([0-9]+|\.\.\.) -+")
NAME: Final = re.compile(rb"[a-z]+(?:-[0-9]+)?")
LINE_BYTES_MAX: Final = 64 << 10
FAULT_LINES_MAX: Final = 1000


def record(level: str, message: str, **more: Any) -> bytes:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return msgspec.json.encode({"time": at, "level": level, "message": message, **more})


class Lines(ABC):
    """Text that comes in pieces, written anew line by line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        return b"".join(map(self._of_line, lines))

    def end(self) -> bytes:
        """Ends the text; returns what is left of it."""
        rest, self._rest = self._rest, b""
        return self._of_line(rest) if rest else b""

    @abstractmethod
    def _of_line(self, line: bytes) -> bytes: ...


class Records(Lines):
    def __init__(self) -> None:
        super().__init__()
        self._fault: list[bytes] = []
        self._groups = Groups()

    def end(self) -> bytes:
        return super().end() + self._of_fault()

    def _of_line(self, line: bytes) -> bytes:
        if made := _passed(line):  # also of another process, in the middle of a traceback
            return made
        if self._fault:
            self._fault.append(line)
            is_within = line[:1] in (b" ", b"") and not self._groups.end_with(line)
            goes_on = is_within and len(self._fault) < FAULT_LINES_MAX
            return b"" if goes_on else self._of_fault()
        if line in FAULTS:
            self._fault, self._groups = [line], Groups()
            return b""
        return _written("info", line.removeprefix(b"ess: ")) if line.strip() else b""

    def _of_fault(self) -> bytes:
        lines, self._fault = self._fault, []
        return _written("error", b"\n".join(lines)) if lines else b""


class Groups:
    """Where in the traceback of a group of exceptions we are. Its last line is also that of a group
    inside it, and where both end together the line comes once. So such a line is the last one if no
    group has an exception to come.

        + Exception Group Traceback (most recent call last):
        | ExceptionGroup: outer (2 sub-exceptions)
        +-+---------------- 1 ----------------
          | ExceptionGroup: inner (1 sub-exception)
          +-+---------------- 1 ----------------
            | ValueError
            +------------------------------------       of the inner group
          +---------------- 2 ----------------
          | KeyError
          +------------------------------------         the last line

    Any other traceback ends with its first line without an indent.
    """

    def __init__(self) -> None:
        self._size = 0
        self._more: dict[int, int] = {}  # by indent: the exceptions of a group that are to come

    def end_with(self, line: bytes) -> bool:
        """Takes the next line; whether it is the last one."""
        if line.strip() == GROUP_END:
            return not any(self._more.values())
        if size := GROUP_SIZE.fullmatch(line):
            self._size = int(size[1])
        elif child := GROUP_CHILD.fullmatch(line):
            indent, number = len(child[1]), child[2]
            around = {at: more for at, more in self._more.items() if at < indent}
            before = self._size if number == b"1" else self._more.get(indent, 0)
            more = 0 if number == b"..." else max(0, before - 1)  # the rest has no numbers
            self._more = {**around, indent: more}
        return False


def _passed(line: bytes) -> bytes:
    """A line that is already a record, with the name of its process added; else empty."""
    if _is_record(line):
        return line + b"\n"
    name, _, rest = line.partition(b": ")
    if NAME.fullmatch(name) and _is_record(rest):
        return b'{"process":"%b",%b\n' % (name, rest[1:])
    return b""


def _is_record(line: bytes) -> bool:
    if not line.startswith(OURS):
        return False
    try:
        msgspec.json.decode(line)
    except UNDECODABLE:
        return False
    return True


def _written(level: str, text: bytes) -> bytes:
    return record(level, text.decode("utf-8", "replace").rstrip()) + b"\n"
