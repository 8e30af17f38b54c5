"""`ess serve --pd`: real workers and a real router, from the start to the end of all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ess.server.commands import cli
from ess.server.commands.pd.routers import ROUTERS
from tests.pd.stand import PACED
from tests.server.harness import until
from tests.support.crowd import Crowd
from tests.support.few import few
from tests.support.kin import is_running, kin, told
from tests.support.own_python import python
from tests.support.process import READY_S, ROOT, RUN, SMALL, Process
from tests.support.routers import ask

pytestmark = pytest.mark.slow

ASKED = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 5}
LONG = {**ASKED, "max_tokens": 400, "ignore_eos": True}


class Pd(Process):
    """Ready when it greets."""

    def __init__(self, log: Path, shape: str, *flags: str, **environment: str) -> None:
        self._log = log
        with log.open("w") as lines:
            paced = () if "--engine" in flags else PACED
            words = ("--pd", shape, *paced, "--host-bytes", "192MiB", *flags)
            super().__init__(*words, stderr=lines.fileno(), **environment)
        self.pids = {line["name"]: line["pid"] for line in self.greeting["processes"]}
        self.urls = {line["name"]: line["url"] for line in self.greeting["processes"]}

    @property
    def said(self) -> str:
        return self._log.read_text()

    def _last_words(self) -> str:
        return f"it ended by {self.process.wait()}: {self.said}"

    def serves(self) -> bool:
        return ask(f"{self.url}/v1/completions", ASKED).status == 200


@contextlib.contextmanager
def served(tmp_path: Path, *flags: str, **environment: str) -> Iterator[Pd]:
    """Afterwards nothing of it is left, however it has ended."""
    with Pd(tmp_path / "log", "1p1d", *flags, **environment) as pd:
        everybody = [pd.process.pid, *kin(pd.process.pid)]
        yield pd
    until(lambda: not any(map(is_running, everybody)), "the end of everybody")


@pytest.fixture(params=ROUTERS, ids=lambda router: router.name)
def name(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param.name) is None:
        pytest.skip(f"{request.param.name} is not installed: extra `router`")
    return request.param.name


def test_it_serves_and_ends_with_all_its_processes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with served(tmp_path, "--router", name) as pd:
        assert [*pd.pids] == ["prefill-1", "decode-1", "router"]
        asked = [ask(f"{pd.url}/v1/completions", ASKED) for _ in range(6)]
        assert [answer.document["usage"]["completion_tokens"] for answer in asked] == [5] * 6
        assert cli.main(["chat", "Hi", "--url", pd.url, "--max-tokens", "5"]) == 0
        assert cli.main(["top", "--once", "--url", pd.url]) == 1
        said = capsys.readouterr()
        assert said.out.strip()
        assert "is it a router? --url is the address of a worker" in said.err
        for worker in ("prefill-1", "decode-1"):
            mode = ask(f"{pd.urls[worker]}/server_info").document["disaggregation_mode"]
            assert mode == worker.partition("-")[0]
        with Crowd(pd.url, [LONG] * 2) as going:
            until(lambda: all(b'"text"' in text for text in going.texts), "two streams")
            pd.process.send_signal(signal.SIGTERM)
            assert pd.ended(180) == 0
        assert all(b'"length"' in text and b"[DONE]" in text for text in going.texts)
    assert "Traceback" not in pd.said


def test_nothing_outlives_it(tmp_path: Path):
    with served(tmp_path) as pd:
        pd.process.kill()


def second_signal(pd: Pd) -> None:
    pd.process.send_signal(signal.SIGTERM)
    until(lambda: "draining" in pd.said, "draining")
    pd.process.send_signal(signal.SIGINT)
    assert pd.ended(180) == 0


def ctrl_c(pd: Pd) -> None:
    pd.process.send_signal(signal.SIGINT)
    assert pd.ended(180) == 0
    assert pd.said.count("ended after") == len(pd.pids) - 1, "none was killed"


@pytest.mark.parametrize(
    ("role", "ends"),
    few(
        [("prefill", second_signal), ("router", ctrl_c)],
        all_of=itertools.product(("decode", "prefill", "router"), (second_signal, ctrl_c)),
    ),
)
def test_what_is_killed_is_back_at_its_address(
    role: str, ends: Callable[[Pd], None], tmp_path: Path
):
    """Behind SIGTERM alone it would wait for probes beyond the limit of the test."""
    with served(tmp_path, "--drain-grace-s", "3600", "--drain-s", "60") as pd:
        killed = "router" if role == "router" else f"{role}-1"
        os.kill(pd.pids[killed], signal.SIGKILL)
        until(
            lambda: f"ess: {killed} is gone: its process was ended by SIGKILL" in pd.said, "a word"
        )
        until(lambda: pd.said.count(f"{killed}: ess: ready") == 2 or role == "router", "readiness")
        until(pd.serves, "service")
        assert f"ess: {killed} starts again in 0.5 s" in pd.said
        if role != "router":
            assert pd.said.count(f"ess: {killed} listens at {pd.urls[killed]}, process") == 2
            until(lambda: ask(f"{pd.urls[killed]}/ready").status == 200, "readiness")
        ends(pd)


def test_keys_hold_for_everybody_and_change_while_it_serves(tmp_path: Path):
    """In front and behind, also behind a router that was started again; no table of processes
    shows one."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")

    def statuses(url: str) -> list[int]:
        given: list[dict[str, str]] = [
            {"Authorization": f"Bearer {key}-key"} for key in ("first", "second", "third")
        ]
        return [ask(f"{url}/v1/completions", ASKED, **each).status for each in (*given, {})]

    flags = ("--api-key-file", str(keys), "--engine", "paced", "--pace-ms", "10")
    with served(tmp_path, *flags, is_real=True) as pd:
        everywhere = (pd.url, pd.urls["decode-1"])
        assert [statuses(url) for url in everywhere] == [[200, 200, 401, 401]] * 2
        assert ask(f"{pd.urls['prefill-1']}/v1/completions", ASKED).status == 401
        assert ask(f"{pd.url}/workers", Authorization="Bearer first-key").status == 401
        for pid in (pd.process.pid, *kin(pd.process.pid)):
            assert "-key" not in told(pid, "cmdline").replace("--api-key-file", "")
        with Crowd(pd.url, [{**LONG, "max_tokens": 1200}] * 2, key="second-key") as going:
            until(lambda: all(b'"text"' in text for text in going.texts), "two streams")
            (tmp_path / "fresh").write_text("second-key\nthird-key\n")
            (tmp_path / "fresh").rename(keys)
            pd.process.send_signal(signal.SIGHUP)
            changed = "api_key_file has changed: 3 keys are valid"
            until(lambda: pd.said.count(changed) == 2, "the workers' word")
            until(lambda: statuses(pd.url) == [401, 200, 200, 401], "the new keys")
            assert not any(map(going.is_over, range(2))), "streams outlast the router"
            until(lambda: all(map(going.is_over, range(2))), "their ends")
        assert all(b'"length"' in text and b"[DONE]" in text for text in going.texts)
        assert statuses(pd.urls["decode-1"]) == [401, 200, 200, 401]
        pd.process.send_signal(signal.SIGTERM)
        assert pd.ended(180) == 0


def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path):
    """The workers read their calibration; their parent does not."""
    small = [word for pair in SMALL.items() for word in pair]
    words = ("serve", "--pd", "1p1d", *PACED, *small, "--calibration", tmp_path / "none")
    ended = python("-c", RUN, *words, timeout_s=READY_S)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "prefill-1 is gone: its process ended with code 2\n    ess: " in ended.stderr


def test_the_table_and_its_example(tmp_path: Path):
    """As a person sees it; the example is one that works."""
    small = [word for pair in SMALL.items() for word in pair]
    words = [sys.executable, "-c", RUN, "serve", "--pd", "1p1d", *PACED, *small]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            words,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        assert process.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("curl ")):
            lines.append(process.stdout.readline())
            assert lines[-1], (tmp_path / "log").read_text()
        assert [line.split()[0] for line in lines[:3]] == ["prefill-1", "decode-1", "router"]
        answer = subprocess.run(lines[-1], shell=True, capture_output=True, text=True, check=True)
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 16
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0
    finally:
        process.kill()
        process.communicate()
