"""Responses that are kept: a client names the one that its request follows, and looks them up."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ess.errors import BadInput
from ess.models.chat.styles import DeepSeekStyle
from ess.server.commands.start.launch import kept_responses
from ess.server.commands.start.settings import resolve
from ess.server.process.bounds import LOOP_BODY_BYTES
from ess.server.process.requests.kept_responses import Kept, KeptResponses
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying
from tests.support.process import Process

CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(PacedEngine(saying(" It is noon.")), kept=KeptResponses(1 << 20)) as made:
        yield made


def client(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def create(served: Served, key: str = "none", **asked: Any) -> Any:
    """The response, or the last of its events."""
    with client(served, key) as asking:
        made = asking.responses.create(model="test-model", **asked)
        return list(made)[-1] if asked.get("stream") else made


def prompt_of(served: Served) -> str:
    return TOKENIZER.decode(served.engine.adds[-1].prompt)


def test_a_response_follows_another_and_that_one_a_third(served: Served):
    first = create(served, input="When?", instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)
    second = create(served, input=[{"role": "user", "content": "Sure?"}],
                    previous_response_id=first.id)  # fmt: skip
    assert second.previous_response_id == first.id
    third = create(served, input="And now?", previous_response_id=second.id)
    said = "user: When?\nassistant: It is noon.\nuser: Sure?\nassistant: It is noon.\n"
    whole = prompt_of(served)
    assert "".join(whole.split()) == "".join(f"{said}user: And now?\nassistant:".split())
    assert "Be brief." not in whole, "instructions are those of each request"
    create(served, input="And now?", previous_response_id=second.id)
    assert prompt_of(served) == whole, "a response may be followed twice"
    assert third.id != second.id


def test_a_streamed_response_may_be_followed(served: Served):
    last = create(served, input="When?", stream=True)
    create(served, input="Sure?", previous_response_id=last.response.id)
    assert "When?" in prompt_of(served)


def test_what_follows_may_be_long(served: Served):
    """The body is short, and becomes one that a text process reads."""
    first = create(served, input="word " * (LOOP_BODY_BYTES // 4), max_output_tokens=4)
    create(served, input="Sure?", previous_response_id=first.id, max_output_tokens=4)
    assert prompt_of(served).count("word") == LOOP_BODY_BYTES // 4
    assert prompt_of(served).endswith("Sure?\nassistant:")


def test_the_result_of_a_call_follows_the_call():
    engine = PacedEngine(saying(f"Let me look.{CALLS}"))
    with Served(engine, style=DeepSeekStyle(), is_marked=True, kept=KeptResponses(1 << 20)) as made:
        first = create(made, input="When?", tools=TOOLS)
        [call] = [item for item in first.output if item.type == "function_call"]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:00"}
        create(made, input=[result], previous_response_id=first.id, tools=TOOLS)
        assert "<result>12:00</result>" in prompt_of(made)
        assert 'invoke name="now"' in prompt_of(made)


def test_kept_responses_are_looked_up_and_forgotten(served: Served):
    made = create(served, input="When?")
    second = create(served, input="Sure?", previous_response_id=made.id)
    with client(served) as connected:
        asking = connected.responses
        assert asking.retrieve(made.id) == made
        [item] = asking.input_items.list(made.id)
        assert (item.role, item.content) == ("user", "When?")
        told = [item.role for item in asking.input_items.list(second.id, order="asc")]
        assert told == ["user", "assistant", "user"]
        assert [item.role for item in asking.input_items.list(second.id)] == told[::-1]
        asking.delete(made.id)
        for look in (asking.retrieve, asking.delete, asking.input_items.list):
            with pytest.raises(openai.NotFoundError, match="is not kept here"):
                look(made.id)
        with pytest.raises(openai.BadRequestError, match="background is not served"):
            asking.cancel(second.id)


def test_what_is_not_kept_cannot_be_followed(served: Served):
    unkept = create(served, input="When?", store=False)
    assert unkept.store is False
    before = len(served.engine.adds)
    for identity, key in ((unkept.id, "none"), ("resp_nothing", "none")):
        with pytest.raises(openai.BadRequestError, match="which is not kept") as caught:
            create(served, key, input="Sure?", previous_response_id=identity)
        assert caught.value.param == "previous_response_id"
    assert len(served.engine.adds) == before


def test_each_key_finds_its_own_alone(served: Served):
    """Also where both choose the same id."""
    chosen = {"extra_headers": {"x-request-id": "mine"}}
    ours = create(served, "a", input="Ours?", **chosen)
    theirs = create(served, "b", input="Theirs?", **chosen)
    assert ours.id == theirs.id == "resp_mine"
    for key, said in (("a", "Ours?"), ("b", "Theirs?")):
        create(served, key, input="And?", previous_response_id="resp_mine")
        assert f"user: {said}" in prompt_of(served)
    with pytest.raises(openai.BadRequestError, match="which is not kept"):
        create(served, "c", input="And?", previous_response_id="resp_mine")
    with client(served, "a") as one, client(served, "b") as other:
        one.responses.delete("resp_mine")
        assert other.responses.retrieve("resp_mine").id == "resp_mine"


@pytest.mark.parametrize("wrong", [{"input": 5}, {"previous_response_id": 5, "input": "x"}, {}])
def test_a_wrong_body_is_refused_as_ever(served: Served, wrong: Any):
    sent = urllib.request.Request(f"{served.url}/v1/responses", json.dumps(wrong).encode())
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(sent, timeout=60)
    assert caught.value.code == 400
    named = "previous_response_id" if "previous_response_id" in wrong else "input"
    assert json.loads(caught.value.read())["error"]["param"] == named


def test_the_longest_unused_are_forgotten():
    def kept(size: int) -> Kept:
        return Kept(asked=[], said=[], document=b"x" * size)

    shelf = KeptResponses(100)
    for name in ("a", "b"):
        shelf.put(b"", name, kept(40))
    assert shelf.find(b"", "a") is not None
    shelf.put(b"", "c", kept(40))
    assert [shelf.find(b"", name) is not None for name in "abc"] == [True, False, True]
    shelf.put(b"", "c", kept(60))
    assert [shelf.find(b"", name) is not None for name in "abc"] == [True, False, True]
    shelf.put(b"", "d", kept(101))
    assert [shelf.find(b"", name) for name in "abcd"] == [None] * 4, "it made room in vain"
    assert not shelf.drop(b"", "d")
    shelf.put(b"", "e", kept(100))
    assert shelf.drop(b"", "e")


def test_items_and_what_is_kept_of_them_are_within_bounds():
    engine = PacedEngine(saying(" It is noon."))
    with Served(engine, kept=KeptResponses(1 << 20)) as made:
        made.service.limits = type(made.service.limits)(
            running_max=2, waiting_max=2, length_max=4096, body_max=600
        )
        first = create(made, input="x" * 400, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="at most 600 are read"):
            create(made, input="x" * 400, previous_response_id=first.id)


def test_without_the_setting_nothing_is_kept():
    with Served(PacedEngine(saying("x"))) as made:
        first = create(made, input="When?")
        assert first.store is False
        with pytest.raises(openai.BadRequestError, match="not kept without --keep-responses"):
            create(made, input="Sure?", previous_response_id=first.id)
        gone = pytest.raises(openai.NotFoundError, match="--keep-responses is not set")
        with client(made) as asking, gone:
            asking.responses.retrieve(first.id)


def test_several_processes_would_each_find_their_own():
    given = {"keep_responses": "1MiB", "server_processes": 2}
    with pytest.raises(BadInput, match="keep_responses is 1MiB, and server_processes is 2"):
        kept_responses(resolve(given, environment={}).settings)
    assert kept_responses(resolve({}, environment={}).settings) is None


@pytest.mark.slow
def test_a_server_keeps_them_if_told_to():
    asked = {"model": "ess-embedded", "max_output_tokens": 4}
    with (
        Process("--keep-responses", "1MiB", "--engine", "paced").wait_ready() as process,
        openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0) as asking,
    ):
        first = asking.responses.create(input="The server is", **asked)
        again = asking.responses.create(input="And?", previous_response_id=first.id, **asked)
        assert again.usage.input_tokens > first.usage.input_tokens
        assert asking.responses.retrieve(again.id).output_text == again.output_text
