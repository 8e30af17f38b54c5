"""/v1/messages, as clients of Anthropic speak: a conversation in, blocks out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput, EssError
from ess.models.chat.reply import ReplyParser
from ess.server.dialects import sampling_params, schemas
from ess.server.dialects.answers import begin_reply
from ess.server.dialects.forms.asked import Forms
from ess.server.dialects.forms.calls import rules_of
from ess.server.dialects.generation import Delta, Generation
from ess.server.dialects.message_blocks import Blocks, Item
from ess.server.dialects.streaming import Answer, Writer, read, respond
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON, MESSAGES, messages_error
from ess.server.process.service import Service

REASON_OF: Final = {"length": "max_tokens", "stop": "end_turn"}


async def messages(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.MessagesAsk)
    ask, [prompt] = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    _refuse_unserved(ask)
    wanted, rules = _wanted(service, ask, prepared.forms[0]), rules_of(ask)
    grown, [parser] = begin_reply(request, ask, wanted, prompt, rules, named=ask.request_id)
    shape = MessageShape(service, ask, grown, prompt, parser)
    writer = MessageWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


async def count_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.CountTokensAsk)
    service.check_model(prepared.ask.model)
    return Response(prepared.document, media_type=JSON)


def _refuse_unserved(ask: schemas.MessagesAsk) -> None:
    if ask.n not in (None, 1):
        raise BadInput(f"n is {ask.n}, must be 1: a message is one answer")
    if ask.stop is not None:
        raise BadInput("stop is not a field of a message request: give stop_sequences")
    display = (ask.thinking or {}).get("display")
    if display not in (None, "summarized", "omitted"):
        raise BadInput(f"thinking.display is {display!r:.40}; summarized and omitted are served")


def _wanted(
    service: Service, ask: schemas.MessagesAsk, forms: Forms
) -> sampling_params.SamplingWishes:
    """With `max_tokens` 0 a client wants the prompt in the cache and no answer: the engine makes
    a token that is not shown."""
    wanted = sampling_params.wanted_of(
        ask,
        tokens_max=ask.max_tokens or 1,
        seed=ask.seed,
        more_stops=service.style.stops,
        keep_special=service.is_marked,
        forms=forms,
        names={"stop": "stop_sequences", "the prompt": "messages: the prompt"},
    )
    wanted.stop = ask.stop_sequences
    return wanted


class MessageShape:
    """The document of one answer, at its beginning and at its end."""

    def __init__(
        self,
        service: Service,
        ask: schemas.MessagesAsk,
        grown: Answer,
        prompt: list[int],
        parser: ReplyParser,
    ) -> None:
        self.grown = grown
        self.parser = parser
        self.blocks = Blocks(shows_thoughts=(ask.thinking or {}).get("display") != "omitted")
        self._ask = ask
        self._prompt_count = len(prompt)
        self._model = ask.model or service.name

    @property
    def generation(self) -> Generation:
        [only] = self.grown.generations
        return only

    def hear(self, text: str, *, is_last: bool) -> list[Item]:
        """The events of what the model has said."""
        if self._ask.max_tokens == 0:
            return []
        parsed = self.parser.push(text) if text else []
        parsed = [*parsed, *self.parser.finish()] if is_last else parsed
        events = [event for part in parsed for event in self.blocks.take(part)]
        return [*events, *self.blocks.close()] if is_last else events

    def whole(self) -> Item:
        self.hear(self.generation.text, is_last=True)
        return {**self.document(), "content": self.blocks.ended, **self.end()}

    def document(self) -> Item:
        return {
            "id": f"msg_{self.grown.call.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def end(self) -> Item:
        """Why the answer ended, once all its blocks have. An aborted one says `abort`."""
        finish, stopped_by = self.generation.finish, self.generation.stopped_by
        if self._ask.max_tokens == 0 and finish != "abort":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if finish == "stop" and stopped_by in (self._ask.stop_sequences or ()):
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        if finish == "stop" and self.blocks.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": REASON_OF.get(finish or "", finish), "stop_sequence": None}

    def usage(self) -> Item:
        """The usage; in this dialect `input_tokens` are those that were not read from the cache."""
        cached_count, thoughts = self.generation.cached_count, self.blocks.thoughts
        return {
            "input_tokens": self._prompt_count - cached_count,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_count,
            "output_tokens": self.generation.made_count if self._ask.max_tokens else 0,
            "output_tokens_details": {"thinking_tokens": self.generation.count_up_to(thoughts)},
        }


class MessageWriter(Writer):
    """Named events. `message_start` waits for the first piece, which says how much of the prompt
    was cached."""

    done = b""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._encoder = msgspec.json.Encoder()
        self._is_begun = False

    def feed(self, index: int, delta: Delta) -> bytes:
        assert index == 0, "a message is one answer"
        shape = self._shape
        events = shape.hear(delta.text, is_last=delta.finish is not None)
        if not self._is_begun:
            self._is_begun = True
            events = [{"type": "message_start", "message": shape.document()}, *events]
        return self._events(events)

    def end(self) -> bytes:
        shape = self._shape
        last = {"type": "message_delta", "delta": shape.end(), "usage": shape.usage()}
        return self._events([last, {"type": "message_stop"}])

    def fail(self, error: EssError) -> bytes:
        return self._events([messages_error(error, self._shape.grown.call.request_id)[1]])

    def _events(self, events: Sequence[Item]) -> bytes:
        return b"".join(
            b"event: %b\ndata: %b\n\n" % (event["type"].encode(), self._encoder.encode(event))
            for event in events
        )


_EXAMPLE: Final = {"messages": [{"role": "user", "content": "Hello"}]}
DOORS: Final = (
    Door(
        "POST",
        (MESSAGES,),
        messages,
        "Answer a conversation, as Anthropic's API does.",
        schemas.MessagesAsk,
        (JSON, EVENTS),
        {**_EXAMPLE, "max_tokens": 16},
    ),
    Door(
        "POST",
        (f"{MESSAGES}/count_tokens",),
        count_tokens,
        "Count the tokens of a conversation.",
        schemas.CountTokensAsk,
        example=_EXAMPLE,
    ),
)
