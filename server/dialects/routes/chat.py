"""/v1/chat/completions: a conversation in, a message out, with reasoning and tool calls."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.engine.tokens.chance import Chance
from ess.errors import BadInput
from ess.models.chat.messages import Reply
from ess.models.chat.reply import (
    CallArguments,
    CallBegin,
    Content,
    Event,
    Reasoning,
    ReplyParser,
    parse,
)
from ess.server.dialects import sampling_params, schemas
from ess.server.dialects.answers import begin_reply
from ess.server.dialects.forms.asked import Forms
from ess.server.dialects.forms.calls import rules_of
from ess.server.dialects.generation import Delta, Generation
from ess.server.dialects.logprobs import chat_logprobs, prompt_logprobs
from ess.server.dialects.routes.completions import has_usage, usage, usage_of_chunk
from ess.server.dialects.streaming import Answer, Writer, event, read, respond
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON
from ess.server.process.service import Service


async def chat(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.ChatAsk)
    ask, [prompt] = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    if ask.modalities is not None and ask.modalities != ["text"]:
        raise BadInput(f"modalities is {ask.modalities}; only text is served")
    wanted, named = _wanted(service, ask, prepared.forms[0]), ask.rid or ask.request_id
    grown, parsers = begin_reply(request, ask, wanted, prompt, rules_of(ask), named=named)
    shape = ChatShape(service, ask, grown, prompt, parsers)
    writer = ChatWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


def _wanted(service: Service, ask: schemas.ChatAsk, forms: Forms) -> sampling_params.SamplingWishes:
    if ask.top_logprobs and not ask.logprobs:
        raise BadInput("top_logprobs must come with logprobs: true")
    is_newer = ask.max_completion_tokens is not None
    tokens_max = ask.max_completion_tokens if is_newer else ask.max_tokens
    wanted = sampling_params.wanted_of_openai(
        ask,
        tokens_max=tokens_max,
        logprobs=(ask.top_logprobs or 0) if ask.logprobs else None,
        more_stops=service.style.stops,
        forms=forms,
        names={
            "logprobs": "top_logprobs",
            "the prompt": "messages: the prompt",
            **({"max_tokens": "max_completion_tokens"} if is_newer else {}),
        },
    )
    if service.is_marked and ask.skip_special_tokens is None:
        wanted.keep_special = True
    return wanted


@dataclass(eq=False)
class ChatShape:
    """The documents of one answer."""

    service: Service
    ask: schemas.ChatAsk
    grown: Answer
    prompt: list[int]
    parsers: Sequence[ReplyParser]

    def __post_init__(self) -> None:
        ask = self.ask
        hides = ask.include_reasoning is False or (ask.reasoning or {}).get("exclude") is True
        self.shows_reasoning = not hides
        self._created = int(time.time())

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.grown.call.request_id}",
            "object": kind,
            "created": self._created,
            "model": self.ask.model or self.service.name,
        }

    def usage(self) -> dict[str, Any]:
        return usage([self.prompt], self.grown.generations)

    def usage_of_all(self, reasonings: Sequence[str]) -> dict[str, Any]:
        """The counts at the end; `reasonings` has the reasoning of each answer."""
        counts = map(Generation.count_up_to, self.grown.generations, reasonings)
        return {**self.usage(), "completion_tokens_details": {"reasoning_tokens": sum(counts)}}

    def logprobs(self, tokens: Sequence[int], chances: Sequence[Chance]) -> dict[str, Any] | None:
        if not self.ask.logprobs:
            return None
        by_id = bool(self.ask.return_tokens_as_token_ids)
        return chat_logprobs(self.service.tokenizer, tokens, chances, by_id=by_id)

    def whole(self) -> dict[str, Any]:
        generations = self.grown.generations
        replies = [
            parse(parser, generation.text)
            for parser, generation in zip(self.parsers, generations, strict=True)
        ]
        choices = [
            self._choice(i, generation, reply)
            for i, (generation, reply) in enumerate(zip(generations, replies, strict=True))
        ]
        counts = self.usage_of_all([reply.reasoning for reply in replies])
        document = {**self.head("chat.completion"), "choices": choices, "usage": counts}
        if self.ask.return_token_ids:
            document["prompt_token_ids"] = self.prompt
        if self.ask.prompt_logprobs is not None:
            chances = self.grown.generations[0].prompt_chances
            document["prompt_logprobs"] = prompt_logprobs(
                self.service.tokenizer, self.prompt, chances
            )
        return document

    def _choice(self, index: int, generation: Generation, reply: Reply) -> dict[str, Any]:
        content = reply.content or (None if reply.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.reasoning and self.shows_reasoning:
            message |= reasoned(reply.reasoning)
        if reply.tool_calls:
            message["tool_calls"] = [
                _call(new_call_id(), call.name, call.arguments) for call in reply.tool_calls
            ]
        choice = {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(generation.tokens, generation.chances),
            "finish_reason": finish_of(generation, has_calls=bool(reply.tool_calls)),
            "stop_reason": stop_of(self.service, generation.stopped_by),
        }
        return {**choice, "token_ids": generation.tokens} if self.ask.return_token_ids else choice


class ChatWriter(Writer):
    """Chunks of a stream; the bytes around plain content are encoded once."""

    def __init__(self, shape: ChatShape) -> None:
        self._shape = shape
        self._encoder = msgspec.json.Encoder()
        options = shape.ask.stream_options
        self._has_usage = has_usage(shape.service, options)
        self._counts = bool(options and options.continuous_usage_stats)
        self._is_plain = not (self._counts or shape.ask.return_token_ids)
        self._has_calls = [False] * len(shape.grown.generations)
        self._reasonings: list[list[str]] = [[] for _ in shape.grown.generations]
        head = shape.head("chat.completion.chunk")
        self._head = head
        self._open = event({**head, "choices": [{"index": 0}]})[: -len(b"0}]}\n\n")]
        null = b',"usage":null' if self._has_usage else b""
        self._close = b'},"logprobs":null,"finish_reason":null}]' + null + b"}\n\n"

    def begin(self) -> bytes:
        role = {"role": "assistant", "content": ""}
        prompt = self._shape.prompt if self._shape.ask.return_token_ids else None
        return b"".join(
            self._chunk(index, role, prompt=None if index else prompt)
            for index in range(len(self._shape.grown.generations))
        )

    def feed(self, index: int, delta: Delta) -> bytes:
        parser = self._shape.parsers[index]
        events = parser.push(delta.text) if delta.text else []
        if delta.finish is not None:
            events = [*events, *parser.finish()]
        logprobs = self._shape.logprobs(delta.tokens, delta.chances) if delta.tokens else None
        is_quick = logprobs is None and delta.finish is None and self._is_plain
        if is_quick and len(events) == 1:
            [only] = events
            if isinstance(only, Content):
                return self._content(index, only.text)
        return self._slow(index, delta, events, logprobs)

    def _content(self, index: int, text: str) -> bytes:
        content = self._encoder.encode(text)
        return b'%b%d,"delta":{"content":%b%b' % (self._open, index, content, self._close)

    def _slow(
        self,
        index: int,
        delta: Delta,
        events: Sequence[Event],
        logprobs: dict[str, Any] | None,
    ) -> bytes:
        deltas = [fields for parsed in events if (fields := self._fields(index, parsed))]
        tokens = delta.tokens if self._shape.ask.return_token_ids else ()
        if not deltas and (logprobs is not None or tokens):
            deltas = [{"content": ""}]
        chunks = [
            self._chunk(
                index,
                fields,
                logprobs=None if place else logprobs,
                tokens=() if place else tokens,
            )
            for place, fields in enumerate(deltas)
        ]
        if delta.finish is not None:
            finish = finish_of(
                self._shape.grown.generations[index], has_calls=self._has_calls[index]
            )
            stop = stop_of(self._shape.service, delta.stopped_by)
            chunks.append(self._chunk(index, {}, finish=finish, stop=stop))
        return b"".join(chunks)

    def _fields(self, index: int, parsed: Event) -> dict[str, Any]:
        match parsed:
            case Content(text):
                return {"content": text}
            case Reasoning(text):
                self._reasonings[index].append(text)
                return reasoned(text) if self._shape.shows_reasoning else {}
            case CallBegin(number, name):
                self._has_calls[index] = True
                call = _call(new_call_id(), name, "")
                return {"tool_calls": [{"index": number, **call}]}
            case CallArguments(number, text):
                return {"tool_calls": [{"index": number, "function": {"arguments": text}}]}
        return {}

    def _chunk(
        self,
        index: int,
        fields: Mapping[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
        stop: str | int | None = None,
        tokens: Sequence[int] = (),
        prompt: list[int] | None = None,
    ) -> bytes:
        choice = {"index": index, "delta": fields, "logprobs": logprobs, "finish_reason": finish}
        if stop is not None:
            choice["stop_reason"] = stop
        if self._shape.ask.return_token_ids:
            choice["token_ids"] = tokens
        chunk = {**self._head, "choices": [choice]}
        if prompt is not None:
            chunk["prompt_token_ids"] = prompt
        return event(
            {
                **chunk,
                **usage_of_chunk(self._shape, is_last_only=self._has_usage, counts=self._counts),
            }
        )

    def end(self) -> bytes:
        if not self._has_usage:
            return b""
        counts = self._shape.usage_of_all(["".join(texts) for texts in self._reasonings])
        return event({**self._head, "choices": [], "usage": counts})


def reasoned(text: str) -> dict[str, str]:
    """Reasoning under both of its names: DeepSeek's and SGLang's, and vLLM's of today."""
    return {"reasoning_content": text, "reasoning": text}


def finish_of(generation: Generation, *, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and generation.finish == "stop" else generation.finish


def stop_of(service: Service, stopped_by: str | int | None) -> str | int | None:
    """The stop that clients see; the chat format's own end-of-turn tokens are hidden."""
    return None if stopped_by in service.style.stops else stopped_by


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _call(identity: str, name: str, arguments: str) -> dict[str, Any]:
    return {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


DOORS: Final = (
    Door(
        "POST",
        ("/v1/chat/completions",),
        chat,
        "Answer a conversation.",
        schemas.ChatAsk,
        (JSON, EVENTS),
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    ),
)
