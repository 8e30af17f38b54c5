"""`ess serve --device cuda` as real processes: its engine's has the pretended device."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.process.messages import Add, Handoff, Status
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cuda import program
from ess.models.load import load_model
from ess.server.commands import cli, doctor
from ess.server.commands.start.files.checkpoint import embedded_path
from tests.pd.pairs import SECRET
from tests.pd.processes import adds, engines, handed_over, introduce
from tests.prefill.processes import pipeline
from tests.server.harness import TOKENIZER, until
from tests.server.test_dashboard import metrics
from tests.support import beside
from tests.support.process import ROOT, Process
from tests.support.routers import ask

FOLDER = Path(__file__).with_name("beside")
GRAPHS = ("--graph-sizes", "1", "--modes", "none")
FLAGS = ("--form", "f32", "--row", "f32", "--slot-bytes", "24MiB", "--max-running", "2", *GRAPHS)
PROMPT = [300 + 7 * place % 3000 for place in range(70)]
MADE = 4


def expected(*prompts: list[int]) -> list[list[int]]:
    """By an engine on the host."""
    model = load_model(embedded_path(), form="f32")
    layout = model.config.layout(row="f32")
    sizes = {"slot_bytes": "24MiB", "host_bytes": "96MiB", "length_max": 2048}
    with Offload.create(layout, **sizes, sequence_max=2, query_max=4) as offload:
        engine = Engine(model, offload, EngineConfig(mtp=2))
        requests = [engine.add(prompt, Sampling(tokens_max=MADE)) for prompt in prompts]
        for _ in engine.run():
            pass
    return [request.output for request in requests]


def graphs(url: str) -> tuple[int, dict[str, int]]:
    """Steps that were replayed, and eager ones by cause, once the request's are told."""

    def ask():
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            return json.loads(answer.read())["engine"]["graphs"]

    until(lambda: (ask() or {}).get("replayed"), "a replayed step")
    said = ask()
    return said["replayed"], said["eager"]


pytestmark = [pytest.mark.slow, *beside.NEEDS]


@pytest.fixture
def told(built: Path) -> dict[str, str]:
    """The environment in which engines have the pretended device."""
    paths = os.pathsep.join((str(FOLDER), str(ROOT)))
    return {"PYTHONPATH": paths, "PRETENDED_DRIVER": str(built)}


def test_a_completion_is_that_of_the_host(told: dict[str, str]):
    with Process("--device", "cuda", *FLAGS, **told) as process:
        shown = process.greeting
        assert shown["settings"]["backend"] == {"value": "cuda", "from": "derived"}
        assert shown["memory"]["device"]["name"] == "emulated"
        until(lambda: process.status("/ready") == 200, "a rehearsed engine", within_s=300)
        client = process.client()
        made = client.completions.create(
            model="ess-embedded", prompt=PROMPT, max_tokens=MADE, temperature=0, timeout=300
        )
        [wanted] = expected(PROMPT)
        assert made.choices[0].text == TOKENIZER.decode(wanted)
        replayed_count, eager = graphs(process.url)
        assert replayed_count > 0
        assert eager == {}
        assert told["PRETENDED_DRIVER"] in Path(f"/proc/{process.engine_pid}/maps").read_text()


@pytest.mark.long
def test_what_a_device_is_asked_of_a_server(told: dict[str, str]):
    """Of the tests of make test-gpu the one with few graphs."""
    name = "tests/gpu/test_served.py::test_its_text_is_that_of_a_server_of_the_host"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.support.there", name]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **told}, capture_output=True)
    assert b"1 passed" in done.stdout, done.stdout[-4000:].decode()


@pytest.mark.long
@pytest.mark.parametrize(("gives", "takes"), [("cpu", "cuda"), ("cuda", "cpu"), ("cuda", "cuda")])
def test_processes_hand_prompts_over(
    gives: str, takes: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    kinds = {"cpu": {}, "cuda": {"device": "cuda", "backend": "cuda", "graphs": 0}}
    prompts, wish = [PROMPT, PROMPT[5:]], Sampling(tokens_max=MADE)
    configs = {"role": "prefill", **kinds[gives]}, {"role": "decode", **kinds[takes]}
    with engines(tmp_path, *configs) as [prefill, decode]:
        theirs, ours = prefill.ready().metadata, decode.ready().metadata
        peer = introduce(prefill, decode, theirs, ours)
        for add in adds(prompts, wish):
            handed_over(add, prefill, decode, uid=add.number, peer=peer)
        decode.ended(0, 1)
        prefill.ended(0, 1)
        assert [decode.tokens(number) for number in (0, 1)] == expected(*prompts)
        assert [prefill.reason(number) for number in (0, 1)] == ["sent"] * 2
        decode.until(lambda _: decode.status.handoff.landed_count == len(prompts))


def asked(process: Process, **kv: object) -> dict[str, object]:
    """A decode worker that has met its peer while that one started tries again a little later."""
    body = {"prompt": PROMPT, "max_tokens": MADE, "temperature": 0, "kv_transfer_params": kv}
    answers = []

    def is_taken() -> bool:
        answers.append(ask(f"{process.url}/v1/completions", body))
        return "peer_down" not in answers[-1].text

    until(is_taken, "a peer that has started")
    assert answers[-1].status == 200, answers[-1]
    return answers[-1].document


def test_a_pipeline_behind_a_server_makes_prompts_for_a_worker_of_the_host(told: dict[str, str]):
    """Two stages share the device, each in a process of its own."""
    secret, same = {"ESS_PEER_SECRET": SECRET}, ("--form", "f32", "--row", "f32")
    stages = ("--device", "cuda", "--pp-size", "2", "--pp-devices", "0,0", "--chunk-tokens", "64")
    with (
        Process(*stages, *same, command="prefill", **told, **secret) as prefill,
        Process("--peers", f"127.0.0.1:{prefill.port}", *same, command="decode", **secret) as taker,
    ):
        first, last = prefill.greeting["memory"]["stages"]
        assert first["name"] == "stage 0 (layers 0 to 2) on cuda:0, emulated"
        assert 0 < first["room"] == last["room"] < first["free"] // 2
        prefill.wait_ready()
        taker.wait_ready()
        made = asked(prefill, do_remote_decode=True, do_remote_prefill=False)
        answer = asked(taker, **made["kv_transfer_params"])
        [wanted] = expected(PROMPT)
        assert answer["choices"][0]["text"] == TOKENIZER.decode(wanted)
        until(lambda: metrics(taker.url).get(("ess_handoffs_total", "landed")) == 1, "a landing")


@pytest.mark.long
@pytest.mark.parametrize("takes", ["cpu", "cuda"])
def test_processes_of_a_pipeline_hand_prompts_over(
    takes: str, told: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    there = {"device": "cuda", "backend": "cuda"}
    kinds = {"cpu": {}, "cuda": {**there, "graphs": 0}}
    prompts, wish = [PROMPT, PROMPT[5:]], Sampling(tokens_max=MADE)
    rank = {"device": "cuda:0", "dynamic": True}
    with (
        engines(tmp_path, {"role": "decode", "handoff_wait_s": 150.0, **kinds[takes]}) as [decode],
        pipeline(tmp_path / "it", 2, rank=rank, chunk_tokens=64, **there) as lead,
    ):
        theirs, ours = lead.ready().metadata, decode.ready().metadata
        peer = introduce(lead, decode, theirs, ours)
        for add in adds(prompts, wish):
            handed_over(add, lead, decode, uid=add.number + 1, peer=peer)
        decode.ended(0, 1)
        assert [decode.tokens(number) for number in (0, 1)] == expected(*prompts)
        decode.until(lambda _: decode.status.handoff.landed_count == len(prompts))


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_stage_on_a_device_ends_all(
    lost: int, told: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A lead in the middle of a slow layer is ended before it could say why."""
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    there = {"device": "cuda", "backend": "cuda"}
    with pipeline(tmp_path / "it", 2, rank={"device": "cuda:0"}, chunk_tokens=64, **there) as lead:
        lead.ready()
        lead.say(Add(0, PROMPT, Sampling(tokens_max=1), handoff=Handoff(1)))
        lead.until(lambda message: isinstance(message, Status) and bool(message.requests))
        os.kill(lead.ranks[lost].pid, signal.SIGKILL)
        assert 0 not in lead.wait_all()


@pytest.mark.long
def test_the_doctor_decodes_on_it(told: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor.driver, "why_missing", lambda: None)
    there, triton, decode, *kernels = doctor._device()
    assert triton.name == "triton"
    assert there.state == "emulated, sm_90a, 80.00 GiB free"
    assert decode.grade == "ok", decode
    assert decode.state.startswith("the CPU's tokens, ")
    assert not decode.state.startswith("the CPU's tokens, 0 rows")
    chosen = {check.name: check.state for check in kernels}
    assert {"attention", "indexer", "experts", "ours", "copy engine"} <= chosen.keys()
    assert "flash_mla" in chosen["attention"]


def test_the_doctor_lets_two_devices_exchange(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in {**told, "EMULATED_DEVICES": "2"}.items():
        monkeypatch.setenv(name, value)
    check = doctor._device_ranks(2)
    assert check.grade == "ok", check
    sizes = re.findall(r"([\d.]+) ([KM]iB)", check.state)
    took, estimated = (float(size) * (1 if unit == "MiB" else 1 / 1024) for size, unit in sizes)
    assert estimated / 4 < took <= estimated, check.state


@pytest.mark.skipif(program.why_missing() is not None, reason=str(program.why_missing()))
def test_a_driver_of_an_earlier_cuda_is_named_before_anything_is_loaded(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    for name, value in {**told, "EMULATED_VERSION": "12080"}.items():
        monkeypatch.setenv(name, value)
    report = doctor.ask(0)
    assert report.arch == "sm_90a"
    assert f"the driver is of CUDA 12.8 and does not load what {program.compiler_version()} " in (
        report.why_not("cuda")
    )


def test_a_machine_without_a_device_says_so_in_a_sentence(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--device", "cuda:1"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "device is 'cuda:1', and CUDA device 1 cannot be used here: " in said
