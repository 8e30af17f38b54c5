"""Workers of a run of tests as forks of one process that has collected the tests: eight seconds of
imports are made once, and not by each worker. A worker collects again, which takes one second, and
does all else as one that xdist has started itself.

The process that tests are forked from collects what the run was asked for; its own results are of
no use. pytest leaves a module whose import ended early where imports look first, and a second
import may end otherwise than the first. So modules that skip themselves are forgotten, and where
something fails the process begins anew and collects nothing: its workers import for themselves."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import forked

ASKED = "COLLECTED_TESTS"
PR_SET_THP_DISABLE = 41


def fork_workers(asked: Sequence[str]) -> None:
    """Those that execnet starts in this process from here on."""
    from execnet.gateway_base import ThreadExecModel

    take_small_pages()
    forked.AT_IMPORTS["tests"] = {ASKED: json.dumps([os.getcwd(), *asked])}
    ThreadExecModel.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_worker)


def take_small_pages() -> None:
    """This process and all that it starts get no huge pages from Linux, whatever they ask for:
    pools of tests are large and hold little, and of a huge page the kernel fills all 2 MiB. Tests
    without workers (`pytest -n 0`, `make test-gpu`) do get them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def _worker(command: Sequence[str], **given: Any) -> forked.Forked:
    words = [sys.executable, *command[-2:]]
    return forked.Forked(words, kind="tests", cwd=os.getcwd(), env=dict(os.environ), **given)


class Forgets:
    """Forgets modules that skip themselves."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if report.skipped:
            for name, module in [*sys.modules.items()]:
                if getattr(module, "__file__", None) == str(collector.path):
                    del sys.modules[name]
        return report


def collect(folder: str, asked: Sequence[str]) -> None:
    """As a run from `folder` does."""
    silent = contextlib.redirect_stdout
    with open(os.devnull, "w") as nowhere, silent(nowhere), contextlib.chdir(folder):
        ended = pytest.main(["--collect-only", "-n0", *asked], plugins=[Forgets()])
    if ended not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        del os.environ[ASKED]
        os.execv(sys.executable, sys.orig_argv)
    gc.unfreeze()
    gc.collect()


if ASKED in os.environ:
    where, *what = json.loads(os.environ[ASKED])
    collect(where, what)
