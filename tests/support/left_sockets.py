"""Sockets that only the collector of garbage would close fail the test that made them.

A client that lies in a cycle with its sockets is closed by its finalizer or, if the collector comes
to a socket first, Python says that this was not closed, in whichever test the collector runs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import warnings
import weakref
from collections.abc import Iterator

import pytest

Made = list[weakref.ref[socket.socket]]


def left_by(made: Made) -> list[str]:
    """Those that the collector closes; it runs only if a socket is open. Weak references to what
    it takes end before the first finalizer runs, so the order of finalizers does not matter."""
    left: dict[str, None] = {}

    def note(number: int, inode: int, sentence: str, _: object) -> None:
        try:
            is_open = os.fstat(number).st_ino == inode
        except OSError:  # another thread has closed it
            return
        if is_open:
            left[sentence] = None

    looks = []
    for each in filter(is_open, (ref() for ref in made)):
        number, sentence = each.fileno(), f"unclosed {each!r}"
        with contextlib.suppress(OSError):  # another thread has closed it
            seen = functools.partial(note, number, os.fstat(number).st_ino, sentence)
            looks.append(weakref.ref(each, seen))
        del each
    if looks:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gc.collect()
        for each in said:
            if (sentence := str(each.message)).startswith("unclosed <socket"):
                left[sentence] = None
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return [*left]


def is_open(made: socket.socket | None) -> bool:
    return made is not None and made.fileno() >= 0


class Sockets:
    """Those that a test leaves open are looked at when it ends, and those that the fixtures of a
    file hold at the end of the file too."""

    def __init__(self) -> None:
        self._made: Made = []
        self._held: Made = []
        begin = socket.socket.__init__

        @functools.wraps(begin)
        def noted(made: socket.socket, *given: int, **named: int) -> None:
            begin(made, *given, **named)
            self._made.append(weakref.ref(made))

        socket.socket.__init__ = noted

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[None]:
        try:
            yield
        finally:
            made, self._made = self._made, []
            held, self._held = self._held, []
        is_last = nextitem is None or nextitem.path != item.path
        left = left_by(made + held if is_last else made)
        if not is_last:
            self._held = [*held, *(ref for ref in made if is_open(ref()))]
        assert not left, f"the collector of garbage closes what this test left: {', '.join(left)}"
