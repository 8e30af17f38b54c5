"""The log for people: sentences of ours have their time, other lines stay as they are."""

from __future__ import annotations

import os
import random
import re
from datetime import datetime, timedelta

import pytest

from ess.server.process.logs.log_pipe import unblocked_stderr
from ess.server.process.logs.log_times import TimedLines, is_journal, passed_on

TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d) (.*)")
OTHERS = [
    "ValueError: no",
    "",
    "  ess: indented",
    "Ess: x",
    "esse: x",
    "RANK-1: ess: x",
    "w: essay",
]
OURS = ["ess: ready", "rank-1: ess: ready", "decode-12: ess: \u00e9", "router: ess: x", "ess: "]


@pytest.mark.parametrize("seed", range(10))
def test_only_our_sentences_get_a_time_however_they_come(seed: int):
    chance = random.Random(seed)
    lines = chance.choices(OTHERS + OURS, k=20)
    left, timed, made = "\n".join(lines).encode(), TimedLines(), b""
    while left:
        size = chance.choice((1, 2, 7, 1000))
        made += timed.feed(left[:size])
        left = left[size:]
    written = (made + timed.end()).decode().removesuffix("\n").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    assert len(written) >= len(lines)
    for line, shown in zip(lines, written, strict=False):
        match = TIME.fullmatch(shown)
        assert (match[2] if match else shown) == line
        assert bool(match) == (line in OURS)
    assert not any(written[len(lines) :])


def test_the_time_is_that_of_the_sentence():
    match = TIME.fullmatch(TimedLines().feed(b"ess: now\n").decode().rstrip("\n"))
    assert match is not None
    said_at = datetime.fromisoformat(match[1])
    assert timedelta(0) <= datetime.now(said_at.tzinfo) - said_at < timedelta(minutes=5)


@pytest.mark.parametrize(
    ("form", "in_journal", "shown"),
    [
        ("text", False, rf"{TIME.pattern[:-4]}ess: one\nother\n"),
        ("text", True, r"ess: one\nother\n"),
        ("plain", False, r"ess: one\nother\n"),
        ("json", True, r'\{"time":.*"message":"one"\}\n\{"time":.*"message":"other"\}\n'),
    ],
)
def test_the_journal_gets_no_second_time(form, in_journal, shown, capfd, monkeypatch):
    held = os.fstat(2)
    stream = f"{held.st_dev}:{held.st_ino if in_journal else held.st_ino + 1}"
    monkeypatch.setenv("JOURNAL_STREAM", stream)
    with unblocked_stderr(form):
        os.write(2, b"ess: one\nother\n")
    said = capfd.readouterr().err
    assert re.fullmatch(shown, said), said


def test_a_descriptor_is_the_journal_s_by_device_and_inode():
    reader, writer = os.pipe()
    held = os.fstat(writer)
    assert is_journal(writer, {"JOURNAL_STREAM": f"{held.st_dev}:{held.st_ino}"})
    for other in ("", "8:1", f"{held.st_ino}:{held.st_dev}", "journal"):
        assert not is_journal(writer, {"JOURNAL_STREAM": other})
    assert not is_journal(writer, {})
    os.close(reader)
    os.close(writer)


def test_only_the_process_that_writes_the_log_adds_times():
    assert [passed_on(form) for form in ("text", "plain", "json")] == ["plain", "plain", "json"]
