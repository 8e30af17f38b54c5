"""What clients get of a request of which the model makes no numbers."""

from __future__ import annotations

import http.client
import json

import openai
import pytest

from ess.engine.process.fake_engine import PacedRequest
from ess.engine.process.messages import Add, Piece, Progress, ToEngine
from ess.engine.process.wire import SocketWire
from ess.server.process.requests.kept_responses import KeptResponses
from tests.server.harness import TOKENIZER, PacedEngine, Served, saying, until
from tests.support.crowd import Crowd
from tests.support.told import told

WHY = "the logits behind 3 tokens are no numbers"


class Breaking(PacedEngine):
    """Breaks off requests of this prompt before the token of this number."""

    def __init__(self, prompt: list[int], at: int) -> None:
        super().__init__(saying("one two three four"))
        self._prompt, self._at = prompt, at

    def _piece(self, going: PacedRequest) -> Piece:
        if going.add.prompt != self._prompt or going.made_count < self._at:
            return super()._piece(going)
        del self._going[going.add.number]
        return Piece(going.add.number, reason="failed", sentence=WHY, is_ours=True)


@pytest.mark.parametrize("is_stream", [False, True])
def test_before_the_first_token_it_is_a_status(is_stream: bool):
    with Served(Breaking([7, 8], 0)) as served:
        asked = {"prompt": [7, 8], "max_tokens": 9, "stream": is_stream}
        made = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        made.request("POST", "/v1/completions", json.dumps(asked))
        answer = made.getresponse()
        error = json.load(answer)["error"]
        made.close()
    assert (answer.status, error["type"]) == (500, "server_error")
    assert (error["code"], error["message"]) == ("numerical_error", WHY)


class BreakingAtOnce(PacedEngine):
    """Tokens and the failure behind them are one message, so no abort comes between them."""

    def obey(self, message: ToEngine, wire: SocketWire) -> None:
        if not isinstance(message, Add):
            return super().obey(message, wire)
        said = Piece(message.number, tuple(TOKENIZER.encode("one two three")), cached_count=0)
        failed = Piece(message.number, reason="failed", sentence=WHY, is_ours=True)
        wire.give(Progress((said, failed)))


def test_behind_a_stop_string_it_is_no_part_of_the_answer():
    asked = {"prompt": [7, 8], "max_tokens": 9, "stop": " two", "n": 2}
    with Served(BreakingAtOnce(saying(""))) as served:
        asks = [{**asked, "stream": is_stream} for is_stream in (False, True)]
        with Crowd(served.url, asks) as going:
            until(lambda: all(map(going.is_over, range(2))), "their ends")
    for answer in map(told, going.texts):
        assert [choice.text for choice in answer.choices.values()] == ["one", "one"]
        assert {choice.finish for choice in answer.choices.values()} == {"stop"}
        assert answer.error == ""


def test_in_a_stream_it_is_an_event_and_the_other_stream_goes_on():
    with Served(Breaking([7, 8], 2)) as served:
        asked = [{"prompt": prompt, "max_tokens": 9} for prompt in ([7, 8], [7, 9])]
        with Crowd(served.url, asked) as going:
            until(lambda: all(map(going.is_over, range(2))), "their ends")
            broken, whole = map(told, going.texts)
        assert b'"code":"numerical_error"' in going.texts[0]
        assert (broken.error, whole.error) == (WHY, "")
        assert len(whole.choices[0].text) > len(broken.choices[0].text) > 0


def test_a_streamed_response_ends_failed_and_is_kept_so():
    """OpenAI's client raises at the first of the two last events; others read the second."""
    asked = {"input": "When?", "stream": True}
    prompt = TOKENIZER.encode("user: When?\nassistant:")
    with Served(Breaking(prompt, 2), kept=KeptResponses(1 << 20)) as served:
        with Crowd(served.url, [{**asked, "path": "/v1/responses"}], key="none") as going:
            until(lambda: going.is_over(0), "its end")
        lines = going.texts[0].decode().split("\n")
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        *_, said, last = events
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            kept = client.responses.retrieve(last["response"]["id"])
            with pytest.raises(openai.APIError, match=WHY):
                list(client.responses.create(model="test-model", **asked))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (said["type"], said["code"], said["message"]) == ("error", "numerical_error", WHY)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": WHY}
    assert (kept.status, kept.error.message) == ("failed", WHY)
