"""A Unix socket: for one user, replaced when stale, gone when the server is."""

from __future__ import annotations

import http.client
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from ess.errors import BadInput, Unavailable
from ess.server.commands.start.settings import resolve
from ess.server.process.listening import sockets
from tests.support.process import READY_S, ROOT, RUN, Process


def status_at(path: Path, asked: str) -> int:
    with socket.socket(socket.AF_UNIX) as made:
        made.settimeout(10)
        made.connect(str(path))
        connection = http.client.HTTPConnection("here")
        connection.sock = made
        connection.request("GET", asked)
        return connection.getresponse().status


def test_only_its_user_may_connect(tmp_path: Path):
    path = tmp_path / "ess.sock"
    [listener] = sockets.listen_at(path)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    sockets.close([listener], str(path))
    assert not path.exists()


def test_a_dead_server_s_socket_is_replaced_and_a_living_one_s_is_not(tmp_path: Path):
    path = tmp_path / "ess.sock"
    sockets.listen_at(path)[0].close()
    assert path.is_socket()
    [listener] = sockets.listen_at(path)
    with pytest.raises(Unavailable, match=rf"cannot listen on {path}: Address already in use"):
        sockets.listen_at(path)
    assert path.is_socket()
    sockets.close([listener], str(path))


def test_what_is_no_socket_is_left_alone(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(Unavailable, match="Address already in use"):
        sockets.listen_at(path)
    assert path.read_text() == "mine"
    with pytest.raises(Unavailable, match="no-folder"):
        sockets.listen_at(tmp_path / "no-folder" / "ess.sock")


@pytest.mark.parametrize("given", ["llm", "/llm/", "/"])
def test_a_root_path_is_a_prefix(given: str):
    with pytest.raises(BadInput, match="root_path is"):
        resolve({"root_path": given}, environment={})


@pytest.mark.slow
def test_a_server_on_a_unix_socket_under_a_prefix(tmp_path: Path):
    path = tmp_path / "ess.sock"
    given = ("--engine", "paced", "--uds", str(path), "--root-path", "/llm")
    with Process(*given, "--drain-grace-s", "0") as process:
        assert process.url == f"http+unix://{quote(str(path), safe='')}/llm"
        deadline_s = time.monotonic() + READY_S
        while status_at(path, "/ready") != 200:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert status_at(path, "/llm/health") == status_at(path, "/health") == 200
        second = [sys.executable, "-c", RUN, "serve", "--json", *given]
        refused = subprocess.run(second, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert refused.returncode != 0
        assert f"cannot listen on {path}: Address already in use" in refused.stderr
        process.process.send_signal(signal.SIGTERM)
        assert process.ended(30) == 0
        assert not path.exists()
