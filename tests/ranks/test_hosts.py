"""`ess serve --dp-size 4 --nnodes 4` on as many hosts: network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ess.models.load import load_model
from tests.house.tree import ROOT
from tests.ranks.test_placing import GOOD
from tests.ranks.test_serve import COUNT, PROMPT
from tests.server.harness import until
from tests.support.few import few
from tests.support.greedy import greedy
from tests.support.hosts import Hosts, hosts
from tests.support.kin import children
from tests.support.process import Process

pytestmark = pytest.mark.slow

COPIES = 4


@dataclass(frozen=True)
class Launcher:
    """`ess serve` on one host, and the file that has its log."""

    process: Process
    log: Path

    @property
    def url(self) -> str:
        return self.process.url

    @property
    def server(self) -> int:
        """The rank that it keeps, at the moment: the child that has children."""
        [kept] = [child for child in children(self.process.process.pid) if children(child)]
        return kept

    def said(self, pattern: str) -> bool:
        return re.search(pattern, self.log.read_text(), re.MULTILINE) is not None


@contextlib.contextmanager
def launched(net: Hosts, folder: Path, count: int) -> Iterator[list[Launcher]]:
    """All are started at once, for each waits for the others. Host 0 alone has the loads."""
    secret, loads = folder / "secret", folder / "loads.json"
    secret.write_text("the secret of all hosts")
    layers = {str(layer): [900, 1, 1, 1, 1, 400, 1, 1] for layer in (1, 2)}
    loads.write_bytes(msgspec.json.encode({**GOOD, "layers": layers}))

    def launch(host: int) -> Launcher:
        log = folder / f"log-{host}"
        flags = {
            "--dp-size": f"{count}",
            "--nnodes": f"{count}",
            "--node-rank": f"{host}",
            "--dist-init-addr": f"{net.address(0)}:29600",
            "--peer-secret-file": f"{secret}",
            "--host": net.address(host),
            "--port": "8000",
            "--dtype": "f32",
            "--row": "f32",
            "--recover": "resume",
            "--redundant-experts": f"{COPIES}",
            **({"--expert-load": f"{loads}"} if host == 0 else {}),
        }
        words = [word for pair in flags.items() for word in pair]
        with log.open("w") as lines:
            process = Process(*words, "--without-key", before=net.on(host), stderr=lines.fileno())
        return Launcher(stack.enter_context(process), log)

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        yield list(pool.map(launch, range(count)))


def asked(net: Hosts, host: int, urls: list[str]) -> list[list[int]]:
    """By a client on this host, all at once, when all are ready."""
    words = [str(COUNT), ",".join(map(str, PROMPT)), *urls]
    done = subprocess.run(
        [*net.on(host), sys.executable, "-m", "tests.ranks.asker", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", few([2], all_of=[2, 4]))
def test_hosts_answer_as_one_process_and_go_on_behind_a_lost_rank(tmp_path, count):
    """With copies of experts. A rank is killed: all others say which is lost, the launcher of its
    host starts it again, and all answer as before."""
    expected = [greedy(load_model(form="f32"), PROMPT, COUNT)] * count
    with hosts(count) as net, launched(net, tmp_path, count) as launchers:
        urls = [launcher.url for launcher in launchers]
        assert urls == [f"http://{net.address(host)}:8000" for host in range(count)]
        assert asked(net, count - 1, urls) == expected
        lost = count // 2
        victim = launchers[lost].server
        os.kill(victim, signal.SIGKILL)
        for host in {*range(count)} - {lost}:
            # Its sockets say so at once: three seconds later its beats would be missed.
            said = rf"^\S+ rank-{host}: .*LinkLost.*is lost: (?!no beat)"
            until(lambda said=said, host=host: launchers[host].said(said), said)
        until(
            lambda: launchers[lost].said(
                rf"^\S+ ess: rank-{lost} is gone: its process was ended by SIGKILL"
            ),
            "its end",
        )
        assert asked(net, 0, urls) == expected
        assert launchers[lost].server != victim
