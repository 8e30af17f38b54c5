"""`ess-bench step --arrivals`: what it counts, and that its rows come."""

from __future__ import annotations

import json

import pytest

from ess.bench import cli
from ess.bench.engine import arrivals
from ess.bench.engine.arrivals import ArrivingPrompts, rows_of


def test_prompts_enter_together_and_more_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts of 40 tokens: a step of 159 holds four of them, and one by one takes eight."""
    load = ArrivingPrompts(requests=8, prompt=40, output=30, mtp=2, chunk_tokens=159)
    assert load.pack == 4
    monkeypatch.setattr(arrivals, "PACKS", 1)
    pack, median, last = rows_of(load)
    assert (pack.baseline, len(pack.samples)) == ("one by one", 1)
    assert median.config["steps"] == 3, "two for the prompts, one more for the last first tokens"
    assert median.config["steps_before"] == 9
    assert last.baseline_value == pytest.approx(2 * 2 * pack.value / 1e3)
    assert last.value >= median.value


def test_the_command_prints_its_rows(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["step", "--arrivals", "2", "--smoke", "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["cpu"]
    names = [row["name"] for row in document["rows"]]
    assert names == [
        f"{name}, thread time"
        for name in ("a pack of 2 prompts", "first token, median", "first token, last")
    ]


def test_no_arrivals_are_refused(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["step", "--arrivals", "0"]) != 0
    assert "--arrivals 0: between 1 and" in capsys.readouterr().err
