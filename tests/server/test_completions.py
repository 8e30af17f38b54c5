"""/v1/completions as a stranger with the `openai` client uses it."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import openai
import pytest

from ess.engine.process.messages import Add, Piece, Progress, ToEngine
from ess.engine.process.wire import SocketWire
from ess.engine.tokens.chance import Chance
from ess.server.dialects.logprobs import completion_logprobs, json_list, token_text
from ess.server.dialects.routes import completions as routes
from ess.server.dialects.streaming import CHANCES_MAX
from tests.server.harness import EOS, TOKENIZER, PacedEngine, Served, counting, saying, until
from tests.server.test_limits import opened

TEXT = "Names are bytes: naïve café, 漢字 and 🙂. Then more words follow."

FEW = CHANCES_MAX // 3
"""Tokens of a short document, with two log probabilities in the place of each besides its own."""


def client(served: Served) -> openai.OpenAI:
    return served.client()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(PacedEngine(saying(TEXT), cached_count=3)) as made:
        yield made


def last_sampling(served: Served):
    return served.engine.adds[-1].sampling


def test_a_text_and_its_usage(served: Served):
    made = client(served).completions.create(model="test-model", prompt="hello", max_tokens=500)
    [choice] = made.choices
    assert choice.text == TEXT
    assert choice.finish_reason == "stop"
    assert made.object == "text_completion"
    prompt = TOKENIZER.encode("hello", add_special=True)
    assert served.engine.adds[-1].prompt == prompt
    assert made.usage.prompt_tokens == len(prompt)
    assert made.usage.completion_tokens == len(TOKENIZER.encode(TEXT)) + 1
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details.cached_tokens == 3


def test_a_stream_says_the_same_in_pieces(served: Served):
    chunks = list(
        client(served).completions.create(
            model="test-model",
            prompt="hello",
            max_tokens=500,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *said, last = chunks
    assert "".join(chunk.choices[0].text for chunk in said) == TEXT
    assert len(said) > 10
    assert [chunk.choices[0].finish_reason for chunk in said][-1] == "stop"
    assert {chunk.choices[0].finish_reason for chunk in said[:-1]} == {None}
    assert last.choices == []
    assert last.usage.completion_tokens == len(TOKENIZER.encode(TEXT)) + 1
    assert len({chunk.id for chunk in chunks}) == 1
    assert "�" not in "".join(chunk.choices[0].text for chunk in said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "expected"),
    [("café", "Names are bytes: naïve "), (["zz", ", "], "Names are bytes: naïve café")],
)
def test_a_stop_string_ends_it_and_the_engine_hears(served: Served, stream, stop, expected):
    before = len(served.engine.aborted)
    made = client(served).completions.create(
        model="test-model", prompt="x", max_tokens=500, stop=stop, stream=stream
    )
    if stream:
        chunks = list(made)
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    else:
        assert made.choices[0].text == expected
        assert made.choices[0].finish_reason == "stop"
        hit = stop if isinstance(stop, str) else ", "
        assert made.choices[0].stop_reason == hit
    until(lambda: len(served.engine.aborted) > before, "the abort")


def test_the_stop_string_stays_if_asked_and_waits_for_the_least_tokens(served: Served):
    made = client(served).completions.create(
        model="test-model",
        prompt="x",
        max_tokens=500,
        stop="bytes",
        extra_body={"include_stop_str_in_output": True},
    )
    assert made.choices[0].text == "Names are bytes"
    count = len(TOKENIZER.encode("Names are bytes"))
    made = client(served).completions.create(
        model="test-model", prompt="x", max_tokens=500, stop=["bytes"],
        extra_body={"min_tokens": count + 2},
    )  # fmt: skip
    assert made.choices[0].text == TEXT


def test_several_prompts_and_choices_each_have_their_seed(served: Served):
    before = len(served.engine.adds)
    made = client(served).completions.create(
        model="test-model", prompt=["one", "two"], n=2, seed=7, max_tokens=4
    )
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    adds = served.engine.adds[before:]
    assert [add.sampling.seed for add in adds] == [7, 8, 7, 8]
    first, _, third, _ = [add.number for add in adds]
    assert [add.leader for add in adds] == [None, first, None, third]
    assert adds[0].prompt == adds[1].prompt != adds[2].prompt
    assert made.usage.prompt_tokens == len(adds[0].prompt) + len(adds[2].prompt)
    assert made.usage.completion_tokens == 16
    client(served).completions.create(model="test-model", prompt=["one", "one"], n=2, max_tokens=1)
    assert len({add.sampling.seed for add in served.engine.adds[-4:]}) == 4


def test_token_ids_are_taken_as_they_are(served: Served):
    client(served).completions.create(model="test-model", prompt=[5, 6, 7], max_tokens=2)
    assert served.engine.adds[-1].prompt == [5, 6, 7]
    client(served).completions.create(model="test-model", prompt=[[5], [6]], max_tokens=2)
    assert [add.prompt for add in served.engine.adds[-2:]] == [[5], [6]]


def test_every_sampling_field_reaches_the_engine(served: Served):
    client(served).completions.create(
        model="test-model",
        prompt="x",
        max_tokens=9,
        temperature=0.3,
        top_p=0.8,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"17": -100},
        seed=-1,
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [99],
        },
    )
    sampling = last_sampling(served)
    assert (sampling.tokens_max, sampling.tokens_min) == (9, 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.3,
        0.8,
        40,
        0.05,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, 0.2)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == {17: -100.0}
    assert sampling.stop_ids == {99, EOS}
    assert sampling.seed == -1


def test_ignore_eos_and_the_length(served: Served):
    made = client(served).completions.create(
        model="test-model", prompt="x", max_tokens=3, extra_body={"ignore_eos": True}
    )
    assert last_sampling(served).stop_ids == frozenset()
    assert made.choices[0].finish_reason == "length"
    assert made.usage.completion_tokens == 3


def test_echo_and_logprobs(served: Served):
    made = client(served).completions.create(
        model="test-model", prompt="hello", echo=True, max_tokens=2
    )
    assert made.choices[0].text.startswith("hello")
    made = client(served).completions.create(
        model="test-model", prompt="hello", logprobs=2, max_tokens=3
    )
    logprobs = made.choices[0].logprobs
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert "".join(logprobs.tokens) == made.choices[0].text
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2, 2]
    assert logprobs.text_offset == [
        0,
        len(logprobs.tokens[0]),
        len(logprobs.tokens[0] + logprobs.tokens[1]),
    ]


def test_a_token_is_among_the_likeliest_of_its_place():
    """As with OpenAI: one more where it is not; the first token of a text has none."""
    first, second, third = TOKENIZER.encode("The first answer")[:3]
    names = {token: token_text(TOKENIZER, token) for token in (first, second, third)}
    tops = ((second, -0.5), (third, -1.5))
    chances = [None, Chance(-2.5, 7, tops), Chance(-1.5, 2, tops), Chance(-2.5, 7)]
    said = completion_logprobs(TOKENIZER, [first, first, third, first], chances, 0)
    assert msgspec.json.decode(said["top_logprobs"]) == [
        None,
        {names[second]: -0.5, names[third]: -1.5, names[first]: -2.5},
        {names[second]: -0.5, names[third]: -1.5},
        {names[first]: -2.5},
    ]


def test_an_echo_with_logprobs_has_those_of_the_prompt(served: Served):
    """The very first token has none. A stream says the same, the prompt before the first token,
    where text comes later than its tokens too: it may begin a stop string."""
    asked = {"model": "test-model", "prompt": "hello there", "echo": True, "logprobs": 2}
    asked["stop"] = "Names of"
    whole = client(served).completions.create(**asked, max_tokens=3).choices[0]
    count = len(served.engine.adds[-1].prompt)
    assert served.engine.adds[-1].sampling.prompt_logprobs == 2
    logprobs = whole.logprobs
    assert count >= 2
    assert logprobs.token_logprobs == [None] + [-0.5] * (count - 1 + 3)
    assert logprobs.top_logprobs[0] is None
    assert [len(top) for top in logprobs.top_logprobs[1:]] == [2] * (count + 2)
    assert "".join(logprobs.tokens) == whole.text
    assert whole.text.startswith("hello there")
    assert [whole.text[at:][:1] for at in logprobs.text_offset] == [
        token[:1] for token in logprobs.tokens
    ]
    chunks = [
        chunk.choices[0]
        for chunk in client(served).completions.create(**asked, max_tokens=3, stream=True)
    ]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    said = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in said for value in getattr(part, name)] == getattr(
            logprobs, name
        ), name


OF_PROMPT = {"prompt": "hello there " * 100, "echo": True, "logprobs": 0, "max_tokens": 1}


@pytest.mark.parametrize(
    ("asked", "is_apart"),
    [
        ({"prompt": "a", "logprobs": 2, "max_tokens": FEW}, False),
        ({"prompt": "a", "logprobs": 2, "max_tokens": FEW + 1}, True),
        ({**OF_PROMPT, "n": 1}, False),
        ({**OF_PROMPT, "n": 8}, True),
    ],
)
def test_a_document_of_many_log_probabilities_is_made_in_a_thread(
    asked: dict[str, Any], is_apart: bool, monkeypatch: pytest.MonkeyPatch
):
    """Those of the likeliest count too, and a prompt's in each choice."""
    threads = []

    def noted(*given: object, **named: object) -> object:
        threads.append(threading.current_thread())
        return completion_logprobs(*given, **named)

    monkeypatch.setattr(routes, "completion_logprobs", noted)
    with Served(PacedEngine(counting(5000))) as made:
        said = client(made).completions.create(model="test-model", **asked)
        prompt = len(made.engine.adds[-1].prompt) if "echo" in asked else 0
        assert len(said.choices[0].logprobs.tokens) == prompt + asked["max_tokens"]
        assert {thread is not made.thread for thread in threads} == {is_apart}
        assert prompt < CHANCES_MAX


def test_one_document_at_a_time_is_made(monkeypatch: pytest.MonkeyPatch):
    """Each thread that makes one would take the interpreter from the event loop. Until then a
    request counts, and a client that has gone has its document made by no thread."""
    threads, all_wait = [], threading.Event()

    def noted(*given: object, **named: object) -> object:
        threads.append(threading.current_thread())
        assert all_wait.wait(60)
        return completion_logprobs(*given, **named)

    monkeypatch.setattr(routes, "completion_logprobs", noted)
    asked = {"model": "test-model", "prompt": "a", "max_tokens": FEW + 1, "logprobs": 2}
    with Served(PacedEngine(counting(5000))) as made, ThreadPoolExecutor(4) as clients:
        answers = [clients.submit(client(made).completions.create, **asked) for _ in range(4)]
        tally = made.service.tally
        until(lambda: tally.document_count == 4, "four answers whose documents are due")
        leaving = opened(made, asked)
        until(lambda: made.service.unanswered_count == 5, "a fifth")
        until(lambda: tally.document_count == 5, "its document's being due")
        assert made.service.open_count == 0
        leaving.close()
        until(lambda: tally.disconnect_count == 1, "the client's having gone")
        assert tally.document_count == 4
        all_wait.set()
        assert {len(each.result().choices[0].logprobs.tokens) for each in answers} == {FEW + 1}
        assert made.service.unanswered_count == 0
    assert threads == [threads[0]] * 4


def test_of_a_long_list_few_items_exist_at_once():
    alive: weakref.WeakSet[Item] = weakref.WeakSet()
    most = 0

    def items() -> Iterator[Item]:
        nonlocal most
        for number in range(1000):
            item = Item(number)
            alive.add(item)
            most = max(most, len(alive))
            yield item

    assert msgspec.json.decode(json_list(items())) == [{"number": number} for number in range(1000)]
    assert msgspec.json.decode(json_list([])) == []
    assert msgspec.json.decode(json_list([None, ""])) == [None, ""]
    assert most <= 66


class Item(msgspec.Struct, weakref=True, eq=False):
    number: int


def test_an_echo_alone_scores_a_prompt(served: Served):
    made = client(served).completions.create(
        model="test-model", prompt="hello there", echo=True, logprobs=0, max_tokens=0
    )
    [choice] = made.choices
    assert (choice.text, choice.finish_reason) == ("hello there", "length")
    assert len(choice.logprobs.tokens) == made.usage.prompt_tokens == made.usage.total_tokens
    assert made.usage.completion_tokens == 0


def test_prompt_logprobs_as_vllm_has_them(served: Served):
    made = client(served).completions.create(
        model="test-model",
        prompt=[[5, 6, 7], [8, 9]],
        n=2,
        max_tokens=2,
        extra_body={"prompt_logprobs": 1},
    )
    assert [add.sampling.prompt_logprobs for add in served.engine.adds[-4:]] == [1, None, 1, None]
    first, again, other, _ = [choice.prompt_logprobs for choice in made.choices]
    assert first == again
    assert first[0] is None
    assert [list(top) for top in first[1:]] == [["6"], ["7"]]
    assert first[1]["6"] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": TOKENIZER.decode([6]),
    }
    assert [top and list(top) for top in other] == [None, ["9"]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "test-model", "prompt": [5] * 4090}),
        ("/generate", {"input_ids": [5] * 4090}),
        ("/inference/v1/generate", {"token_ids": [5] * 4090, "sampling_params": {}}),
    ],
)
def test_where_nothing_is_asked_the_answer_ends_with_the_context(served: Served, path, body):
    """Each of these has a default of more than the six tokens that are left."""
    content = {"content-type": "application/json"}
    asked = urllib.request.Request(served.url + path, json.dumps(body).encode(), content)
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200
    assert served.engine.adds[-1].sampling.tokens_max == 6


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 5000}, "positions are left"),
        ({"temperature": -1}, "temperature is -1.0"),
        ({"top_p": "a", "max_tokens": 5.0}, "top_p: expected `float | null`, got `str`"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"n": 0}, "n is 0"),
        ({"n": 1000}, "n is 1,000"),
        ({"prompt": []}, "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [4096]}, "0..4095"),
        ({"prompt": [[1], "x"]}, "prompt must be"),
        ({"prompt": [1] * 4096}, "4,096 tokens"),
        ({"stop": [str(i) for i in range(17)]}, "17 stop strings"),
        ({"stop": ""}, "stop has a string of 0 characters"),
        ({"logit_bias": {"x": 1}}, "not a token id"),
        ({"logit_bias": {"4096": 1}}, "logit_bias id 4096"),
        ({"logit_bias": {"1": 101}}, "-100.0..100.0"),
        ({"logprobs": 21}, "logprobs is 21"),
        ({"stop_token_ids": [-1]}, "stop_token_ids id -1"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens is 6"),
        ({"regex": ""}, "regex is not served: a grammar of kind regex without a text"),
        ({"ignore_eos": True, "regex": "a"}, "ignore_eos is not served with a grammar"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 4.5}, "max_tokens: expected `int | null`, got `float`"),
        ({"extra_body": {"top_k": 1}}, "extra_body is not served: OpenAI's client writes"),
        ({"best_of": 3}, "best_of"),
        ({"use_beam_search": True}, "beam"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "the echo alone"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs is not streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "2 constraints"),
    ],
)
def test_a_wrong_value_is_named_and_nothing_is_queued(served: Served, changed, says):
    before = len(served.engine.adds)
    body = {"model": "test-model", "prompt": "x", "max_tokens": 5, **changed}
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(served, "/v1/completions", body)
    assert caught.value.code == 400
    error = json.loads(caught.value.read())["error"]
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    is_of_several = says in ("echo", "2 constraints")
    assert error["param"] == (None if is_of_several else next(iter(changed)))
    assert len(served.engine.adds) == before


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"{", b'{"prompt":"\xff"}', b'{"x":"\xff","prompt":"a"}', b"[" * 100_000],
)
def test_a_body_that_is_no_request_is_a_400(served: Served, body: bytes):
    request = urllib.request.Request(served.url + "/v1/completions", body)
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    assert caught.value.code == 400
    assert "body" in json.loads(caught.value.read())["error"]["message"]


def test_an_unknown_model_is_a_404_and_an_unknown_key_is_ignored(served: Served):
    with pytest.raises(openai.NotFoundError, match="'other' is not served"):
        client(served).completions.create(model="other", prompt="x")
    body = {
        "model": "unknown",
        "prompt": "x",
        "max_tokens": 2,
        "no_logs": True,
        "background": False,
    }
    assert post(served, "/v1/completions", body)["choices"][0]["text"]


def test_a_refusal_of_the_engine_is_an_answer_also_for_a_stream():
    engine = PacedEngine(counting(3), refuse="needs 9 pages, more than the pool's 8")
    with Served(engine) as served:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="more than the pool's 8"):
                client(served).completions.create(model="test-model", prompt="x", stream=stream)
        assert served.service.link.open_count == 0


def post(served: Served, path: str, body: object, **headers: str) -> dict:
    request = urllib.request.Request(
        served.url + path,
        json.dumps(body).encode(),
        {"content-type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


class Faulty(PacedEngine):
    """Its own processes fail."""

    def obey(self, message: ToEngine, wire: SocketWire) -> None:
        if isinstance(message, Add):
            piece = Piece(message.number, reason="refused", sentence="lost twice", is_ours=True)
            wire.give(Progress((piece,)))
        else:
            super().obey(message, wire)


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_of_the_engine_is_not_the_client_s(stream: bool):
    asked = {"model": "test-model", "prompt": "x", "stream": stream}
    lost = pytest.raises(openai.InternalServerError, match="lost twice")
    with Served(Faulty(counting(3))) as made, client(made) as asking, lost as caught:
        asking.completions.create(**asked)
    assert caught.value.status_code == 503
