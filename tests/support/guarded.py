"""A pytest plugin for a device that may hang or break: `-p tests.support.guarded --told FILE`.

Every test has a time, after which its process dies with all stacks printed; so it does when a test
has broken the context, which would fail all that follow, or has found no memory on the device,
since what it held may stay as long as the process. FILE says what has begun and how it ended,
and what it names is not begun again: a process that is started anew goes on behind the test that
ended it. Each end is printed at once, past whatever captures.

A thread of Python prints the stacks, and so holds the interpreter's lock meanwhile: frames that are
read without it can crash a process that is well. A test that never gives the lock away is ended
from without, by the process that watches FILE.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

from ess.errors import Unavailable
from ess.kernels.cuda import driver

STDERR = os.dup(2)
SLOW_S = 130
"""At least, for tests that are marked slow."""
DEAD = 86
LATE = "it has passed, but a kernel that it had queued failed behind it"
NOT_INITIALIZED, INVALID_CONTEXT = 3, 201


def pytest_addoption(parser):
    parser.addoption("--told", type=Path, required=True)
    parser.addoption("--seconds-each", type=float, default=100)


def say(text):
    os.write(STDERR, (text + "\n").encode())


def expire(nodeid, limit_s):
    """All stacks, then the end of this process."""
    say(f"{nodeid} has taken {limit_s:.0f} s")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            say(f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}")
    os._exit(DEAD)


@contextlib.contextmanager
def limited(nodeid, limit_s):
    timer = threading.Timer(limit_s, expire, (nodeid, limit_s))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.hookimpl
def pytest_configure(config):
    config.pluginmanager.register(Guard(config.option.told, config.option.seconds_each))


class Guard:
    def __init__(self, told, seconds_each):
        self.told, self.seconds_each = told, seconds_each

    def tell(self, what, nodeid="", why=""):
        with self.told.open("a") as file:
            file.write(f"{what}\t{nodeid}\t{why}\n")

    def pytest_collection_modifyitems(self, config, items):
        lines = self.told.read_text().splitlines() if self.told.exists() else []
        begun = {line.split("\t")[1] for line in lines}
        config.hook.pytest_deselected(items=[each for each in items if each.nodeid in begun])
        items[:] = [each for each in items if each.nodeid not in begun]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.tell("begun", item.nodeid)
        slow = item.get_closest_marker("slow") is not None
        limit_s = max(SLOW_S, self.seconds_each) if slow else self.seconds_each
        with limited(item.nodeid, limit_s):
            return (yield)

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        if report.passed and is_broken():
            report.outcome, report.longrepr = "failed", LATE
        self.tell(report.outcome, report.nodeid, why_skipped(report))
        say(f"{time.strftime('%X')} {report.outcome:7} {report.duration:6.1f} s {report.nodeid}")
        if report.failed:
            say(report.longreprtext)
            if cause := why_alone(report.longreprtext):
                say(f"{cause}: the rest has a process of its own")
                os._exit(DEAD)

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell("failed", report.nodeid, "cannot be collected")
            say(f"cannot be collected: {report.nodeid}\n{report.longreprtext}")
        if report.skipped:
            self.tell("skipped", report.nodeid or report.longrepr[0], why_skipped(report))

    def pytest_sessionfinish(self):
        self.tell("end")


def why_skipped(report):
    """Of a test, or of a whole file that says so when it is imported."""
    is_told = report.skipped and isinstance(report.longrepr, tuple)
    return report.longrepr[2].replace("\n", " ") if is_told else ""


def why_alone(failure):
    """Why no other test may run in the process of one that has failed so; None where one may."""
    if is_broken():
        return "the device refuses everything now"
    is_full = "OutOfMemoryError" in failure or "ERROR_OUT_OF_MEMORY" in failure
    return "there was no memory on the device" if is_full else None


def is_broken():
    """Whether an earlier kernel has failed; without a driver or a context there is none to lose."""
    try:
        status, *_ = driver.attempt("cuCtxSynchronize")
    except Unavailable:
        return False
    return status not in (0, NOT_INITIALIZED, INVALID_CONTEXT)
