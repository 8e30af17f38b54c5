from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from ess.engine.tokens.grammar import GRAMMAR_BYTES_MAX, Grammar
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2.0},
        {"tokens_max": 0},
        {"tokens_min": 200},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.nan},
        {"logit_bias": {3: 100.5}},
        {"logit_bias": {3: -math.inf}},
        {"logprobs": 21},
        {"logprobs": -1},
        {"seed": 1 << 64},
    ],
)
def test_settings_out_of_range_name_themselves(bad):
    name = next(iter(bad)).replace("tokens_m", "m")
    with pytest.raises(BadInput, match=rf"{name}.* is .*, must be"):
        Sampling(**bad)


WRONG = [None, True, "1", "", b"1", 1.5, math.nan, math.inf, -math.inf, 10**5000, -(10**5000)]
WRONG += [np.int64(1), object(), 1j, [1], [True], [[1.5]], ["a"], {1.5}, {"a"}, {None}, {True}]
WRONG += [(("a",),), ((True,),), (None,), {1: math.nan}, {1: "a"}, {"1": 1.0}, {1.5: 1.0}, range(3)]
RIGHT: dict[str, list[object]] = {
    "temperature": [1.5],
    "top_p": [],
    "min_p": [],
    "repetition_penalty": [1.5],
    "presence_penalty": [1.5],
    "frequency_penalty": [1.5],
    "allowed_ids": [None],
    "bad_words": [[1]],
    "stop": [["a"]],
    "ignore_eos": [True],
    "logprobs": [None],
    "prompt_logprobs": [None],
    "grammar": [None],
}


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling)])
def test_values_of_a_wrong_kind_are_refused(name):
    """Any of them would end in an error in the middle of a step."""
    refused_count = 0
    for value in WRONG:
        if any(value is right or value == right for right in RIGHT.get(name, [])):
            continue
        with pytest.raises(BadInput, match=r"^[a-z_]+ .*(must be|has a string|None)"):
            Sampling(**{name: value})
        refused_count += 1
    assert refused_count > 25


def test_each_bound_is_the_last_that_is_served():
    edges = {
        "tokens_max": (1, 1 << 24),
        "top_k": (0, 1 << 24),
        "seed": (-(1 << 63), (1 << 64) - 1),
        "logprobs": (0, 20),
        "prompt_logprobs": (0, 20),
        "prompt_start": (0, 1 << 24),
    }
    for name, (low, high) in edges.items():
        for value in (low, high):
            assert getattr(Sampling(**{name: value}), name) == value
        for value in (low - 1, high + 1):
            with pytest.raises(BadInput, match="must be"):
                Sampling(**{name: value})
    assert Sampling(tokens_max=5, tokens_min=5).tokens_min == 5
    assert not Sampling(temperature=1e-5).is_greedy
    assert Sampling(temperature=9e-6).is_greedy
    assert Sampling(allowed_ids=frozenset({1})).is_plain is False


def test_ids_that_the_model_lacks_are_named_with_the_vocabulary():
    with pytest.raises(BadInput, match="stop_token_ids id 512: the vocabulary has 512 ids"):
        Sampling(stop_ids=frozenset({3, 512})).check_ids(512)
    with pytest.raises(BadInput, match="logit_bias id -1: the vocabulary has 512 ids"):
        Sampling(logit_bias={-1: 1.0}).check_ids(512)
    with pytest.raises(BadInput, match="allowed_token_ids id 512: the vocabulary"):
        Sampling(allowed_ids=frozenset({512})).check_ids(512)
    with pytest.raises(BadInput, match="bad_words id 600: the vocabulary"):
        Sampling(bad_words=((3, 600),)).check_ids(512)
    Sampling(stop_ids=frozenset({0, 511}), logit_bias={511: -100.0}, top_k=513).check_ids(512)


def test_stops_and_grammars_that_make_no_sense_are_refused():
    with pytest.raises(BadInput, match="stop has a string of 0 characters"):
        Sampling(stop=("",))
    with pytest.raises(BadInput, match="17 stop strings"):
        Sampling(stop=("x",) * 17)
    with pytest.raises(BadInput, match="ignore_eos is not served with a grammar"):
        Sampling(ignore_eos=True, grammar=Grammar("json_object"))
    with pytest.raises(BadInput, match="allowed_token_ids is not served with a grammar"):
        Sampling(allowed_ids=frozenset({1}), grammar=Grammar("json_object"))
    with pytest.raises(BadInput, match="allowed_token_ids has 0 ids"):
        Sampling(allowed_ids=frozenset())
    with pytest.raises(BadInput, match="bad_words forbid every id of allowed_token_ids"):
        Sampling(allowed_ids=frozenset({1, 2}), bad_words=((1,), (2,), (3, 4)))
    with pytest.raises(BadInput, match="0 ids in a word"):
        Sampling(bad_words=((1,), ()))
    with pytest.raises(BadInput, match="1,025 sequences"):
        Sampling(bad_words=((1,),) * 1025)
    with pytest.raises(BadInput, match="kind 'ebnf' is not one of json_schema"):
        Grammar("ebnf", "x")  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="kind regex without a text"):
        Grammar("regex")
    with pytest.raises(BadInput, match=f"{GRAMMAR_BYTES_MAX + 1:,} bytes; at most"):
        Grammar("regex", "é" * (GRAMMAR_BYTES_MAX // 2) + "x")


def test_the_host_is_needed_where_the_past_counts():
    for reason, needs in (
        ("penalties", {"presence_penalty": 0.1}),
        ("penalties", {"frequency_penalty": -0.1}),
        ("penalties", {"repetition_penalty": 1.1}),
        ("min_tokens", {"tokens_min": 1}),
        ("a grammar", {"grammar": Grammar("json_object")}),
        ("bad words", {"bad_words": ((1,), (2, 3))}),
    ):
        [reason_given] = Sampling(**needs).host_reasons()
        assert reason_given.startswith(reason), needs
    assert Sampling(tokens_min=3).host_reasons(2) == ("min_tokens is not reached",)
    assert Sampling(tokens_min=3).host_reasons(3) == ()
    free = Sampling(temperature=1.0, top_p=0.5, stop=("x",), logprobs=3, logit_bias={1: 2.0})
    assert not free.host_reasons()
    assert free.changes_logits
    static = Sampling(allowed_ids=frozenset({1, 2}), bad_words=((1,),))
    assert not static.host_reasons()
    assert static.changes_logits


def test_a_server_can_refuse_without_torch():
    code = (
        "import sys\nfrom ess.engine.tokens import grammar, sampling, stops\n"
        "sys.exit('torch' in sys.modules or 'llguidance' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
