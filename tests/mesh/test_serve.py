"""`ess serve --tp-size 2 --pp-size 2`: one server whose engine is four processes."""

from __future__ import annotations

import os
import signal

import pytest

from ess.models.load import load_model
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.server.harness import until
from tests.support.greedy import greedy
from tests.support.kin import is_running, kin, told
from tests.support.process import Process

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", "f32", "--row", "f32", "--recover", "resume")


def engines(process: Process) -> list[int]:
    return [pid for pid in kin(process.process.pid) if "mesh.process" in told(pid, "cmdline")]


@pytest.mark.parametrize(("tp", "pp", "mtp", "victim"), [(2, 1, 2, 1), (1, 2, 4, 0), (2, 2, 1, 3)])
def test_one_text_from_several_processes_and_again_when_one_is_killed(tp, pp, mtp, victim):
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    size = ("--tp-size", str(tp), "--pp-size", str(pp), "--mtp", str(mtp))
    with Process(*FLAGS, *size).wait_ready() as process:
        assert list(tokens(process.url)) == expected
        before = sorted(engines(process))
        assert len(before) == tp * pp
        going = tokens(process.url)
        first = [next(going), next(going)]
        os.kill(before[victim], signal.SIGKILL)
        assert [*first, *going] == expected
        assert not {*before} & {*engines(process)}, "a process has outlived its engine"
        everybody = [process.process.pid, *kin(process.process.pid)]
        process.process.terminate()
        assert process.ended(120) == 0
        until(lambda: not any(map(is_running, everybody)), "the end of everybody")
