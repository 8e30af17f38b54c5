"""The server's own stderr: no write to it waits or fails, whatever happens to the log.

The log's reader may end (EPIPE), its disk may be full (ENOSPC), or it is a full pipe that is not
read (a write that never returns). So descriptor 2 becomes the end of our own pipe, which does not
block, and a thread copies from it to the original stderr. What cannot be written is kept up to
`KEPT_BYTES`; more is dropped and counted, and the count is written once there is room. Everything
passes here: notes, logging, tracebacks, output of libraries, and the engine process, which inherits
the descriptor. So here the log gets its form: times in front of sentences, or JSON.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Final

from ess.server.process.logs.log_records import Lines, LogFormat, Records
from ess.server.process.logs.log_times import TimedLines, is_journal

STDERR: Final = 2
KEPT_BYTES: Final = 256 << 10
LAST_S: Final = 1.0
PIECE_BYTES: Final = select.PIPE_BUF  # a pipe that is ready takes this many without blocking


@contextlib.contextmanager
def unblocked_stderr(form: LogFormat) -> Iterator[None]:
    """Restores stderr after the block if all was written, else discards: the end must not wait."""
    outside = os.dup(STDERR)
    inside, into = os.pipe()
    os.set_blocking(into, False)
    sys.stderr.flush()
    os.dup2(into, STDERR)
    os.close(into)
    carrier = Carrier(inside, outside, lines=_lines(form, outside))
    carrier.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STDERR)
        os.close(nowhere)
        carrier.join(LAST_S)
        if not carrier.is_alive() and not carrier.lost_bytes:
            os.dup2(outside, STDERR)


def _lines(form: LogFormat, outside: int) -> Lines | None:
    if form == "json":
        return Records()
    return None if form == "plain" or is_journal(outside, os.environ) else TimedLines()


class Carrier(threading.Thread):
    """Copies from `inside` to `outside` until all writers of the pipe have closed it; `lines` gives
    the text another form."""

    def __init__(self, inside: int, outside: int, *, lines: Lines | None = None) -> None:
        super().__init__(name="ess-log", daemon=True)
        self._inside = inside
        self._outside = outside
        self._lines = lines
        self._waiting = bytearray()
        self.lost_bytes = 0

    def run(self) -> None:
        is_open = True
        while is_open or self._waiting:
            poller = select.poll()
            if is_open:
                poller.register(self._inside, select.POLLIN)
            if self._waiting:
                poller.register(self._outside, select.POLLOUT)
            for ready, _ in poller.poll():
                if ready == self._inside:
                    is_open = self._take()
                else:
                    self._give()

    def _take(self) -> bool:
        piece = os.read(self._inside, KEPT_BYTES)
        kept = piece[: max(0, KEPT_BYTES - len(self._waiting))]
        self._waiting += self._form(kept)
        self.lost_bytes += len(piece) - len(kept)
        if not piece and self._lines is not None:
            self._waiting += self._lines.end()
        return bool(piece)

    def _form(self, text: bytes) -> bytes:
        return text if self._lines is None else self._lines.feed(text)

    def _give(self) -> None:
        """Writes a piece of what is kept; after the last, the number of bytes lost."""
        try:
            count = os.write(self._outside, self._waiting[:PIECE_BYTES])
        except OSError:
            self.lost_bytes += len(self._waiting)
            self._waiting.clear()
            return
        del self._waiting[:count]
        if self.lost_bytes and not self._waiting:
            self._waiting += self._form(
                b"\ness: %d bytes of this log were lost\n" % self.lost_bytes
            )
            self.lost_bytes = 0
