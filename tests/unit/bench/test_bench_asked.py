"""The load: what is asked, and when."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ess.bench.load import prompts
from ess.bench.load.load import RequestFlags
from ess.bench.load.prompts import LoadRequest, Prompts, asked_of, read_prompts
from ess.errors import BadInput
from ess.sim.serving.arrivals import Arrival
from ess.sim.serving.goodput import Objective
from ess.sim.serving.traffic import Mix, draw

EASY = Objective(ttft_s=1e9, tpot_s=1e9)
IDS = np.random.default_rng(0).integers(0, 4096, size=200_000).tolist()


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own reference takes a second to be made into ids."""
    monkeypatch.setattr(prompts, "token_ids", lambda: (IDS, "ids"))


# ---- what is asked, and when


def mix(**more: Any) -> Mix:
    return Mix(**{"rate": 4.0, "count": 4000, "prompt_tokens": 96, "output_tokens": 8, **more})


@pytest.mark.parametrize("burst", [0.25, 1.0, 16.0])
def test_gaps_have_the_rate_and_the_spread_that_was_asked_for(burst: float) -> None:
    gaps = np.diff([arrival.at_s for arrival in draw(mix(burst=burst), seed=3)])
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burst**-0.5, rel=0.1)


def test_a_burst_of_one_is_the_poisson_process_that_it_always_was() -> None:
    rng = np.random.default_rng([3, 5])
    gaps = rng.exponential(1 / 4.0, 4000)
    assert [each.at_s for each in draw(mix(), seed=3)] == (np.cumsum(gaps) - gaps[0]).tolist()


@pytest.mark.parametrize("burst", [0.0, -1.0, float("nan"), float("inf")])
def test_a_burst_that_is_no_shape_is_refused(burst: float) -> None:
    with pytest.raises(BadInput, match="burst"):
        mix(burst=burst)


def arrivals(*lengths: int, blocks: tuple[int, ...] = ()) -> list[Arrival]:
    return [
        Arrival(at_s=float(at), prompt_tokens=length, output_tokens=3, prefix_blocks=blocks)
        for at, length in enumerate(lengths)
    ]


def prompts_of(kind: Any, *lengths: int, **more: Any) -> list[list[int]]:
    asked = asked_of(arrivals(*lengths), Prompts(kind=kind, **more))
    assert [each.at_s for each in asked] == list(range(len(lengths)))
    assert {each.output_tokens for each in asked} == {3}
    return [list(each.prompt) for each in asked]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["text", "random", "shared"])
def test_prompts_have_their_lengths_and_a_seed_makes_them_again(kind: str) -> None:
    lengths = [1, 63, 64, 65, 700_001]
    made = prompts_of(kind, *lengths, seed=2)
    assert [len(prompt) for prompt in made] == lengths
    assert made == prompts_of(kind, *lengths, seed=2)
    assert made != prompts_of(kind, *lengths, seed=3)
    assert min(map(min, made)) >= 0


def test_prompts_of_a_text_do_not_begin_alike_and_shared_ones_do() -> None:
    apart = prompts_of("text", *[256] * 60)
    assert len({tuple(prompt[:64]) for prompt in apart}) == 60
    shared = prompts_of("shared", *[256] * 60, share=0.75, groups=3)
    assert len({tuple(prompt[:192]) for prompt in shared}) == 3
    assert len({tuple(prompt) for prompt in shared}) == 60
    assert prompts_of("shared", 256, 256, share=0.0) == prompts_of("text", 256, 256)
    whole = prompts_of("shared", *[256] * 9, share=1.0, groups=1)
    assert len({tuple(prompt) for prompt in whole}) == 1


def test_a_trace_says_which_blocks_are_shared() -> None:
    load = [*arrivals(1500, blocks=(7, 8, 9)), *arrivals(1300, blocks=(7, 8, 4))]
    first, second = (each.prompt for each in asked_of(load, Prompts()))
    assert (len(first), len(second)) == (1500, 1300)
    assert first[:1024] == second[:1024]
    assert first[1024:1300] != second[1024:]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"share": 1.5}, "--share 1.5"),
        ({"share": float("nan")}, "--share nan"),
        ({"groups": 0}, "--groups 0"),
    ],
)
def test_prompts_that_cannot_be_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Prompts(**given)


def test_more_prompts_than_places_to_begin_at_are_refused() -> None:
    with pytest.raises(BadInput, match="places to begin at"):
        asked_of(arrivals(*[1] * 200_000), Prompts())


def test_conversations_and_lines_of_a_file(tmp_path: Path) -> None:
    talk = [
        {"id": 1, "conversations": [{"from": "human", "value": "Why?"}, {"value": "Because."}]},
        {"conversations": [{"from": "human", "value": "no reply"}]},
        {"conversations": [{"value": "How?"}, {"value": "word " * 500}, {"value": "more"}]},
    ]
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(talk))
    made = read_prompts(path, output_max=20, count=9)
    assert [(each.prompt, each.at_s) for each in made] == [("Why?", 0.0), ("How?", 0.0)]
    assert 1 <= made[0].output_tokens < 20 == made[1].output_tokens
    path.write_text('{"prompt": "a", "output_tokens": 7}\n\n{"prompt": "b"}\n{"prompt": " "}\n')
    made = read_prompts(path, output_max=20, count=9)
    assert made == [LoadRequest(0.0, "a", 7), LoadRequest(0.0, "b", 20)]
    assert read_prompts(path, output_max=20, count=1) == made[:1]
    separated = "one\u2028two\x85three"
    path.write_text(f'{{"prompt": "{separated}"}}\r\n{{"prompt": "b"}}\r\n')
    made = read_prompts(path, output_max=20, count=9)
    assert [each.prompt for each in made] == [separated, "b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no prompt"),
        ("[]", "holds no prompt"),
        ('[{"conversations": 3}]', "conversations"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2"),
        ('{"prompt": "a", "output_tokens": 0}', "line 1: an output of 0"),
        ("[1", "--file"),
    ],
)
def test_a_file_that_is_none_is_refused_by_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=says):
        read_prompts(path, output_max=20, count=9)
    with pytest.raises(BadInput, match="cannot be read"):
        read_prompts(tmp_path, output_max=20, count=9)


def test_flags_become_requests(tmp_path: Path) -> None:
    at_once = RequestFlags(requests=5, prompt="70").asked()
    assert [(each.at_s, len(each.prompt)) for each in at_once] == [(0.0, 70)] * 5
    spaced = RequestFlags(requests=5, prompt="70", rate=2.0).asked()
    assert sorted({each.at_s for each in spaced}) == [each.at_s for each in spaced]
    assert [each.prompt for each in spaced] == [each.prompt for each in at_once]
    path = tmp_path / "t.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {1000 * at}, "input_length": 600, "output_length": 2, '
            '"hash_ids": [1, 2]}\n'
            for at in range(3)
        )
    )
    traced = RequestFlags(requests=2, trace=path).asked()
    assert [(each.at_s, each.output_tokens) for each in traced] == [(0.0, 2), (1.0, 2)]
    faster = RequestFlags(requests=2, trace=path, rate=10.0).asked()
    assert [each.at_s for each in faster] == pytest.approx([0.0, 0.1])
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    filed = RequestFlags(requests=9, file=path, rate=2.0, out=5).asked()
    assert [(each.prompt, each.output_tokens) for each in filed] == [("a", 5), ("b", 5)]
    assert filed[1].at_s > filed[0].at_s == 0.0
