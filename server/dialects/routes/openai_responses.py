"""/v1/responses: items come in, or the id of a kept response, and the answer's items go out."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.engine.tokens.chance import Chance
from ess.errors import BadInput, EssError
from ess.models.chat.reply import ReplyParser
from ess.server.dialects import sampling_params, schemas
from ess.server.dialects.answers import begin_reply
from ess.server.dialects.forms.asked import Forms
from ess.server.dialects.forms.calls import rules_of
from ess.server.dialects.generation import Delta, Generation
from ess.server.dialects.response_history import History
from ess.server.dialects.response_items import Item, Items
from ess.server.dialects.routes.completions import usage
from ess.server.dialects.scored_reply import ScoredParser
from ess.server.dialects.streaming import Answer, EventStream, Writer, made_of, read, respond
from ess.server.dialects.tools import SEARCH, namespaces_of
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON, error_body
from ess.server.process.service import Service

IGNORED_INCLUDE: Final = "reasoning.encrypted_content"
LOGPROBS: Final = "message.output_text.logprobs"


async def responses(request: Request) -> Response:
    service: Service = request.app.state.service
    history = History(service, request.scope["headers"])
    with contextlib.ExitStack() as held:
        held.callback(history.release)
        response = await _respond(request, service, history)
        if isinstance(response, EventStream | Begun):
            response.held = held.pop_all()
        return response


async def _respond(request: Request, service: Service, history: History) -> Response:
    with history.placing():
        prepared = await read(request, schemas.ResponsesAsk, change=history.joined)
    ask, [prompt] = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    _refuse_unserved(ask)
    if ask.background:
        _check_background(ask, history)
    wanted, rules = _wanted(service, ask, prepared.forms[0]), rules_of(ask)
    grown, [parser] = begin_reply(request, ask, wanted, prompt, rules, named=ask.request_id)
    shape = ResponseShape(service, ask, grown, prompt, parser, history)
    if ask.background:
        return _begun(shape)
    writer = ResponseWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole, keep=shape.keep)


async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of a response would have; nothing is kept for it."""
    service: Service = request.app.state.service
    history = History(service, request.scope["headers"])
    try:
        with history.placing():
            prepared = await read(request, schemas.InputTokensAsk, change=history.joined)
    finally:
        history.release()
    service.check_model(prepared.ask.model)
    if prepared.ask.previous_response_id is not None:
        raise BadInput("previous_response_id is not served without --keep-responses")
    return Response(prepared.document, media_type=JSON)


def _refuse_unserved(ask: schemas.ResponsesAsk) -> None:
    if ask.prompt:
        raise BadInput("prompt is not served: no templates are kept, send all items as input")
    if ask.n not in (None, 1):
        raise BadInput(f"n is {ask.n}, must be 1: a response is one answer")
    if ask.truncation not in (None, "disabled"):
        raise BadInput("truncation is not served: give truncate_prompt_tokens")
    wishes = [wish for wish in ask.include or () if wish not in (IGNORED_INCLUDE, LOGPROBS)]
    if wishes:
        raise BadInput(f"include has {wishes[0]!r:.60}, which is not served")


def _check_background(ask: schemas.ResponsesAsk, history: History) -> None:
    if ask.stream:
        raise BadInput(
            "background is true, and so is stream: leave out stream, and ask for the response by"
            " its id"
        )
    if not history.is_kept:
        raise BadInput(
            "background is served where the response is kept: with --keep-responses, without store:"
            " false, and while there is room for its items"
        )


class Begun(Response):
    """A response that a task goes on to make; `held` is closed at its end."""

    held: contextlib.ExitStack


def _begun(shape: ResponseShape) -> Begun:
    """The document as it is at first, which is kept until the end replaces it."""
    background, owner = shape.service.background, shape.history.owner
    document = shape.document("in_progress")
    try:
        background.check(owner, document["id"])
        shape.history.keep(document)
        if not document["store"]:
            raise BadInput("background: the response is too large to be kept")
    except BadInput:
        shape.grown.give_up()
        raise
    response = Begun(msgspec.json.encode(document), media_type=JSON)
    background.start(owner, document["id"], _made(shape, response))
    return response


async def _made(shape: ResponseShape, response: Begun) -> None:
    """Whatever happens, the document says at the end how the response ended."""
    try:
        await shape.grown.collect()
        shape.keep(await made_of(shape.grown, shape.whole))
    except asyncio.CancelledError:
        shape.broken_off("cancelled")
    except EssError as error:
        shape.broken_off("failed", error)
    except Exception as error:
        logging.getLogger("ess").error("a response in the background failed", exc_info=error)
        shape.broken_off("failed", EssError())
    finally:
        shape.grown.give_up()
        response.held.close()


def _wanted(
    service: Service, ask: schemas.ResponsesAsk, forms: Forms
) -> sampling_params.SamplingWishes:
    return sampling_params.wanted_of(
        ask,
        tokens_max=ask.max_output_tokens,
        seed=ask.seed,
        logprobs=(ask.top_logprobs or 0) if _wants_logprobs(ask) else None,
        more_stops=service.style.stops,
        keep_special=service.is_marked,
        forms=forms,
        names={
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "the prompt": "input: the prompt",
        },
    )


def _wants_logprobs(ask: schemas.ResponsesAsk) -> bool:
    return LOGPROBS in (ask.include or ()) or bool(ask.top_logprobs)


@dataclass(eq=False)
class ResponseShape:
    """The document of one answer, at its beginning and at its end."""

    service: Service
    ask: schemas.ResponsesAsk
    grown: Answer
    prompt: list[int]
    parser: ReplyParser
    history: History

    def __post_init__(self) -> None:
        service = self.service
        self.items = Items(namespaces_of(self.ask.tools))
        self._scored = (
            ScoredParser(self.parser, service.tokenizer, keep_special=service.is_marked)
            if _wants_logprobs(self.ask)
            else None
        )
        self.created = int(time.time())

    @property
    def has_logprobs(self) -> bool:
        return self._scored is not None

    @property
    def generation(self) -> Generation:
        [only] = self.grown.generations
        return only

    def whole(self) -> Item:
        made = self.generation
        self.hear(made.text, made.tokens, made.chances, is_last=True)
        return self._final_document()

    def hear(
        self,
        text: str,
        tokens: Sequence[int],
        chances: Sequence[Chance],
        *,
        is_last: bool,
    ) -> list[Item]:
        """The events of what the model has said."""
        if self._scored is not None:
            scored = self._scored.push(text, tokens, chances)
            scored += self._scored.finish() if is_last else []
            return [event for each in scored for event in self.items.take(*each)]
        heard = self.parser.push(text) if text else []
        heard = [*heard, *self.parser.finish()] if is_last else heard
        return [event for each in heard for event in self.items.take(each)]

    def broken_off(self, status: str, error: EssError | None = None) -> Item:
        """The document without items, with what has made it end; it is kept."""
        document = self.document(status)
        if error is not None:
            told = error_body(error)[1]["error"]
            document["error"] = {"code": "server_error", "message": told["message"]}
        self.history.keep(document)
        return document

    def last(self) -> Item:
        """The document at the end of the answer; it is kept."""
        return self.keep(self._final_document())

    def keep(self, document: Item) -> Item:
        """On the event loop: a thread that makes a document goes on when its request is cancelled,
        and would keep one that was deleted meanwhile."""
        self.history.keep(document)
        return document

    @property
    def _end_status(self) -> str:
        return "completed" if self.generation.finish == "stop" else "incomplete"

    def end_items(self) -> list[Item]:
        return self.items.end(self._end_status)

    def _final_document(self) -> Item:
        """Ends the items."""
        self.end_items()
        document = {
            **self.document(self._end_status),
            "output": self.items.ended,
            "usage": self._usage(),
        }
        if self.generation.finish == "length":
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        return document

    def document(self, status: str) -> Item:
        ask, defaults = self.ask, self.service.defaults
        return {
            "id": f"resp_{self.grown.call.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": bool(ask.background),
            "error": None,
            "incomplete_details": None,
            "instructions": ask.instructions,
            "max_output_tokens": ask.max_output_tokens,
            "metadata": ask.metadata or {},
            "model": ask.model or self.service.name,
            "output": [],
            "parallel_tool_calls": ask.parallel_tool_calls is not False,
            "previous_response_id": self.history.previous,
            "reasoning": {"effort": None, "summary": None, **(ask.reasoning or {})},
            "store": self.history.is_kept,
            "temperature": defaults.temperature if ask.temperature is None else ask.temperature,
            "text": {"format": {"type": "text"}, **(ask.text or {})},
            "tool_choice": ask.tool_choice or "auto",
            "tools": [tool for tool in ask.tools or () if tool.get("type") != SEARCH],
            "top_logprobs": ask.top_logprobs or 0,
            "top_p": defaults.top_p if ask.top_p is None else ask.top_p,
            "truncation": "disabled",
            "usage": None,
        }

    def _usage(self) -> Item:
        counted = usage([self.prompt], self.grown.generations)
        thoughts = [item for item in self.items.ended if item["type"] == "reasoning"]
        text = "".join(part["text"] for item in thoughts for part in item["content"])
        cached_count = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached_count, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.generation.count_up_to(text)},
            "total_tokens": counted["total_tokens"],
        }


class ResponseWriter(Writer):
    """Numbered events."""

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self.ends_long = shape.has_logprobs
        self._encoder = msgspec.json.Encoder()
        self._number = 0

    def begin(self) -> bytes:
        document = self._shape.document("in_progress")
        return self._events(
            [
                {"type": "response.created", "response": document},
                {"type": "response.in_progress", "response": document},
            ]
        )

    def feed(self, index: int, delta: Delta) -> bytes:
        assert index == 0, "a response is one answer"
        shape = self._shape
        is_last = delta.finish is not None
        return self._events(shape.hear(delta.text, delta.tokens, delta.chances, is_last=is_last))

    def end(self) -> bytes:
        return b"".join(self.long_end())

    def long_end(self) -> Iterator[bytes]:
        """The last events of a message repeat all of its log probabilities. The response is kept
        first: its client may leave, or read nothing, between them."""
        events, document = self._shape.end_items(), self._shape.last()
        events.append({"type": f"response.{document['status']}", "response": document})
        yield from map(self._written, events)

    def fail(self, error: EssError) -> bytes:
        """The event of the specification, whose code and message OpenAI's clients read inside an
        object, and the response at its end."""
        told = error_body(error)[1]["error"]
        failure = {**told, "type": "error", "error": told}
        document = self._shape.broken_off("failed", error)
        return self._events([failure, {"type": "response.failed", "response": document}])

    def _events(self, events: Sequence[Item]) -> bytes:
        return b"".join(map(self._written, events))

    def _written(self, event: Item) -> bytes:
        raw = self._encoder.encode({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), raw)


DOORS: Final = (
    Door(
        "POST",
        ("/v1/responses",),
        responses,
        "Answer items.",
        schemas.ResponsesAsk,
        (JSON, EVENTS),
        {"input": "Hello", "max_output_tokens": 16},
    ),
    Door(
        "POST",
        ("/v1/responses/input_tokens",),
        input_tokens,
        "Count the tokens of a response's prompt.",
        schemas.InputTokensAsk,
        example={"input": "Hello"},
    ),
)
