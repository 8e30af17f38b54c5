"""The end of `ess serve` when something is broken: its log, its engine, its clients, itself."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ess.server.process.logs.log_pipe import KEPT_BYTES, Carrier
from ess.server.process.own_folder import LOCK, own_folder, remove_dead
from tests.attacks.logs import disk_full, full_and_unread, reader_gone
from tests.server.harness import until
from tests.support.few import few
from tests.support.process import ROOT, RUN, Process

END_S = 45.0
PACED = ("--engine", "paced", "--pace-ms", "20", "--drain-s", "1")
BROKEN = [reader_gone, disk_full, full_and_unread]


def ended(process: Process, engine: int) -> int:
    code = process.ended(END_S)
    until(lambda: not Path(f"/proc/{engine}").exists(), "the engine's end")
    return code


@pytest.mark.slow
@pytest.mark.parametrize("log", few(BROKEN[1:], all_of=BROKEN))
def test_sigterm_ends_a_server_whose_log_is_broken(log):
    with log() as stderr, Process(*PACED, stderr=stderr).wait_ready() as process:
        engine = process.engine_pid
        with process.stream() as events:
            next(events)
            process.process.send_signal(signal.SIGTERM)
            assert ended(process, engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize("log", few(BROKEN[:1], all_of=BROKEN))
def test_a_lost_engine_ends_a_server_whose_log_is_broken(log):
    flags = (*PACED, "--engine-restarts", "0")
    with log() as stderr, Process(*flags, stderr=stderr).wait_ready() as process:
        process.kill_engine()
        assert process.ended(END_S) == 1


@pytest.mark.slow
def test_sigterm_ends_a_server_with_a_stopped_engine_and_a_client_that_reads_nothing():
    with Process(*PACED, has_real_children=True).wait_ready() as process:
        port = int(process.url.rpartition(":")[2])
        body = b'{"prompt": "x", "stream": true, "max_tokens": 2000, "ignore_eos": true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
            % len(body)
        )
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head + body)
            assert client.recv(1)
            engine = process.engine_pid
            os.kill(engine, signal.SIGSTOP)
            process.process.send_signal(signal.SIGTERM)
            assert ended(process, engine) == 0
        assert "1 request is still open after 1 s" in process.process.communicate()[1]


STUCK = """
import time
from ess.server.commands import cli
from ess.server.http.routes import status_routes
from ess.server.process import lifecycle

lifecycle.HANG_S = 1.0

async def version(request):
    print("stuck", flush=True)
    {hang}

status_routes.version.__code__ = version.__code__
status_routes.time = time
raise SystemExit(cli.main())
"""
LOOPS = ("while True: pass", "version")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "where"),
    [
        *few([LOOPS], all_of=[LOOPS, ("time.sleep(1e6)", "version")]),
        ("_service(request).documents.submit(time.sleep, 1e6)", "_worker"),
    ],
)
def test_sigterm_ends_a_server_that_hangs(hang: str, where: str, monkeypatch):
    """In its event loop, or in the thread that makes documents."""
    monkeypatch.setattr("tests.support.process.RUN", STUCK.format(hang=hang))
    with Process(*PACED).wait_ready() as process:
        engine, port = process.engine_pid, int(process.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert select.select([process.process.stdout], [], [], 60)[0], "it hangs at once"
            assert process.process.stdout.readline() == "stuck\n"
            process.process.send_signal(signal.SIGTERM)
            assert ended(process, engine) == -signal.SIGALRM
        assert f"in {where}" in process.process.communicate()[1], "it says where it hung"


@pytest.mark.slow
def test_a_stopped_engine_does_not_outlive_a_killed_server():
    with Process(*PACED, has_real_children=True).wait_ready() as process:
        engine = process.engine_pid
        os.kill(engine, signal.SIGSTOP)
        process.process.kill()
        assert ended(process, engine) == -signal.SIGKILL


def test_what_a_log_does_not_take_is_counted_and_said():
    inside, into = os.pipe()
    reader, outside = os.pipe()
    carrier = Carrier(inside, outside)
    carrier.start()
    written = 3 * KEPT_BYTES
    os.write(into, b"first\n")
    for _ in range(written // 4096):
        os.write(into, b"x" * 4096)
    os.close(into)
    said = b""
    while b"were lost\n" not in said:
        said += os.read(reader, 1 << 16)
    carrier.join()
    lost = int(said.split(b"ess: ")[1].split()[0])
    assert said.startswith(b"first\n")
    assert lost == written - said.count(b"x") > 0
    for end in (inside, reader, outside):
        os.close(end)


def test_a_dead_server_s_folder_is_removed_and_no_other(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, foreign, elsewhere = (tmp_path / name for name in ("ess-a", "ess-b", "other"))
    for folder in (dead, foreign, elsewhere):
        folder.mkdir()
    for folder in (dead, elsewhere):
        (folder / LOCK).touch()
    (tmp_path / "ess-link").symlink_to(elsewhere)
    with own_folder() as held:
        remove_dead(tmp_path)
        assert Path(held).stat().st_mode & 0o77 == 0
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"ess-b", "ess-link", "other"}


@pytest.mark.slow
def test_a_killed_server_s_folder_is_removed_by_the_next(tmp_path: Path):
    with Process(*PACED, TMPDIR=str(tmp_path)).wait_ready() as process:
        [folder] = tmp_path.glob("ess-*")
        process.process.kill()
        process.process.wait()
        assert folder.is_dir()
    with Process(*PACED, TMPDIR=str(tmp_path)).wait_ready():
        [fresh] = tmp_path.glob("ess-*")
        assert fresh != folder


@pytest.mark.slow
def test_a_server_whose_greeting_nobody_takes_serves_all_the_same():
    flags = ["serve", *PACED, "--port", "0", "--host-bytes", "96MiB", "--max-model-len", "2k"]
    with open("/dev/full", "wb") as full:
        started = subprocess.Popen(
            [sys.executable, "-c", RUN, *flags],
            cwd=ROOT,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    try:
        said = []
        for line in started.stderr:
            said.append(line)
            if "ready after" in line:
                break
        assert "cannot be printed: No space left on device" in said[0]
        started.send_signal(signal.SIGTERM)
        assert started.wait(END_S) == 0
    finally:
        started.kill()
        started.communicate()


@pytest.mark.slow
def test_a_request_log_has_a_line_per_request_and_no_texts():
    with Process(*PACED, "--request-log").wait_ready() as process:
        list(process.stream(max_tokens=5))
        process.status("/v1/completions")
        process.process.send_signal(signal.SIGTERM)
        said = process.process.communicate()[1]
    made = r"ess: request \w+ POST /v1/completions 200 after [\d.]+ s: \d+ prompt tokens, 5 made, "
    assert re.search(made + r"the first after [\d.]+ s\n", said)
    assert re.search(r"ess: request \w+ GET \S+ 405 after [\d.]+ s\n", said)
    assert "The server is" not in said
