"""`ess serve --dp-size 2`: two servers that divide the experts, from their start to their end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ess.models.load import load_model
from tests.server.harness import until
from tests.support.few import few
from tests.support.greedy import greedy
from tests.support.kin import is_running, kin, told, worker_of
from tests.support.process import Process
from tests.support.routers import ADVISED, SMG, Router, ask

pytestmark = pytest.mark.slow

FLAGS = ("--dp-size", "2", "--dtype", "f32", "--row", "f32", "--recover", "resume")
PROMPT = [5 + 7 * at % 90 for at in range(70)]
COUNT = 40
ASKED = {"model": "ess-embedded", "prompt": "The server is", "max_tokens": 5}


@contextlib.contextmanager
def said(folder: Path) -> Iterator[tuple[Process, Path]]:
    """Two ranks, and the file that has their log. An engine that comes back imports for a second
    or two, so a router has time to see that it was gone."""
    log = folder / "log"
    with (
        log.open("w") as lines,
        Process(*FLAGS, stderr=lines.fileno(), has_real_children=True) as process,
    ):
        yield process, log


def engines(process: Process) -> list[int]:
    return [pid for pid in kin(process.process.pid) if "process.rank" in told(pid, "cmdline")]


def tokens(url: str, count: int = COUNT) -> Iterator[int]:
    """Of a streamed answer, as they come."""
    asked = {
        "model": "ess-embedded",
        "prompt": PROMPT,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    yield from streamed(answer)
    connection.close()


def streamed(answer: http.client.HTTPResponse) -> Iterator[int]:
    assert answer.status == 200, answer.read()
    for line in answer:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                yield from choice.get("token_ids") or ()


def test_two_ranks_answer_lose_one_another_and_end():
    """Rank 1's engine is killed while only rank 0 has a request: the request goes on behind it."""
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    with Process(*FLAGS, "--mtp", "2", "--sbo", "combine-shared") as process:
        urls = [line["url"] for line in process.greeting["processes"]]
        assert len(set(urls)) == 2
        for url in urls:
            assert list(tokens(url)) == expected
        before = engines(process)
        assert len(before) == 2
        going = tokens(urls[0])
        first = [next(going), next(going)]
        [victim] = {*kin(process.greeting["processes"][1]["pid"])} & {*before}
        os.kill(worker_of(victim), signal.SIGKILL)
        assert [*first, *going] == expected
        assert not {*before} & {*engines(process)}, "an engine has outlived its group"
        assert list(tokens(urls[1])) == expected
        everybody = [process.process.pid, *kin(process.process.pid)]
        process.process.terminate()
        assert process.ended(120) == 0
        until(lambda: not any(map(is_running, everybody)), "the end of everybody")


@pytest.mark.parametrize("victim", few([0], all_of=[0, 1]))
def test_a_server_that_is_killed_is_missed_and_comes_back(tmp_path, victim):
    """With it its engine ends. Rank 0 is where the ranks meet; a router follows what each says."""
    expected = greedy(load_model(form="f32"), PROMPT, COUNT)
    with said(tmp_path) as (process, log):
        lines = process.greeting["processes"]
        urls = [line["url"] for line in lines]
        other = urls[1 - victim]
        with Router(SMG, urls, tmp_path / "smg.txt", *ADVISED) as router:
            going = tokens(other)
            first = [next(going), next(going)]
            os.kill(lines[victim]["pid"], signal.SIGKILL)
            until(lambda: ask(f"{other}/ready").status == 503, "the other's not being ready")
            until(lambda: not router.healthy(), "the router's word of both")
            assert [*first, *going] == expected
            until(lambda: router.healthy() == {*urls}, "the router's word of both", within_s=60)
            for url in urls:
                assert list(tokens(url)) == expected
            assert router.ask("/v1/completions", ASKED).status == 200
        says = rf"rank-{1 - victim}: .*rank {victim} \(member {victim} of stage 0\) is lost"
        assert re.search(says, log.read_text()), "neither the engine's message nor its end"


def test_ranks_that_cannot_start_say_why():
    with pytest.raises(
        AssertionError, match="cannot be used where one command starts several ranks"
    ):
        Process("--dp-size", "2", "--uds", "/tmp/never.sock")
