"""From a request body of any dialect to the engine's sampling parameters.

A wrong value is refused here, before anything is queued.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.stops import check_stops
from ess.errors import BadInput
from ess.server.dialects.generation import Ending
from ess.server.dialects.schemas import Common, Sampled, StructuredOutputs
from ess.server.process.service import SamplingDefaults, Service

SEED_BITS: Final = 63


class Wanted(msgspec.Struct, kw_only=True):
    """The fields that all dialects share, before bounds and defaults."""

    tokens_max: int | None
    tokens_min: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    keep_stop: bool = False
    keep_special: bool = False
    seed: int | None = None
    choices: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_start: int = 0
    grammar: Grammar | None = None
    more_stops: tuple[str, ...] = ()


SAME_NAMES: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "stop", "stop_token_ids"),
)


def wanted_of(ask: Sampled, **named: Any) -> Wanted:
    """Fields that all dialects spell alike, and those given by name."""
    same = {name: getattr(ask, name) for name in SAME_NAMES}
    return Wanted(**same, ignore_eos=bool(ask.ignore_eos), choices=ask.n, **named)


def wanted_of_openai(ask: Common, **named: Any) -> Wanted:
    _refuse_unserved(ask)
    refuse_streamed(ask.stream, ask.prompt_logprobs)
    named.setdefault("prompt_logprobs", ask.prompt_logprobs)
    return wanted_of(
        ask,
        tokens_min=ask.min_tokens,
        keep_stop=bool(ask.include_stop_str_in_output or ask.no_stop_trim),
        keep_special=ask.skip_special_tokens is False,
        seed=ask.seed,
        grammar=grammar_of(ask),
        **named,
    )


def samplings(
    service: Service, wanted: Wanted, prompts: Sequence[list[int]]
) -> tuple[list[tuple[list[int], Sampling]], Ending]:
    """One sampling per prompt and choice: the choices of a prompt beside each other, each its own
    seed. The prompt is scored once, by its first choice."""
    if not prompts:
        raise BadInput("the prompt is an empty list")
    choices = 1 if wanted.choices is None else wanted.choices
    if not 1 <= choices <= service.limits.choices_max // len(prompts):
        raise BadInput(
            f"n is {choices} for {len(prompts)} prompts;"
            f" 1 to {service.limits.choices_max} answers fit in one request"
        )
    stops = _stops(wanted)
    seed = secrets.randbits(SEED_BITS) if wanted.seed is None else wanted.seed
    first = _sampling(service, wanted, tokens_max=_tokens_max(service, wanted, prompts[0]))
    made = []
    for prompt in prompts:
        tokens_max = _tokens_max(service, wanted, prompt)
        for choice in range(choices):
            scored = None if choice else first.prompt_logprobs
            own_seed = _wrapped(seed + choice)
            sampling = replace(first, tokens_max=tokens_max, seed=own_seed, prompt_logprobs=scored)
            made.append((prompt, sampling))
    ending = Ending(
        stops=stops,
        stop_ids=frozenset(wanted.stop_token_ids or ()),
        tokens_min=wanted.tokens_min or 0,
        keep_stop=wanted.keep_stop,
        keep_special=wanted.keep_special,
    )
    return made, ending


def _sampling(service: Service, wanted: Wanted, *, tokens_max: int) -> Sampling:
    """Applies the engine's bounds and, for missing fields, the checkpoint's defaults."""
    defaults = service.defaults
    given = {name: getattr(wanted, name) for name in SamplingDefaults.__dataclass_fields__}
    chosen = {
        name: getattr(defaults, name) if value is None else value for name, value in given.items()
    }
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    ends = () if wanted.ignore_eos else service.eos_ids
    found = Sampling(
        tokens_max=tokens_max,
        tokens_min=wanted.tokens_min or 0,
        **chosen,
        presence_penalty=wanted.presence_penalty or 0.0,
        frequency_penalty=wanted.frequency_penalty or 0.0,
        logit_bias=_logit_bias(wanted.logit_bias or {}),
        stop_ids=frozenset((*(wanted.stop_token_ids or ()), *ends)),
        ignore_eos=wanted.ignore_eos,
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        prompt_start=wanted.prompt_start,
        grammar=wanted.grammar,
    )
    found.check_ids(service.vocabulary)
    return found


def _wrapped(seed: int) -> int:
    """A seed of any size, wrapped to 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _tokens_max(service: Service, wanted: Wanted, prompt: list[int]) -> int:
    left = service.limits.length_max - len(prompt)
    if wanted.tokens_max is None:
        return max(min(left, service.limits.tokens_default), wanted.tokens_min or 0)
    if wanted.tokens_max > left:
        raise BadInput(
            f"max_tokens is {wanted.tokens_max:,}, but after {len(prompt):,} tokens of prompt only"
            f" {left:,} of {service.limits.length_max:,} positions are left"
        )
    return wanted.tokens_max


def _stops(wanted: Wanted) -> tuple[str, ...]:
    asked = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or ())
    stops = tuple(dict.fromkeys([*asked, *wanted.more_stops]))
    check_stops(stops)
    return stops


def _logit_bias(asked: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, bias in asked.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise BadInput(f"logit_bias has the key {key!r:.40}, not a token id")
        found[int(key)] = bias
    return found


def grammar_of(ask: Common) -> Grammar | None:
    """The grammar of response_format, structured_outputs, regex or ebnf: at most one is given."""
    found = [
        *_of_response_format(ask.response_format),
        *grammars_of(ask.structured_outputs),
        *([Grammar("regex", ask.regex)] if ask.regex is not None else []),
        *([Grammar("lark", ask.ebnf)] if ask.ebnf is not None else []),
    ]
    return one_grammar(found)


def one_grammar(found: Sequence[Grammar]) -> Grammar | None:
    if len(found) > 1:
        raise BadInput(
            f"{len(found)} constraints on the form of the answer: give only one of "
            "response_format, structured_outputs, regex, ebnf"
        )
    return found[0] if found else None


def _of_response_format(asked: Mapping[str, Any] | None) -> Iterable[Grammar]:
    kind = None if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return
    if kind == "json_object":
        yield Grammar("json_object")
    elif kind == "json_schema":
        described = asked.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise BadInput("response_format.json_schema.schema must be an object")
        yield Grammar("json_schema", json.dumps(schema))
    else:
        raise BadInput(
            f"response_format.type is {kind!r:.40}; text, json_object and json_schema are served"
        )


def grammars_of(asked: StructuredOutputs | None) -> Iterable[Grammar]:
    if asked is None:
        return
    if asked.json is not None:
        text = asked.json if isinstance(asked.json, str) else json.dumps(asked.json)
        yield Grammar("json_schema", text)
    if asked.json_object:
        yield Grammar("json_object")
    if asked.regex is not None:
        yield Grammar("regex", asked.regex)
    if asked.grammar is not None:
        yield Grammar("lark", asked.grammar)


def refuse_streamed(stream: bool | None, prompt_logprobs: int | None) -> None:
    if stream and prompt_logprobs is not None:
        raise BadInput("prompt_logprobs is not streamed: ask for the whole answer")


def _refuse_unserved(ask: Common) -> None:
    if ask.use_beam_search:
        raise BadInput("use_beam_search is not served; sample with n instead")
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise BadInput(f"best_of is {ask.best_of}, but only best_of = n is served")
