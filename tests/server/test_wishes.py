"""Every wish of a client is served, or refused by its name, in the words of every dialect."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from ess.server.dialects.unserved import DEFAULTS, OFF, UNSERVED
from tests.server.harness import TOKENIZER, PacedEngine, Served, counting
from tests.server.test_chat import allowed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SGLANG, TOKENS = "/generate", "/inference/v1/generate"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 5},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    SGLANG: {"text": "x", "sampling_params": {"max_new_tokens": 5}},
    TOKENS: {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 5}},
}
TAGS = {
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def post(served: Served, path: str, body: dict[str, Any]) -> bytes:
    asked = urllib.request.Request(served.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return bytes(answer.read())


def refusal(served: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a refused body, of which the engine has heard nothing."""
    before = len(served.engine.adds)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(served, path, body)
    assert caught.value.code == 400
    assert len(served.engine.adds) == before
    error: dict[str, Any] = json.loads(caught.value.read())["error"]
    return error


def status(served: Served, path: str, body: str) -> int:
    asked = urllib.request.Request(served.url + path, body.encode())
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def with_field(path: str, name: str, value: Any) -> dict[str, Any]:
    """The field where the dialect has sampling parameters."""
    body = BODIES[path]
    if "sampling_params" in body:
        return {**body, "sampling_params": {**body["sampling_params"], name: value}}
    return {**body, name: value}


def sampling(served: Served, path: str, body: dict[str, Any]) -> Any:
    post(served, path, body)
    return served.engine.adds[-1].sampling


# ---- refused


OF_TEXTS = ("skip_special_tokens", "include_stop_str_in_output")
SERVED_AT = {
    CHAT: {
        *("max_completion_tokens", "top_logprobs", "include_reasoning"),
        *("return_tokens_as_token_ids", *OF_TEXTS),
    },
    COMPLETIONS: {
        *("echo", "suffix", "add_special_tokens", "return_tokens_as_token_ids", *OF_TEXTS)
    },
    SGLANG: {
        *("max_new_tokens", "min_new_tokens", "sampling_seed", "json_schema", "structural_tag"),
        *("return_text_in_logprobs", "input_ids", "skip_special_tokens"),
    },
    TOKENS: {*OF_TEXTS},
}


@pytest.mark.parametrize(
    ("path", "name"),
    [(path, name) for path in BODIES for name in UNSERVED if name not in SERVED_AT[path]],
)
def test_what_is_known_and_not_served_is_refused_by_name(plain: Served, path, name):
    wish = False if DEFAULTS.get(name) is True else ["x"]
    error = refusal(plain, path, with_field(path, name, wish))
    assert error["param"] == name
    assert error["message"].startswith(f"{name} is not ")
    if name == "web_search_options":
        assert refusal(plain, path, with_field(path, name, {}))["param"] == name
    if "sampling_params" in BODIES[path]:
        assert refusal(plain, path, {**BODIES[path], name: wish})["param"] == name


@pytest.mark.parametrize("path", BODIES)
def test_a_key_that_wishes_for_nothing_is_no_wish(plain: Served, path):
    nothing = {name: None for name in UNSERVED if name not in SERVED_AT[path]}
    routers = {"kv_transfer_params": {"a": 1}, "bootstrap_room": 5, "routing_key": "u", "my_ext": 1}
    usual = {"return_hidden_states": False, "separate_reasoning": True, "lora_path": []}
    usual |= {"skip_special_tokens": True}
    post(plain, path, {**BODIES[path], **nothing, **routers, **usual, "user": "u", "store": True})
    marked = "\ufeff" + json.dumps(BODIES[path])  # as editors on Windows begin a file
    assert status(plain, path, marked) == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("form", [float, int])
def test_samplers_that_are_off_ask_for_nothing(plain: Served, path, form):
    """As clients of llama.cpp send them, with their parameters; 0 is off wherever -1 is."""
    off = {name: form(value) for name, value in OFF.items()}
    unused = {"mirostat_tau": 5.0, "xtc_threshold": 0.1, "dry_base": 1.75, "dry_allowed_length": 2}
    unused |= {"dry_sequence_breakers": ["x"], "repeat_last_n": 64, "dynatemp_exponent": 1.0}
    one = {"repeat_penalty": form(1), "n_predict": -1, "samplers": [], "top_n_sigma": 0}
    for given in (off, {**unused, **off, **one}):
        body = {**BODIES[path], **given}
        for name, value in given.items():
            body = {**body, **with_field(path, name, value)}
        post(plain, path, body)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", ["typical_p", "xtc_probability", "top_n_sigma", "do_sample"])
def test_a_sampler_at_another_value_is_refused(plain: Served, path, name):
    for value in (0.5, 2, False) if name == "do_sample" else (0.5, 2, "1", [0]):
        assert refusal(plain, path, with_field(path, name, value))["param"] == name


@pytest.mark.parametrize(
    ("path", "changed", "param", "says"),
    [
        (SGLANG, {"temperature": 0.5}, "temperature", "put it into sampling_params"),
        (TOKENS, {"max_tokens": 5}, "max_tokens", "put it into sampling_params"),
        (SGLANG, {"sampling_params": {"max_tokens": 5}}, "max_tokens", "max_new_tokens"),
        (COMPLETIONS, {"max_new_tokens": 5}, "max_new_tokens", "max_tokens"),
        (CHAT, {"sampling_seed": 5}, "sampling_seed", "seed"),
        (SGLANG, {"top_logprobs_num": 2}, "top_logprobs_num", "return_logprob"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "must come with logprobs"),
        (SGLANG, {"text": ["x"] * 2, "rid": ["a"]}, "rid", "a list of 2"),
        (SGLANG, {"top_logprobs_num": [1, 2]}, "top_logprobs_num", "2 entries for 1 prompt"),
        (COMPLETIONS, {"cache_salt": ""}, "cache_salt", "0 characters"),
        (CHAT, {"cache_salt": "s" * 257}, "cache_salt", "257 characters"),
        (SGLANG, {"extra_key": "s" * 257}, "extra_key", "257 characters"),
        (COMPLETIONS, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "is 0"),
        (COMPLETIONS, {"bad_words": [" "]}, "bad_words", "0 characters"),
        (COMPLETIONS, {"bad_words": ["x"] * 513}, "bad_words", "513 words"),
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "0 ids"),
        (COMPLETIONS, {"allowed_token_ids": [4096]}, "allowed_token_ids", "4096"),
        (COMPLETIONS, {"allowed_token_ids": [5], "regex": "a"}, "allowed_token_ids", "grammar"),
        (COMPLETIONS, {"guided_choice": []}, "guided_choice", "none of them empty"),
        (COMPLETIONS, {"guided_choice": ["a", ""]}, "guided_choice", "none of them empty"),
        (COMPLETIONS, {"guided_json": 3}, "guided_json", "not a schema"),
        (COMPLETIONS, {"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "obj"),
        (
            CHAT,
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            "response_format",
            "give structures and triggers",
        ),
        (
            CHAT,
            {"response_format": {**TAGS, "type": "structural_tag", "triggers": ["<g="]}},
            "response_format",
            "no trigger",
        ),
        (
            COMPLETIONS,
            {"structured_outputs": {"whitespace_pattern": " "}},
            "whitespace_pattern",
            "bounded",
        ),
        (CHAT, {"tools": [TOOL]}, "tools", "no chat template; --chat-template"),
        (
            CHAT,
            {"messages": [{"role": "system", "tools": [TOOL]}, {"role": "user", "content": "x"}]},
            "tools",
            "no chat template",
        ),
        (CHAT, {"add_generation_prompt": False}, "add_generation_prompt", "continue_final_message"),
        (
            CHAT,
            {"continue_final_message": True},
            "messages",
            "with continue_final_message: it must be an assistant's",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(plain: Served, path, changed, param, says):
    error = refusal(plain, path, {**BODIES[path], **changed})
    assert error["param"] == param, error
    assert says in error["message"]


@pytest.mark.parametrize(
    ("path", "changed", "param", "says"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs is 21"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0"),
        (CHAT, {"max_tokens": 9999}, "max_tokens", "max_tokens is 9,999"),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 5000}]}, "messages", "the prompt"),
        (SGLANG, {"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens", "is -1"),
        (SGLANG, {"sampling_params": {"max_new_tokens": 9999}}, "max_new_tokens", "is 9,999"),
        (
            SGLANG,
            {"sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}},
            "min_new_tokens",
            "is 3",
        ),
        (SGLANG, {"top_logprobs_num": 21, "return_logprob": True}, "top_logprobs_num", "is 21"),
        (SGLANG, {"text": ["x"] * 130}, "text", "130 prompts; at most 128"),
        (COMPLETIONS, {"prompt": ["x"] * 130}, "prompt", "130 prompts; at most 128"),
        (COMPLETIONS, {"prompt": ["x"] * 2, "n": 65}, "n", "must be 1 to 64"),
        (TOKENS, {"token_ids": [4096]}, "token_ids", "the token id 4096"),
    ],
)
def test_a_refusal_is_in_the_client_s_own_words(plain: Served, path, changed, param, says):
    error = refusal(plain, path, {**BODIES[path], **changed})
    assert error["param"] == param, error
    assert says in error["message"]


def test_a_grammar_that_is_refused_is_named_by_its_field():
    wishes = [
        (COMPLETIONS, "structured_outputs", {"regex": "a"}),
        (SGLANG, "json_schema", "{}"),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "response_format", {**TAGS, "type": "structural_tag"}),
    ]
    with Served(PacedEngine(counting(2), refuse="grammar (regex): has no end")) as served:
        for (path, field, wish), is_streamed in itertools.product(wishes, (False, True)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                post(served, path, {**with_field(path, field, wish), "stream": is_streamed})
            error = json.loads(caught.value.read())["error"]
            assert (caught.value.code, error["param"]) == (400, field)
            assert error["message"] == f"{field}: grammar (regex): has no end"
        entries = {"text": ["x", "y"], "sampling_params": [{}, {"regex": "a"}]}
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(served, SGLANG, entries)
        error = json.loads(caught.value.read())["error"]
        assert error["message"] == "sampling_params[1]: regex: grammar (regex): has no end"


# ---- served


@pytest.mark.parametrize("path", BODIES)
def test_ids_words_and_lengths_reach_the_engine(plain: Served, path):
    assert sampling(plain, path, with_field(path, "allowed_token_ids", [9, 5])).allowed_ids == {
        5,
        9,
    }
    bad = sampling(plain, path, with_field(path, "bad_words", ["noon", " It is"])).bad_words
    said = [TOKENIZER.decode(word) for word in bad]
    assert said == ["noon", " noon", "It is", " It is"]
    whole = plain.engine.adds[-1].prompt
    post(plain, path, with_field(path, "truncate_prompt_tokens", 1))
    assert plain.engine.adds[-1].prompt == whole[-1:]
    post(plain, path, with_field(path, "truncate_prompt_tokens", -1))
    assert plain.engine.adds[-1].prompt == whole


@pytest.mark.parametrize(("path", "name"), [(COMPLETIONS, "prompt"), (CHAT, "messages")])
def test_what_is_missing_is_named(plain: Served, path, name):
    assert refusal(plain, path, {})["param"] == name


def test_a_prompt_may_be_cut_to_what_the_model_takes(plain: Served):
    post(plain, COMPLETIONS, {"prompt": [7] * 5000, "max_tokens": 1, "truncate_prompt_tokens": -1})
    assert len(plain.engine.adds[-1].prompt) == 4095
    longest = TOKENIZER.longest_chars
    assert longest is not None
    texts = ["x", "e" * (4096 * longest + 1)]
    post(plain, SGLANG, {"text": texts, "sampling_params": [{}, {"truncate_prompt_tokens": 2}]})
    assert [len(add.prompt) for add in plain.engine.adds[-2:]] == [1, 2]


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_reaches_the_engine(plain: Served, path):
    for name in ("cache_salt", "extra_key"):
        post(plain, path, {**BODIES[path], name: "tenant é"})
        assert "tenant é" in plain.engine.adds[-1].salt
    salted = {add.salt for add in plain.engine.adds[-2:]}
    assert len(salted) == 2, "the two keys differ"
    for keys in ({"cache_salt": "1 a", "extra_key": "b"}, {"cache_salt": "1 ab"}):
        post(plain, path, {**BODIES[path], **keys})
    assert len({add.salt for add in plain.engine.adds[-4:]}) == 4, "and so do their joints"
    for body in (BODIES[path], {**BODIES[path], "extra_key": ""}):
        post(plain, path, body)
        assert plain.engine.adds[-1].salt == ""


SPOKEN = [
    *(
        (path, {name: value}, kind)
        for path in (COMPLETIONS, CHAT)
        for name, value, kind in (
            ("guided_json", {"type": "integer"}, "json_schema"),
            ("guided_json", '{"type":"integer"}', "json_schema"),
            ("guided_regex", "a+", "regex"),
            ("guided_choice", ["a", 'b"\n'], "lark"),
            ("guided_grammar", 'start: "a"', "lark"),
            ("structured_outputs", {"grammar": 'root ::= "a"'}, "lark"),
            ("ebnf", 'root ::= "a"', "lark"),
            ("structured_outputs", {"choice": ["a", "b"]}, "lark"),
            ("structured_outputs", {"structural_tag": json.dumps(TAGS)}, "lark"),
            ("response_format", {"type": "structural_tag", **TAGS}, "lark"),
        )
    ),
    (SGLANG, {"sampling_params": {"structural_tag": json.dumps(TAGS)}}, "lark"),
    (SGLANG, {"sampling_params": {"ebnf": 'root ::= "a"'}}, "lark"),
    (TOKENS, {"sampling_params": {"structured_outputs": {"choice": ["a"]}}}, "lark"),
]


@pytest.mark.parametrize(("path", "changed", "kind"), SPOKEN)
def test_every_constraint_becomes_a_grammar(plain: Served, path, changed, kind):
    grammar = sampling(plain, path, {**BODIES[path], **changed}).grammar
    assert grammar is not None
    assert grammar.kind == kind


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((path, {}) for path in (COMPLETIONS, CHAT, TOKENS)),
        (COMPLETIONS, {"echo": True, "logprobs": 0, "return_token_ids": True}),
    ],
)
@pytest.mark.parametrize("last", [True, False])
def test_usage_may_come_with_every_chunk(plain: Served, path, more, last):
    """It counts the tokens up to and with the chunk's: an echo comes with the first token."""
    options = {"include_usage": last, "continuous_usage_stats": True}
    raw = post(plain, path, {**BODIES[path], **more, "stream": True, "stream_options": options})
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert set(counts) >= {1, 2, 3, 4, 5}
    said = [len(choice.get("token_ids", ())) for chunk in chunks for choice in chunk["choices"]]
    assert not more or counts[: len(said)] == [*itertools.accumulate(said)]
    assert (not chunks[-1]["choices"]) == last
    assert all(
        chunk["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 for chunk in chunks[1:]
    )


def test_a_reply_goes_on_with_the_last_message(plain: Served, calling: Served):
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It is \n"}]
    for served, ending in ((plain, "assistant: It is"), (calling, "</think>It is \n")):
        for more in ({}, {"add_generation_prompt": False}):
            body = {**BODIES[CHAT], "messages": asked, "continue_final_message": True, **more}
            post(served, CHAT, body)
            text = TOKENIZER.decode(served.engine.adds[-1].prompt)
            assert text.rstrip().endswith(ending.rstrip())


def test_a_schema_may_be_as_deep_as_a_body(calling: Served):
    for depth in range(940, 1000, 3):
        deep = '{"a":' * depth + "1" + "}" * depth
        for name in ("guided_json", "tools"):
            value = '[{"type":"function","function":{"name":"x","strict":true,"parameters":%s}}]'
            given = value % deep if name == "tools" else deep
            body = f'{{"messages":[{{"role":"user","content":"x"}}],"{name}":{given}}}'
            assert status(calling, CHAT, body) in (200, 400), (depth, name)


# ---- tools


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


NAMED = {"type": "function", "function": {"name": "now"}}


@pytest.mark.parametrize(
    ("changed", "names", "several"),
    [
        ({"tool_choice": "required"}, {"tide", "now"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"tide", "now"}, False),
        ({"tool_choice": NAMED}, {"now"}, False),
        ({"tool_choice": allowed("required", "now")}, {"now"}, True),
        ({"parallel_tool_calls": False}, {"tide", "now"}, False),
        ({"tools": [tool("tide", strict=True), tool("now")]}, {"tide", "now"}, True),
    ],
)
def test_a_tool_choice_becomes_a_grammar(calling: Served, changed, names, several):
    body = {**BODIES[CHAT], "tools": [tool("tide"), tool("now")], **changed}
    grammar = sampling(calling, CHAT, body).grammar
    assert {name for name in ("tide", "now") if f'\\"{name}\\"' in grammar.text} == names
    assert ("call+" in grammar.text) == several


@pytest.mark.parametrize(
    "changed",
    [{}, *({"tool_choice": choice} for choice in ("auto", "none", allowed("auto", "tide")))],
)
def test_a_free_choice_is_free(calling: Served, changed):
    body = {**BODIES[CHAT], "tools": [tool("tide")], **changed}
    assert sampling(calling, CHAT, body).grammar is None


@pytest.mark.parametrize(
    ("changed", "param", "says"),
    [
        ({"tools": [tool("x")] * 129}, "tools", "129 tools; at most 128"),
        ({"tools": [tool("x>")], "tool_choice": "required"}, "tools", "'x>'"),
        ({"tools": [{"function": "x"}], "tool_choice": NAMED}, "tool_choice", "'now'"),
        (
            {"tools": [tool("x", parameters={"properties": {"a": {"enum": []}}})],
             "tool_choice": "required"},
            "tools",
            "'a' allows nothing",
        ),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "response_format",
        ),
        ({"tool_choice": {"type": "function", "function": {"name": "y"}}}, "tool_choice", "'y'"),
        (
            {"tools": [tool("x", parameters={"anyOf": [{}]}, strict=True)]},
            "tools",
            "x is strict",
        ),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_are_refused(calling: Served, changed, param, says):
    error = refusal(calling, CHAT, {**BODIES[CHAT], "tools": [tool("x")], **changed})
    assert error["param"] == param, error
    assert says in error["message"]


def test_a_template_without_tools_takes_their_absence(plain: Served):
    post(plain, CHAT, {**BODIES[CHAT], "tools": [TOOL], "tool_choice": "none"})
