"""A log of records: whatever is written, each line is JSON, and no line of text is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import traceback

import pytest

from ess.server.process.logs.log_pipe import Carrier
from ess.server.process.logs.log_records import LINE_BYTES_MAX, Records, record
from tests.server.harness import until
from tests.support.process import Process

FAULT = """Traceback (most recent call last):
  File "a.py", line 1, in <module>
    1 / 0

    ~~^~~
ZeroDivisionError: division by zero
"""
TEXT = (
    f'ess: one\n\n{FAULT}two \u00e9 "q"\n'
    + record("info", "request", status=200).decode()
    + "\ndecode-3: "
    + record("info", "three").decode()
    + '\nx: {"time": 5\nlast, without an end'
)


def read(made: bytes) -> list[dict[str, object]]:
    assert made.endswith(b"\n")
    return [json.loads(line) for line in made.splitlines()]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_length_make_the_same_records(seed: int):
    chance, left, records, made = random.Random(seed), TEXT.encode(), Records(), b""
    while left:
        size = chance.choice((1, 2, 7, 1000))
        piece, left = left[:size], left[size:]
        made += records.feed(piece)
    lines = read(made + records.end())
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "one"),
        ("error", FAULT.rstrip()),
        ("info", 'two \u00e9 "q"'),
        ("info", "request"),
        ("info", "three"),
        ("info", 'x: {"time": 5'),
        ("info", "last, without an end"),
    ]
    assert lines[3]["status"] == 200
    assert [line.get("process") for line in lines] == [None] * 4 + ["decode-3", None, None]


def deep(count: int) -> Exception:
    return ExceptionGroup("deep", [LEAF, deep(count - 1)]) if count else LEAF


LEAF = ValueError("a")
PAIR = ExceptionGroup("pair", [LEAF, OSError("b\n c")])


@pytest.mark.parametrize(
    "group",
    [
        ExceptionGroup("last", [LEAF, PAIR]),
        ExceptionGroup("first", [PAIR, LEAF]),
        ExceptionGroup("alone", [PAIR]),
        ExceptionGroup("middle", [LEAF, ExceptionGroup("deep", [PAIR, PAIR]), PAIR, LEAF]),
        ExceptionGroup("more than are shown", [PAIR] * 17),
        ExceptionGroup("deeper than is shown", [deep(12), LEAF]),
    ],
    ids=lambda group: group.message,
)
def test_a_traceback_of_a_group_is_one_record(group: ExceptionGroup):
    try:
        raise group
    except ExceptionGroup:
        fault = traceback.format_exc()
    made = read(Records().feed(f"one\n{fault}two\n".encode()))
    levels = [(line["level"], line["message"]) for line in made]
    assert levels == [("info", "one"), ("error", fault.rstrip()), ("info", "two")]


@pytest.mark.parametrize("name", ["", "rank-1: "])
def test_a_record_in_the_middle_of_a_traceback_is_kept(name: str):
    """Several processes write at once."""
    records, other = Records(), f"{name}{record('info', 'request').decode()}\n"
    first, *behind = FAULT.splitlines(keepends=True)
    made = records.feed((first + behind[0] + other + "".join(behind[1:])).encode())
    assert [(line["level"], line["message"]) for line in read(made)] == [
        ("info", "request"),
        ("error", FAULT.rstrip()),
    ]


@pytest.mark.parametrize("noise", [b"\xff\xfe\x00\x1b[1m", b'"}\\', b"\xed\xa0\x80"])
def test_any_bytes_become_a_line_of_json(noise: bytes):
    records = Records()
    [line] = read(records.feed(noise + b"\n"))
    assert line["level"] == "info"
    assert records.end() == b""


def test_a_line_and_a_traceback_without_an_end_are_cut():
    records = Records()
    made = records.feed(b"x" * (LINE_BYTES_MAX + 1)) + records.feed(b"y\n")
    assert [len(line["message"]) for line in read(made)] == [LINE_BYTES_MAX + 1, 1]
    made = records.feed(b"Traceback (most recent call last):\n" + b"  x\n" * 5000)
    assert {line["level"] for line in read(made + records.end())} == {"error", "info"}


def test_what_is_lost_is_a_record_too():
    inside, into = os.pipe()
    reader, outside = os.pipe()
    carrier = Carrier(inside, outside, lines=Records())
    carrier.start()
    for _ in range(400):
        os.write(into, b"x" * 4095 + b"\n")
    os.close(into)
    said = b""
    while b"were lost" not in said:
        said += os.read(reader, 1 << 16)
    assert "bytes of this log were lost" in str(read(said)[-1]["message"])
    carrier.join()
    for end in (inside, reader, outside):
        os.close(end)


@pytest.mark.slow
def test_a_server_s_log_and_its_requests_are_records():
    flags = ("--engine", "paced", "--drain-s", "1", "--log-format", "json", "--request-log")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    named = {"x-request-id": "mine", "traceparent": trace, "x-session-id": "talk"}
    with Process(*flags).wait_ready() as process:
        before = time.time()
        list(process.stream(max_tokens=5, extra_headers=named))
        assert process.status("/v1/completions") == 405
        until(lambda: process.status("/ready") == 200, "the answer to a probe")
        process.process.send_signal(signal.SIGTERM)
        said = process.process.communicate()[1]
    lines = read(said.encode())
    assert all(line["time"] and line["level"] == "info" for line in lines)
    [told] = [line for line in lines if line.get("request_id") == "mine"]
    assert told["trace_id"] == trace.split("-")[1]
    assert (told["session_id"], told["route"], told["status"]) == ("talk", "/v1/completions", 200)
    assert (told["message"], told["made_tokens"]) == ("request", 5)
    assert 0 < told["first_s"] <= told["took_s"] <= time.time() - before
    assert any(line.get("status") == 405 for line in lines)
    assert any(str(line["message"]).startswith("draining") for line in lines)
    assert "The server is" not in said
