"""Engines are killed under load, and their requests go on: real processes, real sockets."""

from __future__ import annotations

import random
import urllib.request
from pathlib import Path

import pytest

from tests.server.engine_kills import KINDS, STEPPED, Killing, flags_of
from tests.server.harness import until
from tests.server.test_dashboard import metrics
from tests.server.test_fronts import all_are_ready, crowd, several
from tests.server.test_succession import KILLED, has_engine, stopped_said
from tests.support.crowd import Crowd
from tests.support.process import Process
from tests.support.told import told

ROUNDS_MAX = 5


def some_resumed(killing: Killing, *, kill_count: int) -> None:
    """A round whose answers have ended before the kill says nothing: then there is another."""
    for _ in range(ROUNDS_MAX):
        killing.round(kill_count)
        assert killing.found.wrong == []
        assert set(killing.found.answers) == {"went on to its end"}
        if killing.found.resumed_count:
            return
    raise AssertionError(f"no answer was under way in {ROUNDS_MAX} rounds")


@pytest.mark.slow
def test_answers_go_on_behind_kills_and_the_server_says_so():
    with Process(*flags_of(is_paced=True, recover="resume")).wait_ready() as process:
        killing = Killing(process, STEPPED, is_paced=True, drawn=random.Random(5))
        some_resumed(killing, kill_count=2)
        assert "of the lost engine's requests go on" in stopped_said(process)


@pytest.mark.slow
def test_a_model_s_answers_are_those_of_an_engine_that_was_not_killed():
    with Process(*flags_of(is_paced=False, recover="resume")).wait_ready() as process:
        few = [KINDS[1], KINDS[4], KINDS[5]]
        killing = Killing(process, few, is_paced=False, drawn=random.Random(3))
        some_resumed(killing, kill_count=1)


@pytest.mark.slow
def test_streams_of_all_server_processes_go_on():
    with several("--recover", "resume") as process, crowd(process, 6) as going:
        until(lambda: all(raw.count(b"data: ") > 3 for raw in going.texts), "tokens of all")
        process.kill_engine()
        all_are_ready(process)
        before = [raw.count(b"data: ") for raw in going.texts]
        until(
            lambda: all(
                raw.count(b"data: ") > count for raw, count in zip(going.texts, before, strict=True)
            ),
            "more tokens of all",
        )
        assert not any(told(raw).error for raw in going.texts)


@pytest.mark.slow
def test_an_engine_that_dies_every_time_ends_what_waits_and_then_the_server():
    flags = ("--engine", "paced", "--pace-ms", "20", "--recover", "resume")
    endless = {"prompt": "The server is", "max_tokens": 1900, "ignore_eos": True}
    with Process(*flags, "--engine-restarts", "2").wait_ready() as process:
        with Crowd(process.url, [endless, {**endless, "stream": False}]) as going:
            until(lambda: metrics(process.url)["ess_requests_running", ""] == 2, "their running")
            for _ in range(2):
                lost = process.kill_engine()
                until(lambda pid=lost: has_engine(process, pid), "the next engine")
            process.kill_engine()
            until(lambda: all(map(going.is_over, range(2))), "the ends of both")
            assert all(told(raw).error.startswith(KILLED) for raw in going.texts)
        assert process.ended(60) == 1


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("is_damaged", [False, True])
def test_stored_pages_are_read_again_where_they_are_whole(tmp_path: Path, is_damaged: bool):
    """What is on the disk changes under the engine that is killed: no such page is used."""
    flags = ("--prefix-cache-dir", str(tmp_path), "--prefix-cache-disk", "64MiB")
    asked = {"prompt": [7 + n % 900 for n in range(1200)], "logprobs": 1, "temperature": 0}
    asked |= {"max_tokens": 200, "ignore_eos": True}
    with Process(*flags_of(is_paced=False, recover="resume"), *flags).wait_ready() as process:
        with Crowd(process.url, [asked]) as going:
            until(lambda: going.is_over(0), "the answer without a kill")
            [expected] = map(told, going.texts)
        urllib.request.urlopen(urllib.request.Request(process.url + "/flush_cache", b"")).close()
        with Crowd(process.url, [asked]) as going:
            until(
                lambda: metrics(process.url)["ess_disk_moved_pages_total", "stored"] > 36, "pages"
            )
            if is_damaged:
                slab = tmp_path / "pages.slab"
                slab.write_bytes(bytes(slab.stat().st_size))
            process.kill_engine()
            until(lambda: going.is_over(0), "its end")
            assert told(going.texts[0]) == expected
        counts = metrics(process.url)
        assert (counts["ess_disk_moved_pages_total", "loaded"] > 0) == (not is_damaged)
        assert (counts["ess_disk_moved_pages_total", "damaged"] > 0) == is_damaged


def test_a_stream_that_begins_with_a_comment_is_read():
    """An engine that is away for long is behind such a stream."""
    event = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
    assert told(b": keep-alive\n\n" + event).choices[0].text == "a"
