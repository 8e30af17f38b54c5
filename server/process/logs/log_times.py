"""The log for people: each sentence of ours begins with its time.

A sentence of another of our processes has the name of that process in front of it, and gets its
time here. The lines of a traceback and of a library stay as they are; the sentence before them says
when. systemd's journal notes the time of every line by itself: there no second time is written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from ess.server.process.logs.log_records import Lines, LogFormat

OURS: Final = re.compile(rb"(?:[a-z]+(?:-[0-9]+)?: )?ess: ")


class TimedLines(Lines):
    def _of_line(self, line: bytes) -> bytes:
        return (b"%b %b\n" % (now(), line)) if OURS.match(line) else line + b"\n"


def now() -> bytes:
    """Local time with its distance from UTC, so that a log from another place can be compared."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds").encode()


def passed_on(form: LogFormat) -> LogFormat:
    """The form in which a process writes whose lines get their times from the one that reads it."""
    return "plain" if form == "text" else form


def is_journal(descriptor: int, environment: Mapping[str, str]) -> bool:
    """Whether systemd's journal reads the descriptor: the variable names the device and the inode
    of the stream that systemd made for it."""
    held = os.fstat(descriptor)
    return environment.get("JOURNAL_STREAM") == f"{held.st_dev}:{held.st_ino}"
