"""`ess serve --pp-size 2 --tp-size 2 --nnodes 2`: one engine on two machines."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from ess.engine.process.lifeline import LEAVE
from ess.models.load import load_model
from tests.mesh.test_serve import POOL
from tests.ranks.test_serve import streamed
from tests.server.harness import until
from tests.support.forked import STANDING, Nursery
from tests.support.greedy import greedy
from tests.support.kin import is_running, kill_all, kin, told, worker_of
from tests.support.machines import Machine, two_machines
from tests.support.process import READY_S, ROOT, RUN, SMALL
from tests.support.standing_for import NURSERY

pytestmark = pytest.mark.slow

PROMPT = [5 + 7 * at % 90 for at in range(70)]
COUNT = 24
PORT = 29500
FLAGS = ("--dtype", "f32", "--row", "f32", "--recover", "resume", "--mtp", "2", "--nnodes", "2")
ASKED = {
    "model": "ess-embedded",
    "prompt": PROMPT,
    "max_tokens": COUNT,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}


class Connection(http.client.HTTPConnection):
    """To a server at a path: it is reached from every network."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=120)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(120)
        self.sock.connect(str(self._path))


def is_ready(path: Path) -> bool:
    try:
        with contextlib.closing(Connection(path)) as connection:
            connection.request("GET", "/ready")
            return connection.getresponse().status == 200
    except OSError:
        return False


def tokens(path: Path) -> Iterator[int]:
    """Of a streamed answer, as they come."""
    with contextlib.closing(Connection(path)) as connection:
        words = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(ASKED), words)
        yield from streamed(connection.getresponse())


@contextlib.contextmanager
def engines_forked(machine: Machine, folder: Path) -> Iterator[dict[str, str]]:
    """Variables for a server there. The imports of its engines' processes are made once, for those
    of the next engine too."""
    path = folder / machine.name
    made = Nursery("engine", before=machine.words(), path=str(path))
    with contextlib.closing(made):
        yield {"PYTHONPATH": STANDING, NURSERY.format("engine"): made.address}


@contextlib.contextmanager
def node(
    machine: Machine, *flags: str, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    small = [word for name, value in SMALL.items() if name != "--port" for word in (name, value)]
    words = [sys.executable, "-c", RUN, "serve", *small, *FLAGS, *flags]
    secret = "a secret of the tests, shared"
    told = {**os.environ, **environment, "ESS_PEER_SECRET": secret}
    process = subprocess.Popen(machine.words(*words), cwd=ROOT, env=told, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        everybody = [process.pid, *kin(process.pid)]
        try:
            process.terminate()
            process.wait(60)
            until(lambda: not any(map(is_running, everybody)), "the end of everybody")
        finally:
            kill_all(filter(is_running, everybody))


def engines(process: subprocess.Popen[bytes]) -> list[int]:
    everybody = [process.pid, *kin(process.pid)]
    return sorted(pid for pid in everybody if "mesh.process" in told(pid, "cmdline"))


def pools(pids: list[int]) -> set[str]:
    """Inodes of what they have mapped."""
    texts = [told(worker_of(pid), "maps") for pid in pids]
    lines = [line.split() for text in texts for line in text.splitlines()]
    return {words[4] for words in lines if POOL in words[5:6]}


def test_the_tokens_of_one_process_also_of_a_stream_when_a_machine_loses_a_process(tmp_path):
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    path = tmp_path / "http"
    with two_machines() as (first, second):
        shape = ("--tp-size", "2", "--pp-size", "2", "--dist-init-addr", f"{first.address}:{PORT}")
        with (
            engines_forked(first, tmp_path) as here_forked,
            engines_forked(second, tmp_path) as there_forked,
            node(second, *shape, "--node-rank", "1", environment=there_forked) as other,
            node(first, *shape, "--uds", str(path), environment=here_forked) as server,
        ):
            until(lambda: is_ready(path), "readiness", within_s=READY_S)
            assert [*tokens(path)] == expected
            here, there = engines(server), engines(other)
            assert len(here) == len(there) == 2
            assert len(pools(here)) == len(pools(there)) == 1
            assert not pools(here) & pools(there), "a pool on two machines"
            going = tokens(path)
            first_two = [next(going), next(going)]
            os.kill(worker_of(there[1]), signal.SIGKILL)
            assert [*first_two, *going] == expected
            assert not {*here} & {*engines(server)}, "a process has outlived its engine"
            until(lambda: is_ready(path), "readiness")
            there = engines(other)
            for process in there:  # as a node does that is to end while the server drains
                os.kill(worker_of(process), LEAVE)
            assert [*tokens(path)] == expected
            assert engines(other) == there
