"""SGLang's /generate and vLLM's /inference/v1/generate: the routes that routers call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ess.engine.tokens.chance import Chance
from ess.errors import BadInput
from ess.server.dialects import sampling_params, schemas
from ess.server.dialects.answers import begin_answer
from ess.server.dialects.forms.asked import Forms
from ess.server.dialects.generation import Delta, Generation
from ess.server.dialects.logprobs import chat_logprobs, prompt_logprobs, token_text
from ess.server.dialects.prompts import Prepared
from ess.server.dialects.routes.completions import has_usage, usage, usage_of_chunk
from ess.server.dialects.schemas import sglang_samplings
from ess.server.dialects.streaming import Answer, Writer, event, read, respond
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON
from ess.server.process.service import Service
from ess.units import counted

T = TypeVar("T")

WEIGHT_VERSION: Final = "default"
"""SGLang's word for weights that were never replaced; trainers keep it with each answer."""


async def generate(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.GenerateAsk)
    ask, prompts = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    scores = _score_wishes(ask, prompts)
    parts, forms = prepared.each(sglang_samplings(ask).items()), prepared.each(prepared.forms)
    wanted = [
        _wanted(ask, sampling, form, score, place=place)
        for (place, sampling), form, score in zip(parts, forms, scores, strict=True)
    ]
    named = ask.rid if isinstance(ask.rid, str) else None
    names = _names(request, ask, prepared)
    grown = begin_answer(request, ask, wanted, prompts, named=named, names=names)
    is_many = prepared.is_many or len(grown.generations) > 1
    alone = [is_prompt_alone(sampling) for _, sampling in parts]
    shape = GenerateShape(ask, grown, prompts, scores, alone, is_many=is_many)
    writer = GenerateWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


def _names(
    request: Request, ask: schemas.GenerateAsk, prepared: Prepared[schemas.GenerateAsk]
) -> Sequence[str]:
    """The ids of the prompts where each has its own: those of the body, or ID_0, ID_1 ..."""
    count = len(prepared.prompts)
    if isinstance(ask.rid, list):
        if len(ask.rid) != count:
            raise BadInput(f"rid must be a text, or a list of {count:,}: an id for each prompt")
        return ask.rid
    own = ask.rid or request.state.request_id
    return [f"{own}_{place}" for place in range(count) if prepared.is_many]


class ScoreWishes(NamedTuple):
    """Which log probabilities a client wants of a prompt: those of its answer's tokens, each with
    the `top` likeliest, and those of its own tokens from `start` on. None is for none."""

    top: int | None
    start: int | None


def _score_wishes(ask: schemas.GenerateAsk, prompts: Sequence[list[int]]) -> list[ScoreWishes]:
    """For each prompt. A start behind its last token, or of -1, is for none of its tokens."""
    count = len(prompts)
    wanted = _each("return_logprob", ask.return_logprob, count)
    tops = _each("top_logprobs_num", ask.top_logprobs_num, count)
    starts = _each("logprob_start_len", ask.logprob_start_len, count)
    if any(tops) and not any(wanted):
        raise BadInput("top_logprobs_num must come with return_logprob: true")
    scores = []
    for is_wanted, top, start, prompt in zip(wanted, tops, starts, prompts, strict=True):
        start = -1 if start is None or not is_wanted else start
        if start > len(prompt):
            has = counted(len(prompt), "token")
            raise BadInput(f"logprob_start_len is {start:,}, the prompt has {has}")
        is_inside = 0 <= start < len(prompt)
        scores.append(ScoreWishes((top or 0) if is_wanted else None, start if is_inside else None))
    return scores


def _each(name: str, asked: T | list[T] | None, count: int) -> Sequence[T | None]:
    """The value for each prompt: one for all, or a list of them."""
    if not isinstance(asked, list):
        return [asked] * count
    if len(asked) != count:
        entries = counted(len(asked), "entry", "entries")
        raise BadInput(f"{name} has {entries} for {counted(count, 'prompt')}")
    return asked


def is_prompt_alone(sampling: schemas.SglangSampling) -> bool:
    """Whether a client wants the scores of a prompt, or the prompt in the cache, and no answer: the
    engine makes a token that is not shown."""
    return sampling.max_new_tokens == 0


def _wanted(
    ask: schemas.GenerateAsk,
    sampling: schemas.SglangSampling,
    forms: Forms,
    scores: ScoreWishes,
    *,
    place: str,
) -> sampling_params.SamplingWishes:
    field = "input_ids" if ask.text is None else "text"
    return sampling_params.wanted_of(
        sampling,
        tokens_max=1 if is_prompt_alone(sampling) else sampling.max_new_tokens,
        tokens_usual=128,
        tokens_min=sampling.min_new_tokens,
        keep_stop=bool(sampling.no_stop_trim),
        keep_special=sampling.skip_special_tokens is False,
        seed=sampling.sampling_seed,
        logprobs=scores.top,
        prompt_logprobs=None if scores.start is None else scores.top,
        prompt_start=scores.start or 0,
        forms=forms,
        names={
            **{name: place + name for name in sampling.__struct_fields__ if place},
            "max_tokens": f"{place}max_new_tokens",
            "min_tokens": f"{place}min_new_tokens",
            "logprobs": "top_logprobs_num",
            "prompt_logprobs": "top_logprobs_num",
            "prompt": field,
            "the prompt": f"{field}: the prompt",
        },
    )


class GrowingList:
    """JSON of a list that only grows: what has been encoded is copied, and not made again."""

    def __init__(self) -> None:
        self._json = bytearray(b"[")
        self._count = 0

    def up_to(self, count: int, shown: Callable[[int], Any]) -> msgspec.Raw:
        """The list of `count` items, of which `shown` gives those that are new."""
        for at in range(self._count, count):
            self._json += b"," * (at > 0) + msgspec.json.encode(shown(at))
        self._count = count
        return msgspec.Raw(self._json + b"]")


class GenerateShape:
    def __init__(
        self,
        ask: schemas.GenerateAsk,
        grown: Answer,
        prompts: Sequence[list[int]],
        scores: Sequence[ScoreWishes],
        alone: Sequence[bool],
        *,
        is_many: bool,
    ) -> None:
        self.ask = ask
        self.grown = grown
        self.prompts = prompts
        self.scores = scores
        self.is_many = is_many
        self._alone = alone
        self._lists: defaultdict[tuple[int, str], GrowingList] = defaultdict(GrowingList)

    def whole(self) -> Any:
        answers = [self.answer(index) for index in range(len(self.grown.generations))]
        return answers if self.is_many else answers[0]

    def answer(self, index: int) -> dict[str, Any]:
        """SGLang's form: everything so far, in every chunk."""
        grown = self.grown.generations[index]
        choices = len(self.grown.generations) // len(self.prompts)
        place = index // choices
        made = 0 if self._alone[place] else grown.made_count
        meant: dict[str, Any] = {
            "id": self.grown.call.names[index],
            "finish_reason": finish_reason(grown, made),
            "prompt_tokens": len(self.prompts[place]),
            "completion_tokens": made,
            "cached_tokens": grown.cached_count,
            "weight_version": WEIGHT_VERSION,
        }
        scores = self.scores[place]
        if scores.top is not None:
            meant |= {"input_token_logprobs": (), **self._output_logprobs(index, grown, made)}
        if scores.start is not None:
            scored = self.grown.generations[place * choices].prompt_chances
            meant |= self._input_logprobs(index, self.prompts[place], scores.start, scored)
        ids = self._list(index, "output_ids", made, grown.tokens.__getitem__)
        document = {"text": grown.text if made else "", "output_ids": ids, "meta_info": meant}
        if self.ask.return_prompt_token_ids and grown.finish is not None:
            document["prompt_token_ids"] = self.prompts[place]
        return {**document, "index": index} if self.is_many else document

    def _input_logprobs(
        self, index: int, prompt: Sequence[int], start: int, chances: Sequence[Chance]
    ) -> dict[str, msgspec.Raw]:
        """The first position has no chance. An aborted prompt has fewer chances than tokens."""
        count = min(1 + len(chances), len(prompt) - start)

        def scored(at: int) -> list[Any]:
            return self._scored(chances[at - 1].logprob if at else None, prompt[start + at])

        def top(at: int) -> list[list[Any]] | None:
            return self._top(chances[at - 1]) if at else None

        return {
            "input_token_logprobs": self._list(index, "input", count, scored),
            "input_top_logprobs": self._list(index, "input_top", 1 + len(chances), top),
        }

    def _output_logprobs(self, index: int, grown: Generation, count: int) -> dict[str, msgspec.Raw]:
        tokens, chances = grown.tokens, grown.chances

        def scored(at: int) -> list[Any]:
            return self._scored(chances[at].logprob, tokens[at])

        return {
            "output_token_logprobs": self._list(index, "output", count, scored),
            "output_top_logprobs": self._list(
                index, "output_top", count, lambda at: self._top(chances[at])
            ),
        }

    def _list(self, index: int, name: str, count: int, shown: Callable[[int], Any]) -> msgspec.Raw:
        return self._lists[index, name].up_to(count, shown)

    def _top(self, chance: Chance) -> list[list[Any]]:
        return [self._scored(logprob, token) for token, logprob in chance.top]

    def _scored(self, logprob: float | None, token: int) -> list[Any]:
        is_shown = self.ask.return_text_in_logprobs
        text = token_text(self.grown.service.tokenizer, token) if is_shown else None
        return [logprob, token, text]


def finish_reason(grown: Generation, made: int) -> dict[str, Any] | None:
    """`made` tokens are shown: where none are, nothing was stopped. What stopped an answer is a
    stop string or its last token, the model's own end token too."""
    match grown.finish:
        case None:
            return None
        case "abort":
            return {"type": "abort", "message": "aborted", "status_code": 499}
        case reason if reason == "length" or not made:
            return {"type": "length", "length": made}
    stop = grown.stopped_by
    return {"type": "stop", "matched": grown.tokens[-1] if stop is None else stop}


class GenerateWriter(Writer):
    repeats_chances = True

    def __init__(self, shape: GenerateShape) -> None:
        self._shape = shape

    def feed(self, index: int, delta: Delta) -> bytes:
        if not delta.tokens and delta.finish is None:
            return b""
        return event(self._shape.answer(index))


async def generate_tokens(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.TokensAsk)
    ask, prompts = prepared.ask, prepared.prompts
    service.check_model(ask.model)
    sampling = ask.sampling_params
    sampling_params.refuse_streamed(ask.stream, sampling.prompt_logprobs)
    wanted = sampling_params.wanted_of(
        sampling,
        tokens_max=sampling.max_tokens,
        tokens_usual=16,
        tokens_min=sampling.min_tokens,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        forms=prepared.forms[0],
        names={"prompt": "token_ids", "the prompt": "token_ids: the prompt"},
    )
    grown = begin_answer(request, ask, [wanted], prompts, named=ask.request_id)
    shape = TokensShape(service, ask, grown, prompts)
    writer = TokensWriter(shape) if ask.stream else None
    return await respond(grown, request.receive, writer=writer, whole=shape.whole)


@dataclass(frozen=True, slots=True, eq=False)
class TokensShape:
    """Answers with token ids and no text."""

    service: Service
    ask: schemas.TokensAsk
    grown: Answer
    prompts: Sequence[list[int]]

    def document(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"request_id": self.grown.call.request_id, "choices": choices}

    def choice(self, index: int, generation: Generation | Delta) -> dict[str, Any]:
        has_logprobs = self.ask.sampling_params.logprobs is not None
        return {
            "index": index,
            "token_ids": generation.tokens,
            "logprobs": chat_logprobs(self.service.tokenizer, generation.tokens, generation.chances)
            if has_logprobs
            else None,
            "finish_reason": generation.finish,
            "stop_reason": generation.stopped_by,
        }

    def usage(self) -> dict[str, Any]:
        return usage(self.prompts, self.grown.generations)

    def whole(self) -> dict[str, Any]:
        choices = [
            self.choice(i, generation) for i, generation in enumerate(self.grown.generations)
        ]
        document = {**self.document(choices), "prompt_logprobs": None, "usage": self.usage()}
        if self.ask.sampling_params.prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(
                self.service.tokenizer,
                self.prompts[0],
                self.grown.generations[0].prompt_chances,
            )
        return document


class TokensWriter(Writer):
    def __init__(self, shape: TokensShape) -> None:
        self._shape = shape
        options = shape.ask.stream_options
        self._has_usage = has_usage(shape.grown.service, options)
        self._counts = bool(options and options.continuous_usage_stats)

    def feed(self, index: int, delta: Delta) -> bytes:
        if not delta.tokens and delta.finish is None:
            return b""
        chunk = self._shape.document([self._shape.choice(index, delta)])
        return event(
            {**chunk, **usage_of_chunk(self._shape, is_last_only=False, counts=self._counts)}
        )

    def end(self) -> bytes:
        if not self._has_usage:
            return b""
        return event({**self._shape.document([]), "usage": self._shape.usage()})


DOORS: Final = (
    Door(
        "POST",
        ("/generate",),
        generate,
        "Complete prompts, as SGLang has it.",
        schemas.GenerateAsk,
        (JSON, EVENTS),
        {"text": "Hello", "sampling_params": {"max_new_tokens": 16}},
    ),
    Door(
        "POST",
        ("/inference/v1/generate",),
        generate_tokens,
        "Ids in, ids out.",
        schemas.TokensAsk,
        (JSON, EVENTS),
        {"token_ids": [72, 105], "sampling_params": {"max_tokens": 16}},
    ),
)
