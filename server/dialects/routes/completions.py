"""/v1/completions: a text in, its continuation out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.engine.tokens.chance import Chance
from ess.errors import BadInput
from ess.server.dialects import sampling_params, schemas
from ess.server.dialects.answers import begin_answer
from ess.server.dialects.generation import Delta, Finish, Generation
from ess.server.dialects.logprobs import completion_logprobs, prompt_logprobs, text_length
from ess.server.dialects.streaming import Answer, Writer, event, read, respond
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON
from ess.server.process.service import Service


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.CompletionAsk)
    ask, prompts = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    if ask.suffix:
        raise BadInput(
            "suffix is not served: no model here fills in text between prompt and suffix"
        )
    if ask.max_tokens == 0 and ask.echo and ask.stream:
        raise BadInput("max_tokens is 0: leave out stream to get the echo alone")
    wanted = sampling_params.wanted_of_openai(
        ask,
        tokens_max=None if ask.max_tokens is None else ask.max_tokens + is_echo_alone(ask),
        tokens_usual=16,
        logprobs=ask.logprobs,
        prompt_logprobs=_prompt_logprobs(ask),
        forms=prepared.forms[0],
    )
    grown = begin_answer(
        request, ask, prepared.each([wanted]), prompts, named=ask.rid or ask.request_id
    )
    shape = CompletionShape(service, ask, grown, prompts)
    writer = CompletionWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


def is_echo_alone(ask: schemas.CompletionAsk) -> bool:
    """Whether only the prompt is wanted; the engine makes one token, which is not shown."""
    return bool(ask.echo) and ask.max_tokens == 0


def _prompt_logprobs(ask: schemas.CompletionAsk) -> int | None:
    """The larger of vLLM's `prompt_logprobs` and what OpenAI's `echo` implies."""
    asked = (ask.prompt_logprobs, ask.logprobs if ask.echo else None)
    return max((count for count in asked if count is not None), default=None)


@dataclass(eq=False)
class CompletionShape:
    """The documents of one answer."""

    service: Service
    ask: schemas.CompletionAsk
    grown: Answer
    prompts: Sequence[list[int]]

    def __post_init__(self) -> None:
        self.choices = len(self.grown.generations) // len(self.prompts)
        self.head: dict[str, Any] = {
            "id": f"cmpl-{self.grown.call.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.ask.model or self.service.name,
        }

    def echoed(self, index: int) -> str:
        if not self.ask.echo:
            return ""
        return self.service.tokenizer.decode(self.prompts[index // self.choices])

    def usage(self) -> dict[str, Any]:
        counted = usage(self.prompts, self.grown.generations)
        if is_echo_alone(self.ask):
            counted |= {"completion_tokens": 0, "total_tokens": counted["prompt_tokens"]}
        return counted

    def logprobs(
        self, tokens: Sequence[int], chances: Sequence[Chance | None], offset: int
    ) -> dict[str, Any] | None:
        if self.ask.logprobs is None:
            return None
        by_id = bool(self.ask.return_tokens_as_token_ids)
        return completion_logprobs(self.service.tokenizer, tokens, chances, offset, by_id=by_id)

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(i, generation) for i, generation in enumerate(self.grown.generations)
        ]
        return {**self.head, "choices": choices, "usage": self.usage()}

    def scored(self, index: int) -> tuple[list[int], list[Chance | None]]:
        """The scored tokens of an echoed prompt: an aborted prompt has fewer than tokens."""
        if not self.ask.echo or self.ask.logprobs is None:
            return [], []
        chances = [None, *self._prompt_chances(index, self.ask.logprobs)]
        return self.prompts[index // self.choices][: len(chances)], chances

    def _prompt_chances(self, index: int, top_count: int) -> list[Chance]:
        """The prompt's log probabilities, which only the first choice carries."""
        first = self.grown.generations[index // self.choices * self.choices]
        return [
            msgspec.structs.replace(prompt_chance, top=prompt_chance.top[:top_count])
            for prompt_chance in first.prompt_chances
        ]

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        if is_echo_alone(self.ask):
            how: Finish = "abort" if generation.finish == "abort" else "length"
            generation = Generation(self.service.tokenizer, generation.ending, finish=how)
        tokens, chances = self.scored(index)
        choice = {
            "index": index,
            "text": self.echoed(index) + generation.text,
            "logprobs": self.logprobs(
                [*tokens, *generation.tokens], [*chances, *generation.chances], 0
            ),
            "finish_reason": generation.finish,
            "stop_reason": generation.stopped_by,
        }
        if self.ask.return_token_ids:
            choice["token_ids"] = generation.tokens
            choice["prompt_token_ids"] = self.prompts[index // self.choices]
        if self.ask.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                self.service.tokenizer,
                self.prompts[index // self.choices],
                self._prompt_chances(index, self.ask.prompt_logprobs),
            )
        return choice


class CompletionWriter(Writer):
    """Chunks of a stream; the bytes around a text are encoded once per choice."""

    def __init__(self, shape: CompletionShape) -> None:
        self._shape = shape
        self._encoder = msgspec.json.Encoder()
        options = shape.ask.stream_options
        self._has_usage = has_usage(shape.service, options)
        self._counts = bool(options and options.continuous_usage_stats)
        has_text_only = shape.ask.logprobs is None and not shape.ask.return_token_ids
        self._is_plain = has_text_only and not self._counts
        self._offsets = [0] * len(shape.grown.generations)
        self._has_echoed = [False] * len(shape.grown.generations)
        self._has_told_prompt = [False] * len(shape.grown.generations)
        marked = {**shape.head, "choices": [{"index": 0, "text": ""}]}
        self._open = event(marked)[: -len(b'0,"text":""}]}\n\n')]
        null = b',"usage":null' if self._has_usage else b""
        self._close = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + null + b"}\n\n"
        )

    def begin(self) -> bytes:
        if not self._shape.ask.echo or self._shape.ask.logprobs is not None:
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

    def _echo(self, index: int) -> tuple[str, list[int], list[Chance | None]]:
        """The echoed prompt: its log probabilities are known with its first delta."""
        shape = self._shape
        if not shape.ask.echo or shape.ask.logprobs is None or self._has_echoed[index]:
            return "", [], []
        self._has_echoed[index] = True
        return shape.echoed(index), *shape.scored(index)

    def _chunk(self, index: int, delta: Delta) -> dict[str, Any]:
        echo, scored, known = self._echo(index)
        tokens, chances = [*scored, *delta.tokens], [*known, *delta.chances]
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + delta.text,
            "logprobs": self._shape.logprobs(tokens, chances, self._offsets[index]),
            "finish_reason": delta.finish,
            "stop_reason": delta.stopped_by,
        }
        if self._shape.ask.logprobs is not None:
            self._offsets[index] += text_length(self._shape.service.tokenizer, tokens)
        if self._shape.ask.return_token_ids:
            choice["token_ids"] = delta.tokens
            if not self._has_told_prompt[index]:
                self._has_told_prompt[index] = True
                choice["prompt_token_ids"] = self._shape.prompts[index // self._shape.choices]
        chunk = {**self._shape.head, "choices": [choice]}
        return {
            **chunk,
            **usage_of_chunk(self._shape, is_last_only=self._has_usage, counts=self._counts),
        }

    def end(self) -> bytes:
        if not self._has_usage:
            return b""
        return event({**self._shape.head, "choices": [], "usage": self._shape.usage()})


def has_usage(service: Service, options: schemas.StreamOptions | None) -> bool:
    """Whether a stream ends with its usage."""
    return service.limits.tells_usage or bool(options and options.include_usage)


class Counted(Protocol):
    def usage(self) -> dict[str, Any]: ...


def usage_of_chunk(shape: Counted, *, is_last_only: bool, counts: bool) -> dict[str, Any]:
    """The usage in a chunk: the counts so far, null until the last chunk, or nothing."""
    if counts:
        return {"usage": shape.usage()}
    return {"usage": None} if is_last_only else {}


def usage(prompts: Sequence[list[int]], generations: Sequence[Generation]) -> dict[str, Any]:
    """Counts a prompt once for all its choices, with the first choice's cached tokens."""
    choices = len(generations) // len(prompts)
    prompt_count = sum(len(prompt) for prompt in prompts)
    made_count = sum(generation.made_count for generation in generations)
    cached_count = sum(generations[i * choices].cached_count for i in range(len(prompts)))
    return {
        "prompt_tokens": prompt_count,
        "completion_tokens": made_count,
        "total_tokens": prompt_count + made_count,
        "prompt_tokens_details": {"cached_tokens": cached_count},
    }


DOORS: Final = (
    Door(
        "POST",
        ("/v1/completions",),
        completions,
        "Complete prompts.",
        schemas.CompletionAsk,
        (JSON, EVENTS),
        {"prompt": "Hello", "max_tokens": 16},
    ),
)
