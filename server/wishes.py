"""From what a client asked to what the engine is told, with every bound checked on the way.

The engine checks again; here a wrong value is refused before anything is queued, by the name that
the client used.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ess.engine.messages import Grammar, Wish
from ess.errors import BadInput
from ess.server.asks import Common, StructuredOutputs
from ess.server.generation import Ending
from ess.server.service import Service

SEED_BITS: Final = 38
STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 256
LOGPROBS_MAX: Final = 20
SCHEMA_CHARS_MAX: Final = 1 << 20

BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}


class Wanted(msgspec.Struct, kw_only=True):
    """What all dialects boil down to, before bounds and defaults."""

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
    grammar: Grammar | None = None
    more_stops: tuple[str, ...] = ()


SAME_NAMES: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "stop", "stop_token_ids"),
)


def wanted_of(ask: Any, **named: Any) -> Wanted:
    """Fields that all dialects spell alike, and those given by name."""
    return Wanted(**{name: getattr(ask, name) for name in SAME_NAMES}, **named)


def wanted_of_openai(ask: Common, **named: Any) -> Wanted:
    _refuse_unserved(ask)
    return wanted_of(
        ask,
        tokens_min=ask.min_tokens,
        ignore_eos=bool(ask.ignore_eos),
        keep_stop=bool(ask.include_stop_str_in_output or ask.no_stop_trim),
        keep_special=ask.skip_special_tokens is False,
        seed=ask.seed,
        choices=ask.n,
        grammar=grammar_of(ask),
        **named,
    )


def wishes(
    service: Service, wanted: Wanted, prompts: Sequence[list[int]]
) -> tuple[list[tuple[list[int], Wish]], Ending]:
    """One wish per prompt and choice: the choices of a prompt beside each other, each its seed."""
    if not prompts:
        raise BadInput("the prompt is an empty list")
    choices = _whole("n", wanted.choices, 1, service.limits.choices_max, 1)
    if len(prompts) * choices > service.limits.choices_max:
        raise BadInput(
            f"{len(prompts)} prompts with n={choices} are {len(prompts) * choices} requests,"
            f" at most {service.limits.choices_max} in one"
        )
    stop_ids = _stop_ids(service, wanted)
    stops = _stops(wanted)
    seed = secrets.randbits(SEED_BITS) if wanted.seed is None else wanted.seed
    made = []
    for prompt in prompts:
        tokens_max = _tokens_max(service, wanted, prompt)
        tokens_min = _whole("min_tokens", wanted.tokens_min, 0, tokens_max, 0)
        base = _wish(service, wanted, tokens_max=tokens_max, stop_ids=stop_ids)
        for choice in range(choices):
            own = (seed + choice) % (1 << SEED_BITS)
            wish = msgspec.structs.replace(base, seed=own, tokens_min=tokens_min)
            made.append((prompt, wish))
    ending = Ending(
        stops=stops,
        stop_ids=frozenset(wanted.stop_token_ids or ()),
        tokens_min=wanted.tokens_min or 0,
        keep_stop=wanted.keep_stop,
        keep_special=wanted.keep_special,
    )
    return made, ending


def _wish(service: Service, wanted: Wanted, *, tokens_max: int, stop_ids: tuple[int, ...]) -> Wish:
    defaults = service.defaults
    top_k = 0 if wanted.top_k == -1 else wanted.top_k
    return Wish(
        tokens_max=tokens_max,
        temperature=_bounded("temperature", wanted.temperature, defaults.temperature),
        top_p=_bounded("top_p", wanted.top_p, defaults.top_p),
        top_k=_whole("top_k", top_k, 0, 1 << 24, defaults.top_k),
        min_p=_bounded("min_p", wanted.min_p, defaults.min_p),
        repetition_penalty=_bounded(
            "repetition_penalty", wanted.repetition_penalty, defaults.repetition_penalty
        ),
        presence_penalty=_bounded("presence_penalty", wanted.presence_penalty, 0.0),
        frequency_penalty=_bounded("frequency_penalty", wanted.frequency_penalty, 0.0),
        logit_bias=_logit_bias(service, wanted.logit_bias or {}),
        stop_ids=stop_ids,
        logprobs=_logprobs(wanted.logprobs),
        grammar=wanted.grammar,
    )


def _logprobs(asked: int | None) -> int | None:
    return None if asked is None else _whole("logprobs", asked, 0, LOGPROBS_MAX, 0)


def check_prompt(service: Service, prompt: list[int]) -> None:
    length_max = service.limits.length_max
    if not prompt:
        raise BadInput("the prompt is empty")
    if len(prompt) >= length_max:
        raise BadInput(
            f"the prompt has {len(prompt):,} tokens; with at least one made, {length_max:,} fit"
        )
    if not 0 <= min(prompt) <= max(prompt) < service.vocabulary:
        raise BadInput(f"token ids of the prompt must be 0..{service.vocabulary - 1}")


def _tokens_max(service: Service, wanted: Wanted, prompt: list[int]) -> int:
    check_prompt(service, prompt)
    left = service.limits.length_max - len(prompt)
    if wanted.tokens_max is None:
        return min(left, service.limits.tokens_default)
    if wanted.tokens_max > left:
        raise BadInput(
            f"max_tokens is {wanted.tokens_max:,}, but after {len(prompt):,} tokens of prompt only"
            f" {left:,} of {service.limits.length_max:,} positions are left"
        )
    return _whole("max_tokens", wanted.tokens_max, 1, left, 1)


def _stop_ids(service: Service, wanted: Wanted) -> tuple[int, ...]:
    asked = tuple(wanted.stop_token_ids or ())
    if len(asked) > STOP_CHARS_MAX:
        raise BadInput(f"stop_token_ids has {len(asked)} ids, at most {STOP_CHARS_MAX}")
    if any(not 0 <= token < service.vocabulary for token in asked):
        raise BadInput(f"stop_token_ids must be 0..{service.vocabulary - 1}")
    return asked if wanted.ignore_eos else tuple(sorted({*asked, *service.eos_ids}))


def _stops(wanted: Wanted) -> tuple[str, ...]:
    asked = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or ())
    if len(asked) > STOPS_MAX - len(wanted.more_stops):
        raise BadInput(f"stop has {len(asked)} strings, at most {STOPS_MAX}")
    for stop in asked:
        if not 0 < len(stop) <= STOP_CHARS_MAX:
            raise BadInput(f"a stop string has {len(stop)} characters, not 1..{STOP_CHARS_MAX}")
    return tuple(dict.fromkeys([*asked, *wanted.more_stops]))


def _logit_bias(service: Service, asked: Mapping[str, float]) -> dict[int, float]:
    found = {}
    for key, bias in asked.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise BadInput(f"logit_bias has the key {key!r:.40}, not a token id")
        if not int(key) < service.vocabulary:
            raise BadInput(f"logit_bias has token {key}, must be 0..{service.vocabulary - 1}")
        if not -100.0 <= bias <= 100.0:
            raise BadInput(f"logit_bias of token {key} is {bias}, must be -100..100")
        found[int(key)] = bias
    return found


def grammar_of(ask: Common) -> Grammar | None:
    """OpenAI's response_format, vLLM's structured_outputs, SGLang's regex and ebnf: one of them."""
    found = [
        *_of_response_format(ask.response_format),
        *grammars_of(ask.structured_outputs),
        *([Grammar("regex", ask.regex)] if ask.regex is not None else []),
        *([Grammar("lark", ask.ebnf)] if ask.ebnf is not None else []),
    ]
    return one_grammar(found)


def one_grammar(found: Sequence[Grammar]) -> Grammar | None:
    if len(found) > 1:
        raise BadInput(f"{len(found)} constraints on the form of the answer; give one")
    for grammar in found:
        if len(grammar.text) > SCHEMA_CHARS_MAX:
            raise BadInput(f"the {grammar.kind} has {len(grammar.text):,} characters, too many")
    return found[0] if found else None


def _of_response_format(asked: Mapping[str, Any] | None) -> Iterable[Grammar]:
    kind = None if asked is None else asked.get("type")
    if asked is None or kind == "text":
        return
    if kind == "json_object":
        yield Grammar("json_object", "")
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
        yield Grammar("json_object", "")
    if asked.regex is not None:
        yield Grammar("regex", asked.regex)
    if asked.grammar is not None:
        yield Grammar("lark", asked.grammar)


def _refuse_unserved(ask: Common) -> None:
    if ask.use_beam_search:
        raise BadInput("use_beam_search is not served; sample with n instead")
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise BadInput(f"best_of is {ask.best_of}, but only best_of = n is served")


def _bounded(name: str, value: float | None, default: float) -> float:
    low, high = BOUNDS[name]
    if value is not None and not low <= value <= high:
        raise BadInput(f"{name} is {value}, must be {low:g}..{high:g}")
    return default if value is None else value


def _whole(name: str, value: int | None, low: int, high: int, default: int) -> int:
    if value is not None and not low <= value <= high:
        raise BadInput(f"{name} is {value}, must be {low}..{high:,}")
    return default if value is None else value
