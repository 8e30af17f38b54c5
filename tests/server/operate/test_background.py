"""Responses that are made in the background: begun, asked for, cancelled, lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from ess.server.dialects.routes import openai_responses
from ess.server.process.requests.kept_responses import KeptResponses
from tests.server.harness import PacedEngine, Served, counting, saying, until


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(PacedEngine(saying(" It is noon.")), kept=KeptResponses(1 << 20)) as served:
        yield served


@pytest.fixture
def slow() -> Iterator[Served]:
    engine = PacedEngine(counting(4000), pace_s=0.02)
    with Served(engine, kept=KeptResponses(1 << 20)) as served:
        yield served


def client(served: Served, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0)


def begin(asking: openai.OpenAI, **asked: Any) -> Any:
    return asking.responses.create(model="test-model", input="When?", background=True, **asked)


def test_a_response_is_made_while_nobody_waits(served: Served):
    with client(served) as asking:
        begun = begin(asking)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        until(lambda: asking.responses.retrieve(begun.id).status == "completed", "its end")
        made = asking.responses.retrieve(begun.id)
        assert made.output_text.strip() == "It is noon."
        assert made.usage is not None
        assert made.usage.output_tokens > 0
        assert asking.responses.cancel(begun.id) == made, "it has ended"
        waited = asking.responses.create(model="test-model", input="When?")
        assert (waited.background, waited.output_text) == (False, made.output_text)
        after = asking.responses.create(
            model="test-model", input="Sure?", previous_response_id=begun.id
        )
        assert after.previous_response_id == begun.id
    assert served.service.kept is not None
    until(lambda: served.service.kept.held_bytes == 0, "nothing is held any more")


@pytest.mark.parametrize("way", ["cancel", "delete"])
def test_one_that_is_ended_frees_the_engine(slow: Served, way: str):
    with client(slow) as asking, client(slow, "another") as stranger:
        begun = begin(asking, max_output_tokens=3000)
        until(lambda: slow.service.open_count == 1, "its beginning")
        for refused in (stranger.responses.cancel, stranger.responses.delete):
            with pytest.raises(openai.NotFoundError):
                refused(begun.id)
        assert asking.responses.retrieve(begun.id).status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="has not ended yet"):
            asking.responses.create(model="test-model", input="And?", previous_response_id=begun.id)
        if way == "cancel":
            ended = asking.responses.cancel(begun.id)
            assert (ended.status, ended.output) == ("cancelled", [])
            assert asking.responses.retrieve(begun.id) == ended
            assert asking.responses.cancel(begun.id) == ended
        else:
            asking.responses.delete(begun.id)
            with pytest.raises(openai.NotFoundError):
                asking.responses.retrieve(begun.id)
        until(lambda: slow.service.open_count == 0, "its end")
        until(lambda: len(slow.engine.aborted) == 1, "the engine's word")
    assert slow.service.kept is not None
    assert slow.service.kept.held_bytes == 0


def test_a_document_that_a_thread_makes_is_kept_by_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """The thread goes on where its request is cancelled, and may not bring a deleted one back."""
    seen: list[str] = []

    async def made_of(grown: Any, whole: Any) -> Any:
        made = await asyncio.to_thread(whole)
        shelf = served.service.kept
        assert shelf is not None
        seen.extend(kept.document.decode() for kept in shelf._kept.values())
        return made

    monkeypatch.setattr(openai_responses, "made_of", made_of)
    with client(served) as asking:
        begun = begin(asking)
        until(lambda: asking.responses.retrieve(begun.id).status == "completed", "its end")
    assert any('"in_progress"' in document for document in seen if begun.id in document)
    assert not any('"completed"' in document for document in seen if begun.id in document)


def test_an_engine_that_is_lost_is_the_reason(slow: Served):
    with client(slow) as asking:
        begun = begin(asking, max_output_tokens=3000)
        slow.call(lambda: slow.service.link.interrupt("the engine is gone"))
        until(lambda: asking.responses.retrieve(begun.id).status == "failed", "its end")
        error = asking.responses.retrieve(begun.id).error
        assert error is not None
        assert (error.code, error.message) == ("server_error", "the engine is gone")


def test_what_cannot_be_made_in_the_background_starts_nothing(slow: Served):
    with client(slow) as asking:
        for asked, why in (({"stream": True}, "stream"), ({"store": False}, "is kept")):
            with pytest.raises(openai.BadRequestError, match=f"^Error code: 400 - .*{why}"):
                begin(asking, **asked)
        begin(asking, max_output_tokens=3000, extra_body={"request_id": "mine"})
        with pytest.raises(openai.BadRequestError, match="is being made already"):
            begin(asking, extra_body={"request_id": "mine"})
        assert asking.responses.retrieve("resp_mine").status == "in_progress"
        until(lambda: slow.service.open_count == 1, "the first alone")
        asking.responses.cancel("resp_mine")
        until(lambda: slow.service.open_count == 0, "no request")
    with (
        Served(PacedEngine(saying("x")), kept=KeptResponses(400)) as small,
        client(small) as asking,
    ):
        with pytest.raises(openai.BadRequestError, match="too large to be kept"):
            begin(asking)
        until(lambda: small.service.open_count == 0, "no request")
