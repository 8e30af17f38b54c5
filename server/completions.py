"""/v1/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.engine.messages import Chance
from ess.errors import BadInput
from ess.server import asks, wishes
from ess.server.address import begin
from ess.server.answering import Answer, event, respond
from ess.server.generation import Delta, Generation
from ess.server.logprobs import completion_logprobs
from ess.server.service import Service

LONG_CHARS: Final = 20_000


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    ask = asks.read(await request.body(), asks.CompletionAsk)
    service.check_model(ask.model)
    if ask.suffix:
        raise BadInput("suffix is not served: this model does not fill in")
    if ask.echo and ask.logprobs is not None:
        raise BadInput("echo with logprobs is not served: prompts are not scored")
    prompts = await encode(service, ask)
    wanted = wishes.wanted_of_openai(
        ask, tokens_max=16 if ask.max_tokens is None else ask.max_tokens, logprobs=ask.logprobs
    )
    made, ending = wishes.samplings(service, wanted, prompts)
    call = begin(request, ask, made, named=ask.rid or ask.request_id)
    generations = [Generation(service.tokenizer, ending) for _ in made]
    grown = Answer(service, call, generations)
    shape = CompletionShape(service, ask, grown, prompts)
    writer = CompletionWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


async def encode(service: Service, ask: asks.CompletionAsk) -> list[list[int]]:
    given = asks.read_texts(ask.prompt, where="prompt")
    add_special = ask.add_special_tokens is not False
    found = []
    for one in given:
        if isinstance(one, str):
            found.append(await encode_text(service, one, add_special=add_special))
        else:
            found.append(one)
    return found


async def encode_text(service: Service, text: str, *, add_special: bool) -> list[int]:
    """A long text is encoded beside the event loop, which others wait for."""
    if len(text) < LONG_CHARS:
        return service.tokenizer.encode(text, add_special=add_special)
    return await asyncio.to_thread(service.tokenizer.encode, text, add_special=add_special)


class CompletionShape:
    """The documents of one answer."""

    def __init__(
        self,
        service: Service,
        ask: asks.CompletionAsk,
        grown: Answer,
        prompts: Sequence[list[int]],
    ) -> None:
        self.service = service
        self.ask = ask
        self.grown = grown
        self.prompts = prompts
        self.choices = len(grown.generations) // len(prompts)
        self.head: dict[str, Any] = {
            "id": f"cmpl-{grown.call.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": ask.model or service.name,
        }

    def echoed(self, index: int) -> str:
        if not self.ask.echo:
            return ""
        return self.service.tokenizer.decode(self.prompts[index // self.choices])

    def usage(self) -> dict[str, Any]:
        return usage(self.prompts, self.grown.generations)

    def logprobs(
        self, tokens: Sequence[int], chances: Sequence[Chance], offset: int
    ) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        return completion_logprobs(self.service.tokenizer, tokens, chances, offset)

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(i, one) for i, one in enumerate(self.grown.generations)]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def _choice(self, index: int, one: Generation) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": self.echoed(index) + one.text,
            "logprobs": self.logprobs(one.tokens, one.chances, 0),
            "finish_reason": one.finish,
            "stop_reason": one.stopped_by,
        }
        if self.ask.return_token_ids:
            choice["token_ids"] = one.tokens
            choice["prompt_token_ids"] = self.prompts[index // self.choices]
        return choice


class CompletionWriter:
    """Chunks of a stream. The bytes around a text are made once per choice."""

    def __init__(self, shape: CompletionShape) -> None:
        self._shape = shape
        self._encoder = msgspec.json.Encoder()
        options = shape.ask.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._is_plain = shape.ask.logprobs is None and not shape.ask.return_token_ids
        self._told_chars = [0] * len(shape.grown.generations)
        marked = {**shape.head, "choices": [{"index": 0, "text": ""}]}
        self._open = event(marked)[: -len(b'0,"text":""}]}\n\n')]
        null = b',"usage":null' if self._has_usage else b""
        self._close = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + null + b"}\n\n"
        )

    def begin(self) -> bytes:
        if not self._shape.ask.echo:
            return b""
        count = len(self._shape.grown.generations)
        return b"".join(self.feed(i, Delta(self._shape.echoed(i), ())) for i in range(count))

    def feed(self, index: int, delta: Delta) -> bytes:
        if delta.finish is None and self._is_plain:
            if not delta.text:
                return b""
            text = self._encoder.encode(delta.text)
            return b'%b%d,"text":%b%b' % (self._open, index, text, self._close)
        if delta.finish is None and not delta.tokens and not delta.text:
            return b""
        return event(self._chunk(index, delta))

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        offset = self._told_chars[index]
        self._told_chars[index] += len(delta.text)
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._shape.logprobs(delta.tokens, delta.chances, offset),
            "finish_reason": delta.finish,
            "stop_reason": delta.stopped_by,
        }
        if self._shape.ask.return_token_ids:
            choice["token_ids"] = delta.tokens
        chunk = {**self._shape.head, "choices": [choice]}
        return {**chunk, "usage": None} if self._has_usage else chunk

    def end(self) -> bytes:
        if not self._has_usage:
            return b""
        return event({**self._shape.head, "choices": [], "usage": self._shape.usage()})


def usage(prompts: Sequence[list[int]], generations: Sequence[Generation]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; cached tokens are its first choice's."""
    choices = len(generations) // len(prompts)
    prompt_count = sum(len(prompt) for prompt in prompts)
    made_count = sum(one.made_count for one in generations)
    cached_count = sum(generations[i * choices].cached_count for i in range(len(prompts)))
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": made_count,
        "total_tokens": prompt_count + made_count,
        "prompt_tokens_details": {"cached_tokens": cached_count},
    }
