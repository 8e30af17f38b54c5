"""Fields of a chat that clients of vLLM, SGLang, DeepSeek and Z.ai know, and OpenAI's do not."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from ess.engine.tokens.chance import Chance
from ess.errors import BadInput
from ess.models.chat.styles import DeepSeekStyle, TemplateStyle
from ess.server.dialects.forms.calls import rules_of
from ess.server.dialects.logprobs import completion_logprobs
from ess.server.dialects.prompts import PromptReader
from ess.server.dialects.schemas import ChatAsk, MessagesAsk, ResponsesAsk, TokenizeAsk
from ess.server.process.bounds import LOOP_BODY_BYTES
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "When is high tide?"}]
THOUGHT, SAID = "The tide depends on the moon.", "At noon."
THINKING = {"chat_template_kwargs": {"thinking": True}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = PacedEngine(saying(f"{THOUGHT}</think>{SAID}"))
    with Served(engine, style=DeepSeekStyle(), is_marked=True) as made:
        yield made


def post(served: Served, path: str, **body: Any) -> Any:
    sent = json.dumps({"max_tokens": 200, **body}).encode()
    with urllib.request.urlopen(urllib.request.Request(served.url + path, sent)) as answer:
        return json.loads(answer.read())


def stream(served: Served, path: str, **body: Any) -> list[Any]:
    sent = json.dumps({"max_tokens": 200, **body, "stream": True}).encode()
    with urllib.request.urlopen(urllib.request.Request(served.url + path, sent)) as answer:
        events = answer.read().decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(served.engine.adds[-1].prompt)


# ---- what comes back


@pytest.mark.parametrize("more", [{}, THINKING], ids=["plain", "thinking"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_chat_s_token_ids_come_whole_and_in_a_stream(served: Served, more: Any, n: int):
    body = {"messages": ASKED, "return_token_ids": True, "n": n, **more}
    whole = post(served, CHAT, **body)
    made = [*TOKENIZER.encode(f"{THOUGHT}</think>{SAID}"), 1]
    assert whole["prompt_token_ids"] == served.engine.adds[-1].prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [made] * n
    first, *chunks = stream(served, CHAT, **body)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks)
    for index in range(n):
        streamed = [
            token
            for chunk in (first, *chunks)
            if chunk["choices"][0]["index"] == index
            for token in chunk["choices"][0]["token_ids"]
        ]
        assert streamed == made


def test_a_completion_s_stream_has_the_prompt_s_ids_once(served: Served):
    body = {"prompt": [[5, 6], [7]], "return_token_ids": True, "n": 2}
    choices = [chunk["choices"][0] for chunk in stream(served, COMPLETIONS, **body)]
    told = {c["index"]: c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c}
    assert told == {0: [5, 6], 1: [5, 6], 2: [7], 3: [7]}
    assert sum("prompt_token_ids" in choice for choice in choices) == 4


def test_without_the_wish_no_ids_come(served: Served):
    whole = post(served, CHAT, messages=ASKED)
    assert "prompt_token_ids" not in whole
    assert "token_ids" not in whole["choices"][0]
    assert not any("token_ids" in c["choices"][0] for c in stream(served, CHAT, messages=ASKED))


def test_tokens_of_log_probabilities_may_be_ids(served: Served):
    ids = [f"token_id:{token}" for token in TOKENIZER.encode(f"{THOUGHT}</think>{SAID}")[:2]]
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 2}
    made = post(served, CHAT, messages=ASKED, logprobs=True, top_logprobs=1, **asked)
    content = made["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ids
    assert all(e["top_logprobs"][0]["token"].startswith("token_id:") for e in content)
    listed = post(served, COMPLETIONS, prompt="x", logprobs=1, **asked)["choices"][0]["logprobs"]
    assert listed["tokens"] == ids
    assert [token in top for token, top in zip(ids, listed["top_logprobs"], strict=True)]
    plain = post(served, COMPLETIONS, prompt="x", logprobs=1, max_tokens=2)["choices"][0]
    assert listed["text_offset"] == plain["logprobs"]["text_offset"]


def test_sglang_s_log_probabilities_may_have_texts(served: Served):
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "max_tokens": None,
    }
    for is_asked in (True, False):
        meant = post(served, "/generate", **body, return_text_in_logprobs=is_asked)["meta_info"]
        entries = [*meant["input_token_logprobs"], *meant["output_token_logprobs"]]
        tops = [*meant["input_top_logprobs"][1:], *meant["output_top_logprobs"]]
        for _, token, text in (*entries, *(entry for top in tops for entry in top)):
            assert text == (TOKENIZER.decode([token]) if is_asked else None)


def test_the_top_list_of_a_completion_has_the_token_itself():
    """As OpenAI and vLLM have it: behind the likeliest, if it is none of them."""
    chances = [Chance(-3.0, 9, ((5, -0.1), (6, -0.2))), Chance(-0.1, 1, ((8, -0.1),)), None]
    listed = completion_logprobs(TOKENIZER, [7, 8, 9], chances, 0, by_id=True)
    assert msgspec.json.decode(listed["top_logprobs"]) == [
        {"token_id:5": -0.1, "token_id:6": -0.2, "token_id:7": -3.0},
        {"token_id:8": -0.1},
        None,
    ]


def test_reasoning_has_both_of_its_names_and_is_counted(served: Served):
    usage = {"stream_options": {"include_usage": True}}
    whole = post(served, CHAT, messages=ASKED, **THINKING)
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert message["content"] == SAID
    chunks = stream(served, CHAT, messages=ASKED, **THINKING, **usage)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == THOUGHT
    assert chunks[-1]["usage"] == whole["usage"]
    counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert abs(counted - len(TOKENIZER.encode(THOUGHT))) <= 1
    quiet = post(served, CHAT, messages=ASKED)["usage"]
    assert quiet["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("wish", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_reasoning_may_be_left_out(served: Served, wish: dict[str, Any]):
    asked = {"messages": ASKED, **wish, **THINKING}
    whole = post(served, CHAT, **asked)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": SAID, "refusal": None}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 3
    usage = {"include_usage": True}
    chunks = stream(served, CHAT, **asked, stream_options=usage)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == SAID
    assert not any("reasoning" in name for delta in deltas for name in delta)
    assert chunks[-1]["usage"] == whole["usage"]


# ---- what is asked


@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "enabled", "clear_thinking": False}}, True),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, False),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, False),
        ({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"foo": 1}}, False),
        ({"thinking": None, "reasoning_effort": "low"}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False, "reasoning_effort": "high"}, False),
        ({"reasoning": {"enabled": True}}, True),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"effort": None}, "reasoning_effort": "high"}, True),
        ({"reasoning": {"effort": "none"}, "reasoning_effort": "high"}, False),
        ({"reasoning": {"enabled": False, "effort": "high"}}, False),
    ],
)
@pytest.mark.parametrize("is_long", [False, True])
def test_thinking_as_others_ask_for_it(served: Served, asked, thinks, is_long):
    """Long bodies are read in a text process, which writes the same prompt."""
    filler = "word " * (LOOP_BODY_BYTES // 4 if is_long else 1)
    message = post(served, CHAT, messages=[{"role": "user", "content": filler}], **asked)
    assert prompt_of(served).endswith("<think>" if thinks else "</think>")
    assert ("reasoning" in message["choices"][0]["message"]) == thinks


@pytest.mark.parametrize("is_long", [False, True])
def test_a_prefix_is_gone_on_with(served: Served, is_long: bool):
    last = {"role": "assistant", "content": "It is", "prefix": True}
    filler = "word " * (LOOP_BODY_BYTES // 4 if is_long else 1)
    asked = [{"role": "user", "content": filler}, last]
    made = post(served, CHAT, messages=asked, thinking={"type": "enabled"})
    assert prompt_of(served).endswith("It is")
    assert made["choices"][0]["message"]["content"] == f"{THOUGHT}</think>{SAID}"


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"thinking": {"type": "perhaps"}}, "thinking"),
        ({"thinking": {}}, "thinking"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
    ],
)
def test_what_cannot_be_is_named(served: Served, changed: Any, param: str):
    before = len(served.engine.adds)
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(served, CHAT, messages=ASKED, **changed)
    assert caught.value.code == 400
    assert json.loads(caught.value.read())["error"]["param"] == param
    assert len(served.engine.adds) == before


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_a_call_without_arguments_may_be_told_in_many_ways(served: Served, arguments: Any):
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": arguments}}
    turns = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "12:00"}]},
    ]
    post(served, CHAT, messages=turns)
    assert "<result>12:00</result>" in prompt_of(served)


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_parts_of_text_have_three_names(served: Served, kind: str):
    post(served, CHAT, messages=[{"role": "user", "content": [{"type": kind, "text": "When?"}]}])
    assert "When?" in prompt_of(served)


# ---- what a template gets


TEMPLATE = (
    "{{ style or '' }}|{{ reasoning_effort or '' }}|{{ enable_thinking }}|{{ clear_thinking }}|"
    "{{ self is defined }}{% for m in messages %}{{ m.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def reader() -> Iterator[PromptReader]:
    style = TemplateStyle(TEMPLATE)
    yield PromptReader(TOKENIZER, style, length_max=4096, vocabulary=4096)
    style.close()


def written(reader: PromptReader, kind: Any = ChatAsk, **asked: Any) -> str:
    made = reader.read(json.dumps({"messages": ASKED, **asked}).encode(), kind)
    ids = json.loads(made.document)["tokens"] if made.document else made.prompts[0]
    return TOKENIZER.decode(ids)


def test_a_template_gets_the_names_that_a_client_gives(reader: PromptReader):
    question = ASKED[0]["content"]
    given = {"chat_template_kwargs": {"style": "terse", "enable_thinking": True, "self": 1}}
    assert written(reader, **given).startswith("terse||True|")
    assert written(reader, **given).endswith(question)
    asked = {"thinking": {"type": "enabled", "clear_thinking": False}, "reasoning_effort": "max"}
    assert written(reader, **asked).startswith("|max|True|False|")
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert written(reader, **both).startswith("|high|")
    assert written(reader, reasoning={"effort": "low"}).startswith("|low|True|")
    alone = {"chat_template_kwargs": {"reasoning_effort": "low"}}
    assert written(reader, **alone).startswith("|low|True|")
    for name in ("no_think", "none"):
        quiet = {**both, "chat_template_kwargs": {"reasoning_effort": name}}
        assert written(reader, **quiet).startswith(f"|{name}|False|")
    both = {"reasoning": {"effort": None}, "reasoning_effort": "high"}
    assert written(reader, **both).startswith("|high|True|")
    assert written(reader, TokenizeAsk, **given) == written(reader, **given)


def test_a_template_gets_the_effort_of_a_response(reader: PromptReader):
    for effort, shown in (({"effort": "low"}, "|low|True|"), (None, "||False|")):
        asked = {"input": "When?", "reasoning": effort}
        [ids] = reader.read(json.dumps(asked).encode(), ResponsesAsk).prompts
        assert TOKENIZER.decode(ids).startswith(shown)


THINKS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}|{{ style or '' }}|"
    "{{ 'quiet' if enable_thinking is defined and not enable_thinking else 'loud' }}"
)


@pytest.mark.parametrize(
    ("operator", "asked", "shown"),
    [
        ({}, {}, "||loud"),
        ({}, {"reasoning_effort": "none"}, "||quiet"),
        ({}, {"chat_template_kwargs": {"thinking": None}}, "||loud"),
        ({"enable_thinking": False, "style": "terse"}, {}, "|terse|quiet"),
        ({"thinking": False}, {"enable_thinking": True}, "||loud"),
        ({"thinking": False}, {"reasoning_effort": "low"}, "||loud"),
        ({"style": "terse"}, {"chat_template_kwargs": {"style": "long"}}, "|long|loud"),
    ],
)
def test_who_does_not_say_whether_to_think_gets_what_the_template_or_the_operator_says(
    operator: dict[str, Any], asked: dict[str, Any], shown: str
):
    """The reply is read as the prompt was written, in another process: the ask says it."""
    style = TemplateStyle(THINKS)
    reader = PromptReader(
        TOKENIZER, style, length_max=4096, vocabulary=4096, template_names=operator
    )
    chat = reader.read(json.dumps({"messages": ASKED, **asked}).encode(), ChatAsk)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(chat.ask), type=ChatAsk)
    assert rules_of(sent).thinking == shown.endswith("loud")
    assert TOKENIZER.decode(chat.prompts[0]).endswith(shown)
    if not asked.keys() - {"chat_template_kwargs"}:
        assert written(reader, TokenizeAsk, **asked).endswith(shown)
        response = reader.read(json.dumps({"input": "When?", **asked}).encode(), ResponsesAsk)
        assert TOKENIZER.decode(response.prompts[0]).endswith(shown)
        assert rules_of(response.ask).thinking == shown.endswith("loud")
    begun = [*ASKED, {"role": "assistant", "content": "It is", "prefix": True}]
    going = reader.read(json.dumps({"messages": begun, **asked}).encode(), ChatAsk)
    assert not rules_of(going.ask).thinking
    said = {"messages": ASKED, "max_tokens": 5}
    anthropic = reader.read(json.dumps(said).encode(), MessagesAsk)
    assert not rules_of(anthropic.ask).thinking
    assert TOKENIZER.decode(anthropic.prompts[0]).endswith("quiet")
    style.close()


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_the_server_says_to_a_template_is_a_field(reader: PromptReader, name: str):
    for where, more in (("chat_template_kwargs", {}), ("thinking", {"type": "enabled"})):
        with pytest.raises(BadInput, match=f"^{where} has {name}: give it as a field of the req"):
            written(reader, **{where: {name: [], **more}})


def test_a_client_s_name_cannot_write_a_special_token(reader: PromptReader):
    [mark] = [text for text in TOKENIZER.special_texts if TOKENIZER.id_of(text) == 1]
    asked = {"messages": ASKED, "chat_template_kwargs": {"style": mark}}
    [ids] = reader.read(json.dumps(asked).encode(), ChatAsk).prompts
    assert 1 not in ids
    assert TOKENIZER.decode(ids).startswith(mark)


def test_a_conversation_is_tokenized_as_it_would_be_asked(reader: PromptReader):
    last = {"role": "assistant", "content": "It is"}
    asked = {"messages": [*ASKED, last], "continue_final_message": True}
    assert written(reader, TokenizeAsk, **asked) == written(reader, **asked)
    asked["chat_template_kwargs"] = {"enable_thinking": True}
    assert "|False|" in written(reader, **asked)
    assert written(reader, TokenizeAsk, **asked) == written(reader, **asked)
    with pytest.raises(BadInput, match="add_generation_prompt is false"):
        written(reader, TokenizeAsk, add_generation_prompt=False)
