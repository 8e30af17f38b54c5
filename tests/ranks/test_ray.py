"""`ess serve --dp-size 2 --executor ray`, where Ray is installed: from its start to its end."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ess.errors import BadInput
from ess.models.load import load_model
from ess.server.commands.ranks import on_ray
from ess.server.commands.start.settings import resolve
from tests.house.tree import ROOT
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.server.harness import until
from tests.support.greedy import greedy
from tests.support.kin import children, is_running, kin
from tests.support.process import Process
from tests.support.routers import ask

RAY = importlib.util.find_spec("ray")
FLAGS = ("--dp-size", "2", "--executor", "ray", "--dtype", "f32", "--row", "f32", "--mtp", "2")


def served_on_ray(log: int, *flags: str) -> Process:
    assert RAY is not None
    assert RAY.origin is not None
    path = os.pathsep.join([str(ROOT), str(Path(RAY.origin).parents[1])])
    return Process(*FLAGS, *flags, stderr=log, PYTHONPATH=path, RAY_ADDRESS="local")


@pytest.mark.slow
@pytest.mark.skipif(RAY is None, reason="ray is not installed: ess[ray]")
def test_ray_starts_the_ranks_and_one_that_is_killed_again(tmp_path):
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    with (tmp_path / "log").open("w") as log, served_on_ray(log.fileno()) as process:
        lines = process.greeting["processes"]
        urls = [line["url"] for line in lines]
        for url in urls:
            assert list(tokens(url)) == expected
        os.kill(lines[1]["pid"], signal.SIGKILL)
        until(lambda: ask(f"{urls[0]}/ready").status == 503, "the other's not being ready")
        until(lambda: all(ask(f"{url}/ready").status == 200 for url in urls), "both")
        for url in urls:
            assert list(tokens(url)) == expected
        everybody = [process.process.pid, *kin(process.process.pid)]
        process.process.terminate()
        assert process.ended(120) == 0
        until(lambda: not any(map(is_running, everybody)), "the end of everybody")


@pytest.mark.slow
@pytest.mark.skipif(RAY is None, reason="ray is not installed: ess[ray]")
def test_an_actor_that_is_killed_comes_back_with_its_server(tmp_path):
    with (tmp_path / "log").open("w") as log, served_on_ray(log.fileno()) as process:
        line = process.greeting["processes"][0]
        below = kin(process.process.pid)
        [actor] = [pid for pid in below if line["pid"] in children(pid)]
        os.kill(actor, signal.SIGKILL)
        until(lambda: not is_running(line["pid"]), "the end of its server")
        until(lambda: ask(f"{line['url']}/ready").status == 200, "its server again")
        assert actor not in kin(process.process.pid)
        process.process.terminate()
        assert process.ended(120) == 0


@pytest.mark.slow
@pytest.mark.skipif(RAY is None, reason="ray is not installed: ess[ray]")
def test_a_rank_that_cannot_start_is_not_started_again():
    with pytest.raises(AssertionError, match="its server ended with code 2") as caught:
        served_on_ray(subprocess.PIPE, "--model", "/never/there")
    assert "'/never/there' is not a folder" in str(caught.value)


def test_the_log_of_the_driver_is_records_too(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def run(crew: on_ray.RayCrew, *, json: bool) -> int:
        os.write(2, b"ess: all ranks are ready\n")
        return 0

    stub = SimpleNamespace(init=lambda **told: None, shutdown=lambda: None)
    monkeypatch.setitem(sys.modules, "ray", stub)
    monkeypatch.setattr(on_ray.RayCrew, "run", run)
    given = {"dp_size": 2, "executor": "ray", "host_bytes": "1GiB", "log_format": "json"}
    assert on_ray.serve_on_ray(resolve(given, environment={}), json=False) == 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "ranks" in line]
    assert json.loads(line)["message"] == "all ranks are ready"


def test_what_ray_decides_is_not_told_to_it():
    given = {"dp_size": 2, "executor": "ray", "host_bytes": "1GiB"}
    assert resolve(given, environment={}).settings.executor == "ray"
    assert resolve({"executor": "mp"}, environment={}).settings.executor == "processes"
    for changed, why in (
        ({"nnodes": 2, "dist_init_addr": "127.0.0.1:5"}, "leave out nnodes"),
        ({"dp_rank": 0, "dist_init_addr": "127.0.0.1:5"}, "which starts all ranks"),
        ({"dp_size": 1}, "which starts all ranks"),
        ({"host_bytes": "auto"}, "host_bytes is auto"),
        ({"device": "cuda"}, "executor is ray, and device is cuda"),
    ):
        with pytest.raises(BadInput, match=why):
            resolve({**given, **changed}, environment={})
