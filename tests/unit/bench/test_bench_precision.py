"""`ess-bench precision`: known logits give known divergences, and what it prints is one form."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from ess.bench import cli
from ess.bench.engine.precision import apart, apart_rows, excerpts_of
from ess.errors import BadInput


def test_known_logits_give_known_divergence_and_leads() -> None:
    exact = torch.tensor([[[0.0, 0.0], [3.0, 1.0], [2.0, 1.5]]])
    other = torch.tensor([[[math.log(3), 0.0], [3.0, 1.0], [1.0, 2.0]]])
    difference = apart(exact, other)
    assert difference.kl[0, 0] == pytest.approx(
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    )
    assert difference.kl[0, 1] == 0
    assert difference.leads == (0.5,)
    assert difference.flipped == pytest.approx(1 / 3)


def test_equal_logits_are_not_apart() -> None:
    logits = torch.randn(2, 5, 7)
    difference = apart(logits, logits)
    assert (difference.mean, difference.leads) == (0, ())
    divergence, flips = apart_rows("x", difference, {}, ("y", 1.0), target=10.0)
    assert (divergence.ratio, divergence.met, flips.value) == (None, None, 0)


def test_a_row_says_what_came_before_it_and_how_much_was_flipped() -> None:
    exact = torch.tensor([[[1.0, 0.5]]])
    divergence, flips = apart_rows("x", apart(exact, exact.flip(-1)), {"ctx": 1}, ("y", 10.0))
    assert divergence.ratio == pytest.approx(10.0 / divergence.value)
    assert (divergence.target, divergence.samples) == (None, [divergence.value])
    assert flips.config == {"ctx": 1, "flipped": "1 of 1", "leads": "0.50"}


def test_excerpts_are_spread_over_the_text_and_end_with_it() -> None:
    lines = excerpts_of(range(1000), 200, count=3, tokens=50)
    assert [(line[0], line[-1], len(line)) for line in lines] == [
        (0, 249, 250),
        (375, 624, 250),
        (750, 999, 250),
    ]
    assert list(excerpts_of(range(250), 200, count=1, tokens=50)[0]) == list(range(250))
    with pytest.raises(BadInput, match="the text has 249 tokens, an excerpt needs 250"):
        excerpts_of(range(249), 200, count=1, tokens=50)
    with pytest.raises(BadInput, match="0 excerpts of 50 tokens"):
        excerpts_of(range(250), 200, count=0, tokens=50)


def test_the_command_prints_one_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("The module provides a portable way of using the operating system. " * 40)
    asked = ["--ctx", "300", "--excerpts", "1", "--tokens", "3", "--mode", "da"]
    assert cli.main(["precision", *asked, "--text", str(text), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert len(rows) == 10
    served = rows["mean KL, bf16, fp8 rows and keys, against float32"]
    assert 0 < served["value"] < 0.1
    assert served["config"]["ctx"] == 300
    assert rows["flipped tokens, DA against NONE, float32"]["value"] == 0
    assert rows["mean KL, DA against NONE, float32"]["value"] < 1e-9


def test_a_mode_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["precision", "--ctx", "300", "--mode", "sideways"]) != 0
    assert "--mode sideways" in capsys.readouterr().err
