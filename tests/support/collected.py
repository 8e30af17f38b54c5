"""Workers of a run of tests as forks of one process that has collected the tests: eight seconds of
imports are made once, and not by each worker. A worker collects again, which takes one second, and
does all else as one that xdist has started itself.

The process that tests are forked from collects what the run was asked for; its own results are of
no use. pytest leaves a module whose import failed where imports look first: it is forgotten here,
so that its import fails again in each worker, which reports it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import forked

ASKED = "COLLECTED_TESTS"


def fork_workers(asked: Sequence[str]) -> None:
    """Those that execnet starts in this process from here on."""
    from execnet.gateway_base import ThreadExecModel

    forked.AT_IMPORTS["tests"] = {ASKED: json.dumps([*asked])}
    ThreadExecModel.subprocess = SimpleNamespace(PIPE=subprocess.PIPE, Popen=_worker)


def _worker(command: Sequence[str], **given: Any) -> forked.Forked:
    words = [sys.executable, *command[-2:]]
    return forked.Forked(words, kind="tests", cwd=os.getcwd(), env=dict(os.environ), **given)


class Forgets:
    """Forgets the modules of files and folders that could not be collected."""

    def pytest_exception_interact(self, node: pytest.Collector) -> None:
        for name, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if file is not None and Path(file).is_relative_to(node.path):
                del sys.modules[name]


def collect(asked: Sequence[str]) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        pytest.main(["--collect-only", "-n0", *asked], plugins=[Forgets()])
    gc.unfreeze()
    gc.collect()


if ASKED in os.environ:
    collect(json.loads(os.environ[ASKED]))
