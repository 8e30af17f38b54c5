"""A prefill worker of several processes, as its server starts, watches and shows them. The paced
engine stands in for the stages: what they compute is tested elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ess.engine.process.messages import Launch, StageLine, Status
from ess.errors import BadInput
from ess.server.commands import cli
from ess.server.commands.start.settings import resolve
from ess.server.commands.start.topology import (
    HUGE_PAGES,
    environment_of,
    launches_of,
    ranks_here,
)
from ess.server.commands.start.torchrun import cleaned, placed_by_torchrun
from tests.pd.pairs import SECRET
from tests.server.harness import PacedEngine, Served, counting, until
from tests.server.test_dashboard import metrics
from tests.server.test_succession import answered
from tests.support.kin import commands, is_running, worker_of
from tests.support.process import ROOT, RUN, Process

PREFILL = {"role": "prefill", "peer_secret": SECRET}
NODES = {**PREFILL, "pp_size": 4, "nnodes": 2, "dist_init_addr": "10.0.0.1:9", "host_bytes": "1GiB"}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
OF_RANK = {**TORCHRUN, "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}
GIVES = {"do_remote_decode": True, "do_remote_prefill": False}
LEG = json.dumps(
    {
        "prompt": "The server is",
        "max_tokens": 3,
        "kv_transfer_params": GIVES,
    }
).encode()
HERE = "10.0.0.1:9"
PACED = ("--engine", "paced", "--pace-ms", "20")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({**NODES, "role": "decode"}, "nnodes is 2, and role is decode: rows that are handed over"),
        ({**NODES, "role": "both", "peer_secret": ""}, "10.0.0.1:9, which other machines reach"),
        ({"pp_size": 2, "dp_size": 2}, "dp_size is 2, and tp_size is 1, pp_size 2: the experts"),
        ({"tp_size": 2, "cp_size": 2}, "cp_size is 2, and tp_size is 2, pp_size 1: only prefill"),
        ({"cp_size": 2}, "cp_size is 2, and tp_size is 1"),
        ({"cp_size": 3, "role": "decode"}, "cp_size is 3, and tp_size is 1, pp_size 1: only"),
        ({**PREFILL, "tp_size": 2, "cp_size": 4}, "tp_size is 2 and cp_size is 4"),
        ({**PREFILL, "pp_layer_partition": "3,3"}, "'3,3', and pp_size is 1: one stage"),
        ({**NODES, "nnodes": 3}, "nnodes is 3: 4 processes .pp_size 4 x 1 of a stage. do not"),
        ({**NODES, "pp_size": 1, "tp_size": 4}, "the 4 processes of a stage would be on several"),
        ({**NODES, "node_rank": 2}, "node_rank is 2, must be 0 to 1 for 2 nodes"),
        ({**NODES, "dist_init_addr": ""}, "dist_init_addr is missing: 2 nodes must know"),
        ({**NODES, "dist_init_addr": "here"}, "dist_init_addr is 'here', must be HOST:PORT"),
        ({**NODES, "transport": "shared"}, "transport is 'shared', which is for one machine"),
        ({**NODES, "host_bytes": "auto"}, "host_bytes is auto, which each process would work out"),
        ({**NODES, "slot_bytes": "5%"}, "slot_bytes is 5%, which each process"),
        ({**PREFILL, "smooth": 1.5}, "smooth is 1.5, must be 0..1"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(given: dict, says: str):
    with pytest.raises(BadInput, match=says):
        resolve(given, environment={})


@pytest.mark.parametrize(
    "words",
    [
        *(["--modes", "none"], ["--calibration", "costs.json"], ["--tbo", "auto"]),
        *(["--sbo", "combine-down"], ["--mtp-auto"], ["--depth", "1"], ["--promise", "some"]),
        *(["--budget-every", "0"], ["--no-warm"], ["--verify-every", "5"]),
        *(["--tpot-ms", "20", "--pp-size", "2"], ["--tpot-ms", "20", "--dynamic-chunking"]),
    ],
    ids=" ".join,
)
def test_a_flag_of_steps_that_decode_is_refused(words: list[str], monkeypatch, capsys):
    monkeypatch.setenv("ESS_PEER_SECRET", SECRET)
    assert cli.main(["prefill", *words]) == 2
    name = words[0].removeprefix("--no-").removeprefix("--").replace("-", "_")
    assert f"{name} has no effect on " in capsys.readouterr().err


def test_a_file_may_be_that_of_workers_of_every_role(tmp_path: Path):
    config = tmp_path / "serve.json"
    config.write_text(json.dumps({"tbo": "auto", "modes": "none"}))
    resolve({**PREFILL, "tpot_ms": 20.0}, config=config, environment={"ESS_DEPTH": "1"})


def test_ranks_are_divided_over_nodes_and_each_start_is_another_generation():
    launch = Launch(model="m", config=None, length_max=2, slot_bytes=1, host_bytes=1, index_bytes=1)
    layers = ((0, 2), (2, 4), (4, 6), (6, 7))
    alone = resolve({**PREFILL, "pp_size": 4, "tp_size": 2}, environment={}).settings
    assert ranks_here(alone) == range(8)
    first, second = (launches_of(alone, launch, layers, number, HERE) for number in (0, 1))
    assert [told.rank.rank for told in first] == [*range(8)]
    assert {(told.rank.size, told.rank.team, told.rank.generation) for told in first} == {(8, 2, 0)}
    assert {told.rank.generation for told in second} == {1}
    assert {told.rank.init for told in first} == {f"tcp://{HERE}"}
    assert first[0].rank.layers == layers
    for node, expected in ((0, [0, 1]), (1, [2, 3])):
        settings = resolve({**NODES, "node_rank": node}, environment={}).settings
        ranks = [told.rank for told in launches_of(settings, launch, layers, 5, HERE)]
        assert [rank.rank for rank in ranks] == expected
        assert {(rank.init, rank.generation) for rank in ranks} == {(f"tcp://{HERE}", 0)}


def test_torchrun_says_which_rank_this_is():
    given = {**PREFILL, "pp_size": 4, "host_bytes": "1GiB"}
    settings = resolve(given, environment=TORCHRUN).settings
    assert (settings.nnodes, settings.node_rank) == (2, 1)
    assert settings.dist_init_addr == "10.0.0.1:29501"
    assert ranks_here(settings) == range(2, 3)
    assert ranks_here(resolve({}, environment=TORCHRUN).settings) == range(1)
    shared = {"dp_size": 4, "port": 9000}
    with pytest.raises(BadInput, match="but dp_size is 2"):
        resolve({**shared, "dp_size": 2}, environment=OF_RANK)
    with pytest.raises(BadInput, match="dp_rank is 1: leave it out, since torchrun"):
        resolve({**shared, "dp_rank": 1}, environment=OF_RANK)
    of_rank = resolve(shared, environment=OF_RANK).settings
    assert (of_rank.dp_rank, of_rank.port, of_rank.dist_init_addr) == (2, 9001, "127.0.0.1:29501")
    there = resolve({**shared, "device": "cuda"}, environment=OF_RANK).settings
    assert (there.device, there.backend) == ("cuda:1", "cuda")
    given = resolve({**shared, "device": "cuda:5"}, environment=OF_RANK).settings
    assert given.device == "cuda:5"
    assert cleaned({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "HOME": "x"}) == {
        "HOME": "x"
    }


def test_engines_on_a_cpu_ask_for_huge_pages():
    ours = {**TORCHRUN, "HOME": "x"}
    assert environment_of("cpu", ours) == {**HUGE_PAGES, "HOME": "x"}
    assert environment_of("cuda:1", ours) == {"HOME": "x"}
    own = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    assert environment_of("cpu", own) == own


IS_HUGE = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
at, is_here = libc.malloc(64 << 20), False
for line in open("/proc/self/smaps"):
    first, *words = line.split()
    if not first.endswith(":"):
        low, high = (int(end, 16) for end in first.split("-"))
        is_here = low <= at < high
    elif is_here and first == "VmFlags:":
        print("hg" in words)
"""
HAS_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HAS_HUGE.exists() or "[madvise]" not in HAS_HUGE.read_text(),
    reason="the system does not leave huge pages to those who ask",
)
@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or [int(part) for part in platform.libc_ver()[1].split(".")] < [2, 35],
    reason="the C library does not ask for huge pages",
)
@pytest.mark.parametrize(("device", "is_huge"), [("cpu", "True"), ("cuda", "False")])
def test_the_c_library_asks_for_huge_pages_where_engines_say_so(device, is_huge):
    there = environment_of(device, {"PATH": "/usr/bin"})
    told = subprocess.run(
        [sys.executable, "-c", IS_HUGE], env=there, check=True, capture_output=True
    )
    assert told.stdout.decode().strip() == is_huge


@pytest.mark.parametrize(
    ("environment", "given", "says"),
    [
        ({}, {"pp_size": 2}, "torchrun starts 4 processes .WORLD_SIZE., but pp_size 2 x .* is 2"),
        ({}, {"pp_size": 4, "nnodes": 2}, "nnodes is 2: leave it out, since torchrun says where"),
        ({"RANK": "x"}, {"pp_size": 4}, "RANK is 'x' in the environment, must be a number"),
        ({"RANK": "4"}, {"pp_size": 4}, "RANK is 4 and LOCAL_WORLD_SIZE 2 of 4 processes"),
    ],
)
def test_what_torchrun_says_must_fit(environment: Mapping[str, str], given: dict, says: str):
    with pytest.raises(BadInput, match=says):
        placed_by_torchrun({**TORCHRUN, **environment}, {**PREFILL, **given})


def test_a_partition_and_chunks_of_sglang_are_understood():
    environment = {
        "SGLANG_PP_LAYER_PARTITION": "3,4",
        "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR": "0.5",
    }
    settled = resolve({**PREFILL, "pp_size": 2}, environment=environment)
    assert (settled.settings.pp_layer_partition, settled.settings.smooth) == ("3,4", 0.5)
    assert settled.notes == ()


SAID = Status(stages=(StageLine(0, (0, 4), 0.5, 9, 0.25), StageLine(1, (4, 7), 0.75, 8, 0.5)))


def test_stages_are_in_loads_metrics_and_frames():
    with Served(PacedEngine(counting(1), status=SAID)) as served:
        until(lambda: served.service.board.status.stages, "a status")
        with urllib.request.urlopen(served.url + "/v1/loads") as answer:
            [load] = json.load(answer)["loads"]
        assert load["stages"][1] == {
            "stage": 1,
            "first_layer": 4,
            "last_layer": 6,
            "busy_share": 0.75,
            "chunks": 8,
            "heard_s": 0.5,
        }
        shown = metrics(served.url)
        assert shown["ess_stage_busy_share", "1"] == 0.75
        assert shown["ess_stage_chunks_total", "0"] == 9
        assert shown["ess_stage_silent_seconds", "0"] == 0.25


def test_top_has_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]):
    with Served(PacedEngine(counting(1), status=SAID)) as served:
        until(lambda: served.service.board.status.stages, "a status")
        assert cli.main(["top", "--url", served.url, "--once"]) == 0
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "50% busy" in lines["stage 0"]
    assert "layers 4 to 6, 8 chunks, heard 0.5 s ago" in lines["stage 1"]


def test_health_names_the_stages_that_have_not_come():
    engine = PacedEngine(counting(1), says_ready=False, status=Status(stages=SAID.stages[:1]))
    with Served(engine) as served:
        served.service.layers = ((0, 4), (4, 7))
        until(lambda: served.service.board.status.stages, "a status")
        with urllib.request.urlopen(served.url + "/health") as answer:
            assert json.load(answer) == {
                "status": "starting",
                "missing": ["stage 1 (layers 4 to 6)"],
            }
        with pytest.raises(urllib.error.HTTPError, match="503") as failed:
            urllib.request.urlopen(served.url + "/ready")
        assert b"; missing: stage 1 (layers 4 to 6)" in failed.value.read()


def prefill(*flags: str, **given: Any) -> Process:
    return Process(*PACED, *flags, command="prefill", ESS_PEER_SECRET=SECRET, **given)


def load_of(process: Process) -> dict:
    [load] = answered(process, "/v1/loads")[2]["loads"]
    return load


def stages(process: Process) -> list[int]:
    return sorted(
        pid for pid, words in commands(process.process.pid).items() if "ess.engine.process" in words
    )


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_stage_that_is_killed_is_named_and_all_are_started_again(victim: int):
    """While a prompt is under way, which the first stage, stopped, never ends."""
    stopped = prefill("--pp-size", "3", has_real_children=True)
    with stopped.wait_ready() as process, ThreadPoolExecutor() as beside:
        first = stages(process)
        assert len(first) == 3
        os.kill(first[0], signal.SIGSTOP)
        asked = beside.submit(answered, process, "/v1/completions", LEG)
        until(lambda: load_of(process)["num_total_reqs"] == 1, "the request")
        os.kill(first[victim], signal.SIGKILL)
        status, headers, document = asked.result(60)
        assert (status, headers["retry-after"]) == (503, "5")
        name = rf"stage {victim} \(layers \d to \d\) is lost: its process was ended by SIGKILL"
        assert re.search(name, document["error"]["message"])
        until(lambda: not any(map(is_running, first)), "the end of all stages")
        until(lambda: len(stages(process)) == 3, "three others")
        process.wait_ready()
        until(lambda: len(load_of(process)["stages"]) == 3, "a status")
        assert answered(process, "/v1/completions", LEG)[0] == 200
        assert process.status("/health") == 200
        process.process.terminate()
        assert process.ended(30) == 0


@contextlib.contextmanager
def started(*flags: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Without HTTP."""
    made = subprocess.Popen(
        [sys.executable, "-c", RUN, "prefill", *PACED, "--max-model-len", "2k", *flags],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ESS_PEER_SECRET": SECRET, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield made
    finally:
        made.kill()
        made.wait()


def kin(process: subprocess.Popen[str]) -> list[int]:
    assert process.poll() is None, process.communicate()[1]
    return [pid for pid, words in commands(process.pid).items() if "ess.engine.process" in words]


@pytest.mark.slow
def test_another_node_keeps_its_stages_and_ends_with_them():
    address = "127.0.0.1:29401"  # the paced engine meets no other process
    flags = ("--pp-size", "4", "--nnodes", "2", "--dist-init-addr", address)
    more = ("--node-rank", "1", "--host-bytes", "96MiB", "--drain-s", "1")
    with started(*flags, *more) as node:
        until(lambda: len(kin(node)) == 2, "its two stages")
        first = kin(node)
        os.kill(first[0], signal.SIGKILL)
        until(lambda: not any(map(is_running, first)), "the end of both")
        until(lambda: len(kin(node)) == 2, "two others")
        second = kin(node)
        os.kill(second[1], signal.SIGSTOP)
        until(lambda: not any(map(is_running, second)), "the end of both again")
        until(lambda: len(kin(node)) == 2, "the third two")
        second = kin(node)
        node.send_signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert not any(map(is_running, second))
        said = node.communicate()[1]
        assert f"ranks 2 to 3 of 4 here, met at {address}" in said
        assert re.search(r"stage 2 \(layers \d to \d\) is lost: .* SIGKILL; the processes", said)
        assert re.search(r"stage 3 \(layers \d to \d\) is lost: it has been stopped for", said)


@pytest.mark.slow
def test_a_rank_of_torchrun_is_one_process_and_rank_0_has_the_server():
    told = {**TORCHRUN, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    flags = ("--pp-size", "2", "--host-bytes", "96MiB")
    with (
        started(*flags, **{**told, "RANK": "1"}) as other,
        prefill(*flags, **{**told, "RANK": "0"}).wait_ready() as first,
    ):
        assert len(stages(first)) == 1
        until(lambda: len(kin(other)) == 1, "its stage")
        for process in (other, first.process):
            process.send_signal(signal.SIGTERM)
        assert first.ended(30) == 0
        assert other.wait(30) == 0
        assert "rank 1 of 2 here, met at 127.0.0.1:29501" in other.communicate()[1]


TEXT = {"prompt": [5 + place % 300 for place in range(900)], "max_tokens": 12, "temperature": 0}


class Real(Process):
    """A worker with the model in the box."""

    def __init__(self, command: str, *flags: str) -> None:
        super().__init__(*flags, command=command, stderr=2, ESS_PEER_SECRET=SECRET)
        self.wait_ready()

    def asked(self, **more: object) -> dict:
        status, _, document = answered(
            self, "/v1/completions", json.dumps({**TEXT, **more}).encode()
        )
        assert status == 200, document
        return document


def lose_last_stage(first: Real, second: Real) -> None:
    """Kills it, and waits until the decode worker has met the stages that come next."""

    def epoch() -> str:
        [peer] = answered(second, "/server_info")[2]["peers"]
        return peer["engine_id"]

    before = epoch()
    last = max(pid for pid, words in commands(first.process.pid).items() if "ess.pre" in words)
    os.kill(worker_of(last), signal.SIGKILL)
    until(lambda: not is_running(last), "its end")
    until(lambda: epoch() != before, "the next worker's epoch")


@pytest.mark.slow
def test_answers_are_those_of_one_process_before_and_behind_a_killed_stage():
    with Real("serve") as alone:
        expected = alone.asked()["choices"][0]["text"]
    with (
        Real("prefill", "--pp-size", "2", "--chunk", "256") as first,
        Real("decode", "--peers", f"127.0.0.1:{first.port}") as second,
    ):
        for _ in range(2):
            until(lambda: not answered(second, "/ready")[2]["missing"], "a meeting")
            given = first.asked(kv_transfer_params=GIVES)
            made = second.asked(kv_transfer_params=given["kv_transfer_params"])
            assert made["choices"][0]["text"] == expected
            lose_last_stage(first, second)
        [load] = answered(second, "/v1/loads")[2]["loads"]
        assert load["handoff"]["landed"] == 2


def made_once(folder: Path, expected: str) -> int:
    """One life of the stages; how many tokens of the prompt they had."""
    flags = ("--pp-size", "2", "--chunk", "256", "--prefix-cache-dir", str(folder))
    with (
        Real("prefill", *flags) as first,
        Real("decode", "--peers", f"127.0.0.1:{first.port}") as second,
    ):
        until(lambda: not answered(second, "/ready")[2]["missing"], "a meeting")
        given = first.asked(kv_transfer_params=GIVES)
        made = second.asked(kv_transfer_params=given["kv_transfer_params"])
        assert made["choices"][0]["text"] == expected
        until(lambda: metrics(first.url)["ess_disk_pages", ""] >= 13, "the pages on disk")
        first.process.terminate()  # a stage that is killed may not have written its pages yet
        assert first.ended(60) == 0
        return given["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.slow
def test_behind_a_restart_stages_read_from_their_disks_what_they_had_made(tmp_path: Path):
    with Real("serve") as alone:
        expected = alone.asked()["choices"][0]["text"]
    assert made_once(tmp_path, expected) == 0
    assert made_once(tmp_path, expected) >= 13 * 64
    assert len(list(tmp_path.iterdir())) == 2
