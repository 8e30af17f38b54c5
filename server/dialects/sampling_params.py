"""From a request body of any dialect to the engine's sampling parameters.

A wrong value is refused here, before anything is queued.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from ess.engine.tokens.sampling import Sampling
from ess.engine.tokens.stops import check_stops
from ess.errors import BadInput
from ess.server.dialects.forms.asked import NO_FORMS, Forms
from ess.server.dialects.generation import Ending
from ess.server.dialects.schemas import Common, Sampled
from ess.server.process.service import SamplingDefaults, Service
from ess.units import counted

SEED_BITS: Final = 63


class SamplingWishes(Sampled, kw_only=True):
    """What a client of any dialect asks for, before bounds and defaults. `tokens_usual` is the
    dialect's own default for `tokens_max`. `names` has the client's own name for a field, for
    errors that begin with the field."""

    tokens_max: int | None
    tokens_usual: int | None = None
    tokens_min: int | None = None
    keep_stop: bool = False
    keep_special: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_start: int = 0
    forms: Forms = NO_FORMS
    more_stops: tuple[str, ...] = ()
    names: Mapping[str, str] = MappingProxyType({})


def wanted_of(ask: Sampled, **named: Any) -> SamplingWishes:
    """Fields that all dialects spell alike, and those given by name."""
    same = {name: getattr(ask, name) for name in Sampled.__struct_fields__}
    return SamplingWishes(**same, **named)


def wanted_of_openai(ask: Common, **named: Any) -> SamplingWishes:
    _refuse_unserved(ask)
    refuse_streamed(ask.stream, ask.prompt_logprobs)
    named.setdefault("prompt_logprobs", ask.prompt_logprobs)
    return wanted_of(
        ask,
        tokens_min=ask.min_tokens,
        keep_stop=bool(ask.include_stop_str_in_output or ask.no_stop_trim),
        keep_special=ask.skip_special_tokens is False,
        seed=ask.seed,
        **named,
    )


class Choice(NamedTuple):
    """What the engine is asked for one choice of one prompt, and how its answer may end."""

    prompt: list[int]
    sampling: Sampling
    ending: Ending


def samplings(
    service: Service, wanted: Sequence[SamplingWishes], prompts: Sequence[list[int]]
) -> list[Choice]:
    """The choices of a prompt stand together, each with its own seed. The wishes for all prompts
    have the same `n`."""
    made: list[Choice] = []
    for wishes, pairs in groupby(zip(wanted, prompts, strict=True), key=lambda pair: pair[0]):
        try:
            _check_count(service.limits.choices_max, wishes, len(prompts))
            made += _choices(service, wishes, [prompt for _, prompt in pairs])
        except BadInput as error:
            raise BadInput(_in_words_of_client(str(error), wishes.names)) from None
    return _prompts_alone(made) if service.split.role == "prefill" else made


def _prompts_alone(made: Sequence[Choice]) -> list[Choice]:
    """Each prompt once, neither drawn from nor scored: that is all a prefill worker needs."""
    prompts = {id(choice.prompt): choice for choice in made}
    return [choice._replace(sampling=Sampling(tokens_max=1)) for choice in prompts.values()]


def _in_words_of_client(sentence: str, names: Mapping[str, str]) -> str:
    """The sentence with the client's own name for the field that it begins with.

    >>> _in_words_of_client("max_tokens is 0", {"max_tokens": "max_new_tokens"})
    'max_new_tokens is 0'
    """
    for ours, theirs in names.items():
        if sentence.startswith((f"{ours} ", f"{ours}:")):
            return theirs + sentence.removeprefix(ours)
    return sentence


def _choices(
    service: Service, wanted: SamplingWishes, prompts: Sequence[list[int]]
) -> list[Choice]:
    """A prompt is scored once, by its first choice. Where no seed is given, equal prompts get
    answers of their own."""
    choices = 1 if wanted.n is None else wanted.n
    ending = Ending(
        stops=_stops(wanted),
        stop_ids=frozenset(wanted.stop_token_ids or ()),
        tokens_min=wanted.tokens_min or 0,
        keep_stop=wanted.keep_stop,
        keep_special=wanted.keep_special,
        form_field=wanted.forms.field,
    )
    tokens_max = _tokens_max(service, wanted, prompts[0])
    first = _sampling(service, wanted, tokens_max=tokens_max)
    made = []
    for prompt in prompts:
        seed = secrets.randbits(SEED_BITS) if wanted.seed is None else wanted.seed
        tokens_max = _tokens_max(service, wanted, prompt)
        for choice in range(choices):
            scored = None if choice else first.prompt_logprobs
            own_seed = _wrapped(seed + choice)
            sampling = replace(first, tokens_max=tokens_max, seed=own_seed, prompt_logprobs=scored)
            made.append(Choice(prompt, sampling, ending))
    return made


def _check_count(most: int, wanted: SamplingWishes, prompt_count: int) -> None:
    if prompt_count > most:
        where = wanted.names.get("prompt", "prompt")
        raise BadInput(f"{where} has {prompt_count:,} prompts; at most {most} fit in one request")
    if wanted.n is not None and not 1 <= wanted.n <= most // prompt_count:
        for_all = f" for {prompt_count} prompts" if prompt_count > 1 else ""
        raise BadInput(
            f"n is {wanted.n:,}{for_all}; must be 1 to {most // prompt_count}:"
            f" at most {most} answers fit in one request"
        )


def _sampling(service: Service, wanted: SamplingWishes, *, tokens_max: int) -> Sampling:
    """Applies the engine's bounds and, for missing fields, the checkpoint's defaults."""
    defaults = service.defaults
    given = {name: getattr(wanted, name) for name in SamplingDefaults.__dataclass_fields__}
    chosen = {
        name: getattr(defaults, name) if value is None else value for name, value in given.items()
    }
    if chosen["top_k"] == -1:
        chosen["top_k"] = 0
    ends = () if wanted.ignore_eos else service.eos_ids
    sampling = Sampling(
        tokens_max=tokens_max,
        tokens_min=wanted.tokens_min or 0,
        **chosen,
        presence_penalty=wanted.presence_penalty or 0.0,
        frequency_penalty=wanted.frequency_penalty or 0.0,
        logit_bias=_logit_bias(wanted.logit_bias or {}),
        allowed_ids=None
        if wanted.allowed_token_ids is None
        else frozenset(wanted.allowed_token_ids),
        bad_words=wanted.forms.bad_words,
        stop_ids=frozenset((*(wanted.stop_token_ids or ()), *ends)),
        ignore_eos=bool(wanted.ignore_eos),
        logprobs=wanted.logprobs,
        prompt_logprobs=wanted.prompt_logprobs,
        prompt_start=wanted.prompt_start,
        grammar=wanted.forms.grammar,
    )
    sampling.check_ids(service.vocabulary)
    return sampling


def _wrapped(seed: int) -> int:
    """A seed of any size, wrapped to 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)


def _tokens_max(service: Service, wanted: SamplingWishes, prompt: list[int]) -> int:
    left = service.limits.length_max - len(prompt)
    if wanted.tokens_max is None:
        usual = wanted.tokens_usual or service.limits.tokens_default
        return max(min(left, usual), wanted.tokens_min or 0)
    if wanted.tokens_max > left:
        raise BadInput(
            f"max_tokens is {wanted.tokens_max:,}, but after {counted(len(prompt), 'token')} of"
            f" prompt only {left:,} of {service.limits.length_max:,} positions are left"
        )
    return wanted.tokens_max


def _stops(wanted: SamplingWishes) -> tuple[str, ...]:
    asked = [wanted.stop] if isinstance(wanted.stop, str) else list(wanted.stop or ())
    stops = tuple(dict.fromkeys([*asked, *wanted.more_stops]))
    check_stops(stops)
    return stops


def _logit_bias(asked: Mapping[str, float]) -> dict[int, float]:
    biases = {}
    for key, bias in asked.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise BadInput(f"logit_bias has the key {key!r:.40}, not a token id")
        biases[int(key)] = bias
    return biases


def refuse_streamed(stream: bool | None, prompt_logprobs: int | None) -> None:
    if stream and prompt_logprobs is not None:
        raise BadInput("prompt_logprobs is not streamed: leave out stream")


def _refuse_unserved(ask: Common) -> None:
    if ask.use_beam_search:
        raise BadInput("use_beam_search is not served; sample with n instead")
    if ask.best_of is not None and ask.best_of != (ask.n or 1):
        raise BadInput(f"best_of is {ask.best_of}, but must be equal to n: give n alone")
