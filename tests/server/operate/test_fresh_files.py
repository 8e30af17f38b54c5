"""Files that a server reads again while it runs: keys, and at once if told to by SIGHUP."""

from __future__ import annotations

import asyncio
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ess.server.commands.start.http_config import uvicorn_config
from ess.server.commands.start.settings import resolve
from ess.server.http.auth_limits import Keys
from tests.server.harness import PacedEngine, Served, saying, until
from tests.server.test_fronts import all_are_ready, fronts
from tests.support.process import Process


@pytest.fixture(autouse=True)
def hangups_count() -> Iterator[None]:
    """Also where these tests run under nohup, which children would inherit."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def status(url: str, key: str) -> int:
    asked = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def written(path: Path, text: str) -> None:
    fresh = path.with_suffix(".fresh")
    fresh.write_text(text)
    os.replace(fresh, path)


def test_keys_that_change_are_used_and_wrong_ones_are_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "keys"
    written(path, "one\n")
    settings = resolve({"api_key_file": str(path)}, environment={}).settings
    with Served(PacedEngine(saying("one"))) as served:
        config = uvicorn_config(settings, served.service)
    keys = config.app.state.keys
    assert isinstance(keys, Keys)
    look = config.callback_notify
    assert look is not None

    def known() -> list[bool]:
        asyncio.run(look())
        return [keys.has(key) for key in (b"one", b"two", b"three", b"")]

    assert known() == [True, False, False, False]
    for wrong in ("", " \n,\n", "thr\u00e9e", "a key"):
        written(path, wrong)
        assert known() == [True, False, False, False], wrong
        assert "api_key_file has changed and is not used: api_key" in capsys.readouterr().err
    path.unlink()
    assert known() == [True, False, False, False]
    written(path, "two\nthree\n")
    assert known() == [False, True, True, False]
    said = capsys.readouterr().err
    assert said.endswith("ess: api_key_file has changed: 2 keys are valid\n")
    assert "three" not in said
    stamp = path.stat()
    path.write_text("one\ntwo\nthree\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert known() == [True, True, True, False], "within a tick of the file system's clock"
    written(path, "one")
    with Served(PacedEngine(saying("one"))) as served:
        late = uvicorn_config(settings, served.service).app.state.keys
        assert late.has(b"one"), "a process that starts later has the keys of its time"
    assert known() == [True, False, False, False]


@pytest.mark.slow
def test_sighup_has_every_process_read_the_keys_and_ends_none(tmp_path: Path):
    path = tmp_path / "keys"
    written(path, "old\n")
    flags = ("--engine", "paced", "--api-key-file", str(path), "--server-processes", "2")
    with Process(*flags).wait_ready() as process:
        all_are_ready(process)
        stream = process.stream(extra_headers={"Authorization": "Bearer old"})
        next(stream)
        written(path, "new\n")
        pids = fronts(process)
        for pid in (*pids, process.engine_pid, process.process.pid):  # as systemd may
            os.kill(pid, signal.SIGHUP)
        until(lambda: {status(process.url, "new") for _ in range(20)} == {200}, "the new key")
        assert {status(process.url, "old") for _ in range(20)} == {401}
        assert next(stream), "what runs goes on"
        assert fronts(process) == pids != []
        process.process.send_signal(signal.SIGTERM)
        assert process.ended(60) == 0


@pytest.mark.slow
def test_sighup_on_a_terminal_ends_the_server_as_ctrl_c_does():
    """A closed terminal must leave no server behind."""
    ours, theirs = os.openpty()
    with Process("--engine", "paced", "--drain-s", "1", stdin=theirs).wait_ready() as process:
        stream = process.stream()
        next(stream)
        process.process.send_signal(signal.SIGHUP)
        assert process.ended(60) == 0
    os.close(ours)
    os.close(theirs)
