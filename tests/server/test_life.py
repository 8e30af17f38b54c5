"""The life of `ess serve`: two real processes, real signals, the model in the box."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import openai
import pytest

from ess.bench.engine.calibrate import constant_rows, miss_rows
from ess.bench.harness.measure.machine import build, machine
from ess.bench.harness.report import Document, write
from ess.cost import Calibration
from ess.overlap.calibration import shape_of
from ess.server.commands import cli
from ess.server.commands.start.files.checkpoint import embedded_path, read_checkpoint
from ess.server.process.lifecycle import Running
from tests.server.harness import TOKENIZER, until
from tests.support.forked import finished, started
from tests.support.kin import is_running
from tests.support.process import RUN, Process

GRACE_S = 3.0


@pytest.fixture(scope="module")
def running() -> Iterator[Process]:
    with Process(is_real=True) as made:
        early = made.status("/ready"), made.status("/health")
        assert early in ((503, 200), (200, 200))
        yield made.wait_ready()


def test_the_server_s_process_has_no_torch(running: Process):
    assert "torch" not in Path(f"/proc/{running.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{running.engine_pid}/maps").read_text()


def test_it_says_what_it_serves(running: Process):
    greeting = running.greeting
    assert greeting["settings"]["max_running"] == {"value": 4, "from": "flag"}
    assert greeting["settings"]["host"]["from"] == "default"
    assert greeting["settings"]["served_model_name"] == {"value": "ess-embedded", "from": "derived"}
    [room] = greeting["memory"]["rooms"]
    assert (room["length"], room["count"], room["limiter"]) == (2048, 4, "max_running")
    assert greeting["memory"]["length_max"] == 2048


@pytest.mark.slow
def test_what_it_says_is_what_the_engine_makes(running: Process):
    """Through HTTP or not: the same tokens."""
    from ess.models.load import load_model
    from tests.support.stored import Stored

    client = running.client()
    asked = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    streamed = "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
    assert whole.choices[0].text == streamed
    assert len(streamed) > 20
    again = client.completions.create(**{**asked, "prompt": TOKENIZER.encode("The server is")})
    assert again.choices[0].text == streamed
    model = load_model(embedded_path())
    ids = [*TOKENIZER.encode("The server is"), *TOKENIZER.encode(streamed)]
    chosen = Stored(model, model.config.layout()).run(ids).logits.argmax(-1).tolist()
    count = len(TOKENIZER.encode("The server is"))
    agreed = sum(a == b for a, b in zip(chosen[count - 1 :], ids[count:], strict=False))
    assert agreed >= 0.8 * (len(ids) - count)


def test_messages_and_chats_make_the_same_tokens(running: Process):
    asked = {"messages": [{"role": "user", "content": "The server is"}], "max_tokens": 16}
    said = []
    for path in ("/v1/chat/completions", "/v1/messages"):
        body = json.dumps({**asked, "temperature": 0}).encode()
        with urllib.request.urlopen(running.url + path, body, timeout=120) as answer:
            said.append(json.load(answer))
    [choice], [block] = said[0]["choices"], said[1]["content"]
    assert choice["message"]["content"] == block["text"] != ""
    assert said[0]["usage"]["completion_tokens"] == said[1]["usage"]["output_tokens"]


def calibration(folder: Path, *, row: Literal["fp8", "bf16"] = "fp8") -> str:
    """What `ess-bench calibrate --out FILE` writes, of a machine where DA hides every fetch."""
    layout = read_checkpoint("").config.layout(row=row)
    free = dict.fromkeys((field.name for field in fields(Calibration)), 0.0)
    rows = constant_rows(
        Calibration(**{**free, "attend_query_us": 1000.0}), 1.0, {"layout": shape_of(layout)}
    )
    rows += miss_rows([1.0] * layout.layer_total, {"context": 1024})
    made = Document(build=build(), machine=machine(), rows=rows)
    write(made, json=folder / "calibration.json", out=None)
    return str(folder / "calibration.json")


@pytest.mark.slow
def test_a_calibration_decides_how_a_launched_engine_starts(tmp_path: Path):
    """Without one the first step runs NONE. The prompt is longer than there are slots."""
    flags = ("--calibration", calibration(tmp_path), "--sbo", "combine-down", "--max-running", "1")
    with Process(*flags).wait_ready() as process:
        client = process.client()
        client.completions.create(model="ess-embedded", prompt=[7] * 1500, max_tokens=3)

        def modes() -> list[dict[str, int]]:
            with urllib.request.urlopen(process.url + "/server_info") as answer:
                return json.loads(answer.read())["engine"]["modes"]

        until(lambda: any(sum(layer.values()) for layer in modes()), "a status of the steps")
        assert all(layer["none"] == 0 for layer in modes())
        assert sum(layer["da"] for layer in modes()) > 0
        process.process.send_signal(signal.SIGTERM)
        assert (
            f"calibration.json was measured on {machine().cpu}, "
            in process.process.communicate()[1]
        )


def test_a_calibration_of_other_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["serve", "--calibration", calibration(tmp_path, row="bf16")]) == 2
    said = capsys.readouterr().err
    assert "calibration.json was measured with another model: row_bytes" in said


def test_a_seed_gives_the_same_again_and_another_gives_another(running: Process):
    said = [
        "".join(c.choices[0].text for c in running.stream(seed=s, max_tokens=24, temperature=1.0))
        for s in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]


def test_a_prompt_seen_before_is_cached_until_it_is_flushed(running: Process):
    client = running.client()
    asked = {"model": "ess-embedded", "prompt": [7] * 300, "max_tokens": 2}

    def cached() -> int:
        made = client.completions.create(**asked)
        return made.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    assert cached() >= 128
    urllib.request.urlopen(urllib.request.Request(running.url + "/flush_cache", b"")).close()
    assert cached() == 0


def test_too_long_is_refused_and_what_never_fits_too(running: Process):
    client = running.client()
    with pytest.raises(openai.BadRequestError, match="2,048"):
        client.completions.create(model="ess-embedded", prompt=[5] * 2048, max_tokens=1)


def test_leaving_frees_everything(running: Process):
    for _ in range(3):
        stream = running.stream()
        next(stream)
        stream.close()

    def load() -> dict:
        with urllib.request.urlopen(running.url + "/v1/loads") as answer:
            return json.loads(answer.read())["loads"][0]

    until(lambda: not load()["num_total_reqs"] and not load()["num_running_reqs"], "leaving")


@pytest.mark.slow
def test_sigterm_lets_streams_finish_while_probes_see_503():
    """The listener stays open for as long as the setting says."""
    with Process("--drain-grace-s", str(GRACE_S)).wait_ready() as process:
        stream = process.stream(max_tokens=100)
        next(stream)
        began_s = time.monotonic()
        os.kill(process.engine_pid, signal.SIGTERM)  # as systemd does, and pkill
        process.process.send_signal(signal.SIGTERM)
        until(lambda: process.status("/ready") == 503, "the drain")
        assert process.status("/health") == 200
        while status := process.status("/ready"):
            assert status == 503
        assert time.monotonic() - began_s >= GRACE_S
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert process.ended(60) == 0


@pytest.mark.slow
def test_sigterm_does_not_wait_for_probes_that_never_came():
    with Process("--engine", "paced", "--drain-grace-s", "3600", "--drain-s", "3600") as process:
        until(lambda: process.status("/health_generate") == 200, "an answer")
        process.process.send_signal(signal.SIGTERM)
        assert process.ended(60) == 0


@pytest.mark.slow
def test_a_drain_has_an_end_and_says_so():
    with Process("--drain-s", "0.5", "--drain-grace-s", "0").wait_ready() as process:
        stream = process.stream()
        next(stream)
        process.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.ended(60) == 0


@pytest.mark.slow
def test_ctrl_c_behind_sigterm_ends_streams_at_once_and_says_so():
    """A further SIGTERM says nothing new: a service's processes may all get it, and the command
    that started them passes it on."""
    with Process("--engine", "paced", "--pace-ms", "10").wait_ready() as process:
        stream = process.stream()
        next(stream)
        for _ in range(2):
            process.process.send_signal(signal.SIGTERM)
            until(lambda: process.status("/ready") == 503, "the drain")
        next(stream)
        process.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="told by SIGINT to end at once"):
            list(stream)
        assert process.ended(60) == 0
        said = process.process.communicate()[1]
    assert "ess: SIGINT while the server drains: 1 request is open, and ended now" in said


@pytest.mark.slow
def test_a_killed_engine_fails_health_ends_streams_and_the_server():
    with Process("--engine-restarts", "0").wait_ready() as process:
        stream = process.stream()
        next(stream)
        process.kill_engine()
        with pytest.raises(openai.APIError, match="SIGKILL"):
            list(stream)
        assert process.status("/health") in (503, 0), "0: it has ended meanwhile"
        assert process.ended(60) == 1


@pytest.mark.slow
def test_a_stuck_engine_is_noticed():
    flags = ("--watchdog-s", "3", "--engine-restarts", "0")
    with Process(*flags, has_real_children=True).wait_ready() as process:
        engine = process.engine_pid
        os.kill(engine, signal.SIGSTOP)
        until(lambda: process.status("/health") in (503, 0), "the watchdog")
        assert process.ended(60) == 1
        until(lambda: not is_running(engine), "the engine's end")


@pytest.mark.slow
def test_an_engine_does_not_outlive_its_server():
    with Process(has_real_children=True).wait_ready() as process:
        engine = process.engine_pid
        process.process.kill()
        process.process.wait()
        until(lambda: not Path(f"/proc/{engine}").exists(), "the engine's end")


@pytest.mark.slow
@pytest.mark.parametrize("said", [b"", b'{"model":', b'{"model": "no folder"}\n'])
@pytest.mark.parametrize("program", ["worker", "fake_engine"])
def test_an_engine_whose_server_has_ended_first_loads_nothing(program: str, said: bytes):
    """It reads nothing of its message, which would be refused."""
    words, pipes = ["-m", f"ess.engine.process.{program}", "ipc:///nowhere"], ("stdin", "stdout")
    with started("engine", words, **dict.fromkeys((*pipes, "stderr"), subprocess.PIPE)) as process:
        written = process.communicate(said, timeout=120)
    assert (process.returncode, *written) == (0, b"", b"")


@pytest.mark.slow
def test_wrong_settings_are_one_sentence_and_a_code():
    for flags, environment, code, says in (
        (["--port", "99999"], {}, 2, "port is 99999"),
        (["--portt", "1"], {}, 2, "--port"),
        ([], {"ESS_PROT": "1"}, 2, "did you mean 'ESS_PORT'"),
        (
            ["--host", "203.0.113.1", "--without-key"],
            {},
            1,
            "no interface of this machine has 203.0.113.1",
        ),
    ):
        done = finished("server", "-c", RUN, "serve", *flags, env={**os.environ, **environment})
        assert done.returncode == code, done.stderr
        assert says in " ".join(done.stderr.replace("│", " ").split())
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["/no/such/folder"], "not a folder"),
        (["--pp-size", "2", "--cp-size", "2"], "cp_size is 2, and tp_size is 1, pp_size 2"),
        (["--host-bytes", "1KiB"], "less than one page"),
    ],
)
def test_what_cannot_be_served_is_a_sentence(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["serve", *flags]) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_the_last_line_counts_one_answer_as_one(capsys: pytest.CaptureFixture[str]):
    tally = SimpleNamespace(finishes={"stop": 1})
    Running._note_end(SimpleNamespace(_service=SimpleNamespace(tally_of_all=tally)), 61.0)
    assert capsys.readouterr().err.endswith("ess: ended after 61 s, 1 answer\n")
