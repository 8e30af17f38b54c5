"""Logs that take nothing, to be a server's stderr."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def reader_gone() -> Iterator[int]:
    """A pipe whose reader has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def disk_full() -> Iterator[int]:
    with open("/dev/full", "wb") as full:
        yield full.fileno()


@contextmanager
def full_and_unread() -> Iterator[int]:
    """A pipe into which not one more byte goes; a write would wait for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    for piece in (b"x" * 4096, b"x"):
        with suppress(BlockingIOError):
            while True:
                os.write(writer, piece)
    os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    os.close(reader)
