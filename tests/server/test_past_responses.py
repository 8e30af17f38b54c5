"""Kept responses: a client names the response that its request follows, and reads responses by
id."""

from __future__ import annotations

import hashlib
import http.client
import json
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from ess.errors import BadInput
from ess.models.chat.styles import DeepSeekStyle
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.resolving import derived
from ess.server.commands.start.server_facts import kept_responses
from ess.server.commands.start.settings import resolve
from ess.server.dialects.response_history import History, owner_of
from ess.server.http.request_ids import given_key
from ess.server.process.bounds import JOINED_BYTES_MAX, LOOP_BODY_BYTES
from ess.server.process.requests.kept_responses import KeptResponse, KeptResponses
from ess.server.process.service import Limits
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying, until
from tests.support.process import Process

CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>"
)
TOOLS = [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]
PATH, THINKS = "/v1/responses", {"effort": "high"}
KEY = {"authorization": "Bearer none"}


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


def test_log_probabilities_are_not_part_of_what_follows(served: Served):
    """They would fill the longest body that is read within some thousand tokens."""
    wish = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    first = create(served, input="When?", **wish)
    assert first.output[0].content[0].logprobs
    assert served.service.kept is not None
    kept = served.service.kept.find(owner_of([(b"authorization", b"Bearer none")]), first.id)
    assert b'"logprobs":[]' in kept.output_items
    assert b'"bytes"' not in kept.output_items
    with client(served) as asking:
        assert asking.responses.retrieve(first.id).output[0].content[0].logprobs


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
        noon = [{"role": each, "content": "Noon"} for each in ("user", "assistant")]
        calls = [{"type": "reasoning", "content": []}, call.to_dict(), result]
        again = create(made, input=[*noon, *calls], tools=TOOLS)
        with pytest.raises(openai.BadRequestError, match=r"_id: its item \[1\] is an assistant"):
            create(made, input=[result], previous_response_id=again.id, reasoning=THINKS)


@pytest.mark.parametrize("ends", ["length", "stop"])
def test_a_response_that_was_cut_inside_a_call_may_be_followed(ends: str):
    """Its call has half a JSON as arguments, and is left out."""
    cut = f'Let me look.{CALLS.partition("</")[0]}<｜DSML｜parameter name="a" string="false">[1'
    engine = PacedEngine(saying(cut))
    with Served(engine, style=DeepSeekStyle(), is_marked=True, kept=KeptResponses(1 << 20)) as made:
        most = {"max_output_tokens": len(TOKENIZER.encode(cut))} if ends == "length" else {}
        first = create(made, input="When?", tools=TOOLS, **most)
        [call] = [item for item in first.output if item.type == "function_call"]
        assert call.status == "incomplete"
        assert first.status == ("completed" if ends == "stop" else "incomplete")
        create(made, input="Well?", previous_response_id=first.id, tools=TOOLS)
        assert "Let me look." in prompt_of(made)
        assert "[1" not in prompt_of(made)


def test_kept_responses_are_looked_up_and_forgotten(served: Served):
    made = create(served, input="When?")
    second = create(served, input="Sure?", previous_response_id=made.id)
    with client(served) as connected:
        asking = connected.responses
        assert asking.retrieve(made.id) == made
        with pytest.raises(openai.BadRequestError, match="stream is not served"):
            asking.retrieve(made.id, stream=True)
        [item] = asking.input_items.list(made.id)
        assert (item.type, item.role, item.status) == ("message", "user", "completed")
        [part] = item.content
        assert (part.type, part.text) == ("input_text", "When?")
        told = [item.role for item in asking.input_items.list(second.id, order="asc")]
        assert told == ["user", "assistant", "user"]
        assert [item.role for item in asking.input_items.list(second.id)] == told[::-1]
        asking.delete(made.id)
        for look in (asking.retrieve, asking.delete, asking.input_items.list):
            with pytest.raises(openai.NotFoundError, match="is not kept here, or no longer"):
                look(made.id)
        with pytest.raises(openai.BadRequestError, match="background is false"):
            asking.cancel(second.id)


def test_items_are_listed_up_to_a_limit(served: Served):
    given = [{"role": "user", "content": f"{place}"} for place in range(3)]
    made = create(served, input=given)
    with client(served) as connected:
        asking = connected.responses.input_items
        for limit, is_cut in ((2, True), (3, False), (4, False)):
            listed = asking.list(made.id, order="asc", limit=limit)
            assert texts_of(listed.data) == ["0", "1", "2"][:limit]
            assert listed.has_more == is_cut
            assert (listed.first_id, listed.last_id) == (listed.data[0].id, listed.data[-1].id)
        assert texts_of(asking.list(made.id, limit=1).data) == ["2"]
        assert texts_of(asking.list(made.id, limit=1, order="asc")) == ["0", "1", "2"], "by pages"
        for wrong, name in (({"limit": 0}, "limit"), ({"after": "msg_1"}, "after")):
            with pytest.raises(openai.BadRequestError) as caught:
                asking.list(made.id, **wrong)
            assert caught.value.param == name


def texts_of(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def test_an_item_has_the_same_id_wherever_it_is_listed(served: Served):
    named = {"type": "message", "id": "msg_mine", "role": "user", "content": "a"}
    given = [named, {"role": "user", "content": "b"}, {"role": "user", "content": "b"}]
    first = create(served, input=given)
    second = create(served, input="c", previous_response_id=first.id)
    with client(served) as connected:
        listing = connected.responses.input_items
        ids = [item.id for item in listing.list(first.id, order="asc")]
        assert (ids[0], len({*ids})) == ("msg_mine", 3)
        more = [item.id for item in listing.list(second.id, order="asc")]
    assert more[:4] == [*ids, first.output[0].id]
    assert len({*more}) == 5


def test_what_is_not_kept_cannot_be_followed(served: Served):
    unkept = create(served, input="When?", store=False)
    assert unkept.store is False
    before = len(served.engine.adds)
    for identity, key in ((unkept.id, "none"), ("resp_nothing", "none")):
        with pytest.raises(openai.BadRequestError, match="which is not kept") as caught:
            create(served, key, input="Sure?", previous_response_id=identity)
        assert caught.value.param == "previous_response_id"
    assert len(served.engine.adds) == before


@pytest.mark.parametrize("size", [1, LOOP_BODY_BYTES], ids=["short", "read apart"])
def test_a_refusal_counts_the_items_of_its_own_body(served: Served, size: int):
    first = create(served, input=[{"role": "user", "content": word} for word in ("One", "Two")])
    king, said = {"role": "king", "content": ""}, {"role": "user", "content": "Four"}
    for items, sentence in (
        ([said, king], "input[1].role is 'king'"),
        ([said, 5], "input[1]: expected `object`, got `int`"),
        ([said, 5.0], "input[1]: expected `object`, got `float`"),
    ):
        asked = {"input": items, "previous_response_id": first.id, "user": "u" * size}
        for path in (PATH, f"{PATH}/input_tokens"):
            status, error = exchange(served, json.dumps(asked).encode(), path, **KEY)
            assert (status, error["param"]) == (400, "input")
            assert error["message"].startswith(sentence)


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


def exchange(served: Served, body: bytes, path: str = PATH, **headers: str) -> tuple[int, Any]:
    """A request as it is written here, which no client would write."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    sent = urllib.request.Request(served.url + path, body, named)
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as refused:
        return refused.code, json.load(refused)["error"]


def test_a_key_is_one_owner_however_it_is_sent():
    """A header that the key check does not read makes no client an owner."""
    shelf, asked = KeptResponses(1 << 20), b'{"input": "Mine?", "request_id": "mine"}'
    follow = b'{"input": "And?", "previous_response_id": "resp_mine"}'
    with Served(PacedEngine(saying("x")), keys=("a", "b"), kept=shelf) as served:
        assert exchange(served, asked, authorization="Basic shared", x_api_key="a")[0] == 200
        for mine in (
            {"authorization": "Bearer a"},
            {"authorization": "bearer  a "},
            {"authorization": "Bearer a", "x_api_key": "b"},
            {"x_api_key": " a"},
        ):
            assert exchange(served, follow, **mine)[0] == 200, mine
        for other in (
            {"authorization": "Basic shared", "x_api_key": "b"},
            {"authorization": "Bearer b", "x_api_key": "a"},
        ):
            status, error = exchange(served, follow, **other)
            assert (status, error["param"]) == (400, "previous_response_id"), other


@pytest.mark.parametrize("authorization", ["Basic right", "Bearer wrong", "Bearer", ""])
def test_the_owner_is_who_the_gate_let_in(authorization: str):
    """A header that comes twice has one value, for both."""
    doubled = [(b"x-api-key", b"first"), (b"x-api-key", b"second")]
    sent = [*doubled, (b"authorization", authorization.encode())]
    assert owner_of(sent) == hashlib.sha256(given_key(dict(sent))).digest()
    wrong = authorization.partition(" ")[2] if authorization.startswith("Bearer") else "second"
    assert given_key(dict(sent)) == wrong.encode()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"input": 5}, "input must be a text or a list"),
        ({"input": None}, "input must be a text or a list"),
        ({"input": [5]}, "input[0]: expected `object`, got `int`"),
        ({"input": []}, "input is empty: give a text or at least one item"),
        ({"previous_response_id": 5, "input": "x"}, "previous_response_id must be a text"),
        ({"previous_response_id": ["x"]}, "previous_response_id must be a text"),
        ({"store": "no", "input": "x"}, "store: expected `bool | null`, got `str`"),
        ({}, "input is missing from the body"),
    ],
)
def test_a_wrong_body_is_refused_in_a_sentence(served: Served, wrong: Any, sentence: str):
    status, error = exchange(served, json.dumps(wrong).encode())
    assert (status, error["message"]) == (400, sentence)
    assert served.service.kept.held_bytes == 0


@pytest.mark.parametrize("end", [b"", b" \n"])
def test_of_a_field_that_comes_twice_the_last_counts(served: Served, end: bytes):
    one, two = (create(served, input=said).id.encode() for said in ("Left?", "Right?"))
    body = (
        b'{"previous_response_id": "%b", "input": "First?",'
        b' "previous_response_id": "%b", "input": [ {"role": "user", "content": "Last?"} ]}'
        % (one, two)
    )
    status, made = exchange(served, body + end, authorization="Bearer none")
    assert status == 200, made
    prompt = prompt_of(served)
    assert [said in prompt for said in ("Right?", "Last?", "Left?", "First?")] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"previous_response_id": "a", "input": [%b]}' % b",".join([b"10"] * 200_000),
        b'{"previous_response_id": "a", "other": [%b]}' % b",".join([b"10"] * 200_000),
        b'{"previous_response_id": "a", %b}' % b",".join(b'"%d":1' % n for n in range(60_000)),
    ],
)
def test_a_long_body_is_joined_without_an_object_per_item(body: bytes):
    """On the event loop: of 600 KB the items alone would take 20 MB."""
    shelf, limits = KeptResponses(4 << 20), Limits(running_max=1, waiting_max=1, length_max=64)
    before = KeptResponse(input_items=b'{"role":"user"}', output_items=b"", document=b"{}")
    shelf.put(owner_of([]), "a", before)
    history = History(SimpleNamespace(kept=shelf, limits=limits), [])
    tracemalloc.start()
    joined = history.joined(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert json.loads(joined)["input"] == [{"role": "user"}, *json.loads(body).get("input", [])]
    assert peak < 6 * len(body)
    history.release()
    history.release()
    assert shelf.held_bytes == 0


def test_the_longest_unused_are_forgotten():
    def kept(size: int) -> KeptResponse:
        return KeptResponse(input_items=b"x", output_items=b"yz", document=b"x" * (size - 3))

    shelf = KeptResponses(200)
    for name in ("a", "b"):
        shelf.put(b"", name, kept(40))
    assert shelf.find(b"", "a") is not None
    shelf.put(b"", "c", kept(40))
    assert [shelf.find(b"", name) is not None for name in "abc"] == [True, False, True]
    shelf.put(b"", "c", kept(60))
    assert [shelf.find(b"", name) is not None for name in "abc"] == [True, False, True]
    assert not shelf.put(b"", "d", kept(101))
    assert [shelf.find(b"", name) is not None for name in "abcd"] == [True, False, True, False]
    assert not shelf.put(b"", "c", kept(101)), "another of the same id is gone all the same"
    assert [shelf.find(b"", name) is not None for name in "abcd"] == [True] + [False] * 3
    assert shelf.put(b"", "e", kept(100))
    assert shelf.find(b"", "a") is None
    assert shelf.drop(b"", "e")
    assert not shelf.drop(b"", "e")


def test_a_response_that_does_not_fit_says_that_it_is_not_kept():
    """Neither one whose items fit alone nor one whose items are too many; and no other is lost."""
    with Served(PacedEngine(saying("x")), kept=KeptResponses(6000)) as made:
        kept = create(made, input="Kept?")
        for count, begins_kept in ((2500, True), (3500, False)):
            asked = {"input": "y" * count, "max_output_tokens": 2}
            events = exchange_events(made, **asked)
            assert events[0].response.store == begins_kept
            for said in (events[-1].response, create(made, **asked)):
                assert said.store is False
                with client(made) as asking, pytest.raises(openai.NotFoundError):
                    asking.responses.retrieve(said.id)
        with client(made) as asking:
            assert asking.responses.retrieve(kept.id) == kept
        assert made.service.kept.held_bytes == 0


def exchange_events(served: Served, **asked: Any) -> list[Any]:
    with client(served) as asking:
        return list(asking.responses.create(model="test-model", stream=True, **asked))


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_requests_under_way_are_within_the_bound(stream: bool):
    """They are held until a request has ended, also one whose client leaves."""
    engine = PacedEngine(saying("x"))
    with Served(engine, kept=KeptResponses(8000)) as made:
        engine.hold()
        body = {"input": "y" * 1500, "stream": stream, "max_output_tokens": 2}
        waiting = [begun(made, body) for _ in range(2)]
        shelf = made.service.kept
        until(lambda: shelf.held_bytes > 2 * 1500, "both are held")
        held = shelf.held_bytes
        unkept = begun(made, body | {"store": False})
        until(lambda: made.service.open_count == 3, "the third runs")
        assert shelf.held_bytes == held, "what is not to be kept is not held"
        more = begun(made, body)
        until(lambda: made.service.open_count == 4, "the fourth runs")
        assert shelf.held_bytes == held, "it runs all the same"
        waiting[0].close()
        until(lambda: shelf.held_bytes == held // 2, "its client left")
        engine.held.set()
        assert b'"store":true' in waiting[1].getresponse().read()
        assert b'"store":false' in more.getresponse().read()
        for connection in (waiting[1], unkept, more):
            connection.close()
        until(lambda: shelf.held_bytes == 0, "all have ended")


def begun(served: Served, body: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", "/v1/responses", json.dumps(body))
    return connection


def test_items_and_what_is_kept_of_them_are_within_bounds():
    engine = PacedEngine(saying(" It is noon."))
    with Served(engine, kept=KeptResponses(1 << 20)) as made:
        made.service.limits = Limits(running_max=2, waiting_max=2, length_max=4096, body_max=600)
        first = create(made, input="x" * 400, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="at most 600 are read"):
            create(made, input="x" * 400, previous_response_id=first.id)


def test_a_joined_body_counts_its_own_items_twice_as_it_has_them():
    """The joined body has the items of this request as the client wrote them, and again in the
    list of all: both are within the longest body."""
    with Served(PacedEngine(saying("x")), kept=KeptResponses(1 << 20)) as made:
        made.service.limits = Limits(running_max=2, waiting_max=2, length_max=4096, body_max=900)
        first = create(made, input="x" * 100, max_output_tokens=2)
        create(made, input="y" * 100, previous_response_id=first.id, max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="at most 900 are read"):
            create(made, input="y" * 300, previous_response_id=first.id, max_output_tokens=2)


def test_a_body_too_long_to_be_joined_is_answered_and_not_kept():
    with Served(PacedEngine(saying("x")), kept=KeptResponses(64 << 20)) as made:
        pad = {"metadata": {"pad": "x"}, "instructions": "y " * 100}
        long = json.dumps({"input": "When?", "max_output_tokens": 2, **pad}).encode()
        long += b" " * (JOINED_BYTES_MAX + 1 - len(long))
        status, said = exchange(made, long)
        assert (status, said["store"]) == (200, False)
        assert exchange(made, long[:-1])[1]["store"] is True
        follows = b'{"previous_response_id": "a", "input": "x"}'
        status, error = exchange(made, follows + b" " * JOINED_BYTES_MAX)
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "nor followed by a body of more than 4 MiB" in error["message"]


def test_without_the_setting_nothing_is_kept():
    with Served(PacedEngine(saying("x"))) as made:
        first = create(made, input="When?")
        assert first.store is False
        with pytest.raises(openai.BadRequestError, match="not kept without --keep-responses"):
            create(made, input="Sure?", previous_response_id=first.id)
        gone = pytest.raises(openai.NotFoundError, match="--keep-responses is not set")
        with client(made) as asking, gone:
            asking.responses.retrieve(first.id)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"server_processes": 2}, "server_processes is 2: each process"),
        ({"role": "prefill", "peer_secret": "s" * 16}, "role is prefill: each worker"),
        ({"role": "decode", "peer_secret": "s" * 16}, "role is decode: each worker"),
        (
            {"dp_size": 2, "dp_rank": 0, "dist_init_addr": "127.0.0.1:29500"},
            "dp_rank is 0: each rank",
        ),
    ],
)
def test_several_processes_would_each_find_their_own(given: dict[str, Any], says: str):
    settled = resolve({"keep_responses": "1MiB", **given}, environment={})
    with pytest.raises(BadInput, match=f"keep_responses is 1MiB, and {says} would find its own"):
        derived(settled, read_checkpoint("ess-embedded"))


def test_a_size_that_is_none_names_the_setting():
    checkpoint = read_checkpoint("ess-embedded")
    with pytest.raises(BadInput, match="keep_responses: '256MX' is not a size"):
        derived(resolve({"keep_responses": "256MX"}, environment={}), checkpoint)
    assert not derived(resolve({}, environment={}), checkpoint).settings.keep_responses
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
