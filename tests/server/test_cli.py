"""`ess chat`, `ess top` and `ess doctor`, against a real server where they need one."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest

from ess import console
from ess.engine.process.checks import exchange_check
from ess.engine.process.messages import GraphLine, PoolUse, Status
from ess.errors import BadInput, Unavailable
from ess.flashtrans.ways import Choice
from ess.server.commands import chat_cli, cli, client, doctor, transports
from ess.server.commands.client import Client
from ess.server.commands.doctor import Check
from ess.server.commands.start.trial import Answer, answer_of
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying, until

STATUS = Status(
    running_count=3,
    made_count=30,
    turn_count=20,
    hits=(9,),
    misses=(1,),
    places=(0,),
    limiter="slots",
    pools=(PoolUse("host pages", 1, 4),),
    graphs=GraphLine(
        held=2,
        most=4,
        bytes=0,
        byte_max=0,
        replayed=3,
        captured=2,
        dropped=0,
        eager={"memory": 1},
    ),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = PacedEngine(saying(" At noon, I think."), status=STATUS, cached_count=1)
    with Served(engine, keys=("secret",)) as made:
        until(lambda: made.service.board.status.made_count == 30, "a status")
        yield made


def run(served: Served, *arguments: str) -> int:
    return cli.main([*arguments, "--url", served.url, "--api-key", "secret"])


def test_a_question_waits_for_a_server_that_loads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Notes are put in a queue: `capsys` loses what one thread writes while another reads."""
    engine, notes = PacedEngine(saying(" At noon."), says_ready=False), SimpleQueue[str]()
    monkeypatch.setattr(console, "note", notes.put)
    with Served(engine) as served, ThreadPoolExecutor() as pool:
        asking = pool.submit(cli.main, ["chat", "-q", "When?", "--url", served.url])
        why = "the model is being loaded; try again soon"
        assert notes.get(timeout=60) == f"waiting for {served.url}, which says: {why}"
        assert not asking.done()
        engine.says_ready = True
        assert asking.result(60) == 0
    assert notes.empty()
    assert capsys.readouterr().out == " At noon.\n"


def test_a_question_gets_its_answer(served: Served, capsys: pytest.CaptureFixture[str]):
    asked = ["-q", "When?", "--system", "Be brief.", "--seed", "4", "--temperature", "0.5"]
    assert run(served, "chat", *asked, "--stats") == 0
    out, err = capsys.readouterr()
    assert out == " At noon, I think.\n"
    said = r"17 tokens of prompt \(1 cached\) · first text after [\d,]+ ms\n9 tokens at"
    assert re.search(said, err)
    add = served.engine.adds[-1]
    assert TOKENIZER.decode(add.prompt) == "system: Be brief.\nuser: When?\nassistant:"
    assert (add.sampling.seed, add.sampling.temperature) == (4, 0.5)


def test_an_answer_as_a_document(served: Served, capsys: pytest.CaptureFixture[str]):
    assert run(served, "chat", "-q", "When?", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["text"] == " At noon, I think."
    assert document["tokens"] == len(TOKENIZER.encode(" At noon, I think.")) + 1
    assert document["cached_tokens"] == 1
    assert document["tokens_per_step"] is None, "no request was served meanwhile, says the status"


def test_a_conversation_remembers(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stdin", io.StringIO("When?\n\nWhere?\n"))
    assert run(served, "chat") == 0
    assert capsys.readouterr().out == " At noon, I think.\n" * 2
    said = TOKENIZER.decode(served.engine.adds[-1].prompt)
    assert said == "user: When?\nassistant:  At noon, I think.\nuser: Where?\nassistant:"


def test_a_typed_question_that_is_refused_or_stopped_is_forgotten(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    typed = iter(["word " * 5000, "Why?", "Where?", "/new", "When?"])
    answer = chat_cli._answer

    def stopped(client: Client, body: dict, **how: bool) -> str:
        if body["messages"][-1]["content"] == "Why?":
            raise KeyboardInterrupt
        return answer(client, body, **how)

    def line(prompt: str) -> str:
        assert prompt == "> "
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(chat_cli, "_answer", stopped)
    assert run(served, "chat") == 0
    out, err = capsys.readouterr()
    assert out == " At noon, I think.\n" * 2
    assert err.startswith(f"test-model at {served.url}; Ctrl-C stops")
    assert "leave room to answer" in err
    assert "(stopped; forgotten)" in err
    assert TOKENIZER.decode(served.engine.adds[-1].prompt) == "user: When?\nassistant:"


def test_thoughts_are_shown_beside_the_answer_not_in_it(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    parts = [{"reasoning_content": "It is "}, {"reasoning_content": "late."}, {"content": "Now."}]

    def stream(client: Client, path: str, body: dict) -> Iterator[dict]:
        assert (path, body["stream"]) == ("/v1/chat/completions", True)
        yield from ({"choices": [{"delta": part}]} for part in parts)

    monkeypatch.setattr(Client, "stream", stream)
    assert run(served, "chat", "-q", "When?") == 0
    assert capsys.readouterr() == ("Now.\n", "It is late.\n\n")
    del parts[-1]  # cut off while it thinks
    assert run(served, "chat", "-q", "When?") == 0
    assert capsys.readouterr() == ("\n", "It is late.\n\n")


def test_top_shows_the_load(served: Served, capsys: pytest.CaptureFixture[str]):
    assert run(served, "top", "--once") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "state ready running 3 of 16" in shown
    assert "oldest wait 0.0 s" in shown
    assert "short of slots" in shown
    assert "tokens/step 1.50" in shown
    assert "rows resident 90.0%" in shown
    assert "host pages 25.0% of 4" in shown
    assert "steps as graphs 75.0% 2 kept" in shown
    assert run(served, "top", "--json") == 0
    assert json.loads(capsys.readouterr().out)["loads"][0]["num_running_reqs"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["chat", "-q", "x", "--url", "127.0.0.1:1"], 1, "no server at http://127.0.0.1:1"),
        (["chat", "x", "--url", "127.0.0.1:1"], 1, "127.0.0.1:1: Connection refused; `ess serve"),
        (["chat", "x", "--url", "localhost:1"], 1, "; `ess serve --port 1` starts one"),
        (["top", "--url", "a.invalid"], 1, "no server at http://a.invalid: "),
        (["chat", "How", "are", "you"], 2, "2 words have no place"),
        (["top", "--url", "ftp://x"], 2, "write http://HOST:PORT"),
        (["top", "--every", "0"], 2, "--every 0"),
    ],
)
def test_what_cannot_be_reached_is_said(
    arguments, code, says, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "LISTEN_S", 0.0)
    assert cli.main(arguments) == code
    assert says in capsys.readouterr().err


def test_top_does_not_wait_for_a_server_that_hangs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat_cli, "ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        assert cli.main(["top", "--every", "0.1", "--once", "--url", url]) == 1
        assert f"{url} has not answered for 0.1 s" in capsys.readouterr().err


def test_top_says_how_long_an_engine_has_been_silent(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(chat_cli, "SILENT_S", 0.3)
    served.engine.hold()
    heard_s = served.service.link.engine.heard_at_s
    until(lambda: served.service.clock.now_s() - heard_s > chat_cli.SILENT_S, "its silence")
    try:
        assert run(served, "top", "--once") == 0
    finally:
        served.engine.held.set()
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"state ready the engine was heard [0-9]+\.\d s ago", shown)


def test_a_server_that_is_about_to_start_is_waited_for(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    notes = SimpleQueue[str]()
    monkeypatch.setattr(console, "note", notes.put)
    with socket.socket() as late, ThreadPoolExecutor(1) as pool:
        late.bind(("127.0.0.1", 0))
        port = late.getsockname()[1]
        waiting = pool.submit(Client(f"127.0.0.1:{port}", None).wait_ready)
        told = notes.get(timeout=60)
        assert told == (
            f"no server at http://127.0.0.1:{port} yet: waiting 10 s;"
            f" `ess serve --port {port}` starts one"
        )
        late.listen()
        late.accept()[0].close()
        with late.accept()[0] as asked:
            assert asked.recv(4096).startswith(b"GET /ready ")
            asked.sendall(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n")
            waiting.result(timeout=60)


def test_the_server_s_own_sentence_is_passed_on(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ESS_API_KEY", raising=False)
    assert cli.main(["top", "--url", served.url]) == 1
    assert "no API key came along; a valid one is needed" in capsys.readouterr().err
    monkeypatch.setenv("ESS_API_KEY", "secret,other")
    assert cli.main(["top", "--url", f"{served.url}/v1/", "--json"]) == 0, "OpenAI's base address"
    assert run(served, "chat", "-q", "x", "--model", "none") == 1
    assert "'none' is not served here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "answer",
    [b"<html>", b"\xff", b"[]", b'{"data": [], "loads": []}', b'{"data": [{}], "loads": [{}]}'],
)
def test_what_is_no_answer_of_ours_gets_a_sentence(
    served: Served,
    answer: bytes,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """As that of a router without workers, of another site, or of another engine's server."""
    monkeypatch.setattr(Client, "_lines", lambda *_: [answer])
    for command in (["chat", "-q", "x"], ["chat", "-q", "x", "--model", "m", "--json"], ["top"]):
        assert run(served, *command) == 1
        assert "; is it a server of ESS?" in capsys.readouterr().err


def test_a_page_is_no_load(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Client, "_lines", lambda *_: [b"<html>"])
    assert run(served, "top", "--json") == 1
    assert "has no JSON at /v1/loads; is it a server of ESS?" in capsys.readouterr().err


def test_doctor_s_code_says_whether_something_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    good = Check(name="a", grade="ok", state="1")
    poor = Check(name="b", grade="warn", state="2", hint="do 'this[now]'")
    bad = Check(name="c", grade="fail", state="3", hint="do that")
    monkeypatch.setattr(doctor, "examined", lambda port, host: iter((good, poor)))
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr()
    assert "-> do 'this[now]'" in said.out
    assert "can serve; before `ess serve` look at: b\n" in said.err
    monkeypatch.setattr(doctor, "examined", lambda port, host: iter((good, poor, bad)))
    assert cli.main(["doctor", "--json"]) == 3
    said = capsys.readouterr()
    printed = json.loads(said.out)
    assert printed["ok"] is False
    assert "cannot serve yet: c" in said.err
    assert [check["grade"] for check in printed["checks"]] == ["ok", "warn", "fail"]
    assert [check["found"] for check in printed["checks"]] == ["1", "2", "3"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "shared", "nixl"])
def test_a_transport_is_tried_between_two_processes(kind: str):
    """GB/s beside a copy's; where NIXL is not installed, that is said and is no fault."""
    trial = transports.tried(kind, "127.0.0.1")
    assert trial.grade == "ok", trial
    assert "GB/s between two processes, a copy in memory" in trial.state or kind == "nixl"


def test_an_address_that_is_not_ours_is_said():
    trial = transports.tried("tcp", "192.0.2.1")
    assert (trial.grade, trial.hint) == ("warn", transports.HINTS["tcp"])
    assert "transfers cannot listen on 192.0.2.1 port 0" in trial.state


def test_a_process_that_is_asked_answers_or_says_why_not():
    assert answer_of("-c", "print(1); print('two')", limit_s=60) == ("two", "")
    assert answer_of("-c", "raise SystemExit('no room')", limit_s=60) == ("", "no room")
    assert answer_of("-c", "", limit_s=60) == ("", "nothing was said")
    assert answer_of("-c", "input()", limit_s=60).fault == "EOFError: EOF when reading a line"


def test_a_process_that_never_answers_is_left(monkeypatch: pytest.MonkeyPatch):
    silent = "import signal; signal.pause()"
    assert answer_of("-c", silent, limit_s=0.2) == ("", "nothing after 0.2 s")
    left: set[subprocess.Popen[str]] = set()
    with monkeypatch.context() as patched:  # as in a call of a driver that does not return
        patched.setattr(subprocess.Popen, "kill", lambda process: left.add(process))
        patched.setattr("ess.server.commands.start.trial.KILLED_S", 0.1)
        fault = answer_of("-c", silent, limit_s=0.2).fault
    [process] = left
    process.kill()
    process.wait()
    stays = f", and process {process.pid} has not ended 0.1 s after SIGKILL"
    assert fault == f"nothing after 0.2 s{stays}"
    monkeypatch.setattr(doctor, "TRIAL_S", 0.001)
    assert (doctor._decode().grade, doctor._decode().hint) == ("fail", "nothing after 0.001 s")


def test_another_token_is_a_failure():
    times = {"offload_s": 1.0, "resident_s": 1.0, "miss_count": 5}
    assert doctor.judged({"same": True, **times}).grade == "ok"
    assert doctor.judged({"same": False, **times}).grade == "fail"


def test_the_ways_of_row_moves_are_said():
    usual = Choice(row_bytes=264, count=512, way="requests", gain=1.0)
    other = Choice(row_bytes=2304, count=65_536, way="staged", gain=1.234)
    untimed = Choice(row_bytes=656, count=2048, way="plain", gain=1.0)
    said = "gathered as 'requests', 'staged' for 65,536 of 2,304 B (x1.23), 'plain' for 2,048 of "
    assert doctor.said_of([usual, other, untimed, usual]) == f"{said}656 B"
    assert doctor.said_of(()) == "by NumPy"


def test_a_wrong_way_of_row_moves_is_said(monkeypatch: pytest.MonkeyPatch):
    def refuse():
        raise BadInput("ESS_ROWS is 'fast', must be one of others")

    monkeypatch.setattr(doctor, "settle", refuse)
    assert (doctor._rows().grade, doctor._rows().hint) == (
        "fail",
        "ESS_ROWS is 'fast', must be one of others",
    )


def test_a_missing_package_is_a_failure_with_its_remedy():
    check = doctor._package("ess-no-such-package")
    assert (check.grade, check.state) == ("fail", "missing")
    assert "ess[serve]" in check.hint


@pytest.mark.parametrize(("version", "grade"), [("3.6.2", "ok"), ("3.60.0", "warn")])
def test_another_triton_than_the_tuned_one_is_said(monkeypatch: pytest.MonkeyPatch, version, grade):
    monkeypatch.setattr(doctor.metadata, "version", {"triton": version}.__getitem__)
    [check] = doctor._triton()
    assert (check.grade, check.state) == (grade, version)
    assert ("pip install 'triton==3.6.*'" in check.hint) == (grade == "warn")


def test_a_machine_without_a_device_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    why = "there is no CUDA driver here"
    monkeypatch.setattr(doctor.driver, "why_missing", lambda: f'{why}: "cuda" is a library.')
    monkeypatch.setenv("PATH", str(tmp_path))
    [check] = doctor._device()
    assert (check.grade, check.hint) == ("ok", "")
    assert check.state == f"none ({why}); `ess serve` runs on the CPU"
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    [check] = doctor._device()
    assert (check.grade, check.state) == ("warn", f"nvidia-smi is here, but {why}")
    assert "ess[serve,cuda]" in check.hint


def test_other_tokens_of_a_device_are_a_failure():
    trial = {"device_s": 1.0, "host_s": 2.0, "miss_count": 5, "kernels": ["attention: ours (no X)"]}
    decode, kind = doctor.judged_on_device({"same": True, **trial})
    assert (decode.grade, decode.state[:16]) == ("ok", "the CPU's tokens")
    assert (kind.name, kind.state) == ("attention", "ours (no X)")
    assert next(doctor.judged_on_device({"same": False, **trial})).grade == "fail"


EXCHANGED = {"count": 2, "seconds": 3.25, "taken_bytes": 3 << 20, "estimated_bytes": 4 << 20}


def test_what_ranks_of_several_devices_would_get_is_said():
    good = doctor.judged_exchange({**EXCHANGED, "wrong": []})
    assert (good.grade, good.hint) == ("ok", "")
    assert good.state == "2 devices in 3.2 s; an exchange took 3.00 MiB, estimated were 4.00 MiB"
    more = doctor.judged_exchange({**EXCHANGED, "taken_bytes": 5 << 20, "wrong": []})
    assert (more.grade, "underestimated" in more.hint) == ("warn", True)
    wrong = doctor.judged_exchange({**EXCHANGED, "wrong": [1]})
    assert wrong.grade == "fail"
    assert wrong.hint.startswith("wrong sums on devices 1: do not serve with --dp-size")


def rank_that(text: str) -> tuple[str, ...]:
    """Its words are how many ranks there are, which it is, and a port."""
    return (sys.executable, "-c", f"import signal, sys; rank = int(sys.argv[2]); {text}")


def test_a_rank_that_fails_is_named_with_its_device_and_the_others_are_ended():
    program = rank_that("sys.exit('no NCCL here') if rank == 1 else signal.pause()")
    with pytest.raises(Unavailable, match=r"^rank 1 on cuda:1 cannot exchange: no NCCL here$"):
        exchange_check.trial(3, program=program)


def test_ranks_that_say_nothing_in_time_are_named():
    said = msgspec.json.encode(
        exchange_check.RankTrial(same=True, taken_bytes=1, estimated_bytes=2)
    ).decode()
    silent = (
        r"^nothing after 0\.2 s from rank 0 on cuda:0, rank 1 on cuda:1; the last line of rank 0"
    )
    with pytest.raises(Unavailable, match=f"{silent}: nothing in its log, exit code -9$"):
        exchange_check.trial(2, program=rank_that("signal.pause()"), limit_s=0.2)
    told = exchange_check.trial(2, program=rank_that(f"print({said!r})"))
    assert (told.count, told.wrong, told.taken_bytes, told.estimated_bytes) == (2, (), 1, 2)


def test_devices_that_cannot_exchange_are_no_reason_not_to_serve(monkeypatch: pytest.MonkeyPatch):
    answer = Answer(fault="rank 1 on cuda:1 cannot exchange")
    monkeypatch.setattr(doctor, "answer_of", lambda *words, limit_s: answer)
    check = doctor._device_ranks(2)
    assert (check.grade, check.state) == ("warn", "no exchange of 2")
    assert check.hint == f"{answer.fault}; until that is mended serve without --dp-size"


@pytest.mark.slow
def test_the_trial_decodes_both_ways():
    from ess.engine.process.checks.selfcheck import trial

    outcome = trial()
    assert outcome.same
    assert outcome.miss_count > 100


def test_a_key_that_no_header_carries_is_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str],
):
    assert cli.main(["top", "--api-key", "sec\nret"]) == 2
    said = capsys.readouterr().err
    assert "the API key has a character that is not visible ASCII" in said
    assert "ret" not in said
