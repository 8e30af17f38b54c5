"""A request's sampling parameters. Needs no torch, so a server can refuse before an engine does.

Penalties, bias, the allowed ids, the bad words, the least length and the grammar change the logits,
in this order; temperature divides them; top-k, top-p and min-p then each drop tokens from what the
one before left, and always leave the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.stops import check_stops
from ess.errors import BadInput
from ess.units import shown

BIAS_MAX: Final = 100.0
LOGPROBS_MAX: Final = 20
GREEDY_BELOW: Final = 1e-5
ALLOWED_IDS_MAX: Final = 1024
BAD_SEQUENCES_MAX: Final = 1024
BAD_SEQUENCE_IDS_MAX: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`stop` needs an engine with a tokenizer, and so does `grammar`. `ignore_eos` makes a request
    run on over the model's own end ids, but not over its `stop_ids`.

    `logprobs` n asks for the chance of every token and of the n likeliest, `prompt_logprobs` for
    those of the prompt's tokens behind position `prompt_start`. Two requests with the same seed and
    the same prompt make the same tokens; a caller who wants others gives another seed.

    Outside of `allowed_ids` no id is drawn, an end id neither. The last id of a bad word is not
    drawn behind its other ids, if the request made them itself.
    """

    tokens_max: int = 128
    tokens_min: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    allowed_ids: frozenset[int] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_start: int = 0
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.tokens_max, 1, 1 << 24)
        _whole("min_tokens", self.tokens_min, 0, self.tokens_max)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 1e-9, 1.0)
        _whole("top_k", self.top_k, 0, 1 << 24)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _whole("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _whole(name, count, 0, LOGPROBS_MAX)
        _whole("prompt_start", self.prompt_start, 0, 1 << 24)
        _of_kind("ignore_eos", self.ignore_eos, bool, "True or False")
        if self.grammar is not None:
            _of_kind("grammar", self.grammar, Grammar, "a Grammar")
        if self.grammar is not None and self.ignore_eos:
            raise BadInput("ignore_eos is not served with a grammar: a complete text ends")
        _of_kind("stop", self.stop, tuple | list, "texts")
        for text in self.stop:
            _of_kind("stop", text, str, "texts")
        check_stops(self.stop)
        self._check_ids()

    def _check_ids(self) -> None:
        _of_kind("logit_bias", self.logit_bias, Mapping, "a number for each id")
        _ids("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of id {token}", bias, -BIAS_MAX, BIAS_MAX)
        _of_kind("stop_token_ids", self.stop_ids, Set, "a set of ids")
        _ids("stop_token_ids", self.stop_ids)
        self._check_bad_words()
        if self.allowed_ids is not None:
            _of_kind("allowed_token_ids", self.allowed_ids, Set, "a set of ids")
            _ids("allowed_token_ids", self.allowed_ids)
            self._check_allowed(self.allowed_ids)

    def _check_bad_words(self) -> None:
        _of_kind("bad_words", self.bad_words, tuple | list, "a tuple of ids for each word")
        if len(self.bad_words) > BAD_SEQUENCES_MAX:
            count = len(self.bad_words)
            raise BadInput(f"bad_words make {count:,} sequences; at most {BAD_SEQUENCES_MAX:,}")
        for word in self.bad_words:
            _of_kind("bad_words", word, tuple | list, "a tuple of ids for each word")
            _ids("bad_words", word)
            if not 0 < len(word) <= BAD_SEQUENCE_IDS_MAX:
                raise BadInput(
                    f"bad_words: {len(word)} ids in a word, not 1..{BAD_SEQUENCE_IDS_MAX}"
                )

    def _check_allowed(self, allowed: Set[int]) -> None:
        if self.grammar is not None:
            raise BadInput("allowed_token_ids is not served with a grammar: give one of them")
        if not 0 < len(allowed) <= ALLOWED_IDS_MAX:
            count = f"{len(allowed):,} ids, not 1..{ALLOWED_IDS_MAX:,}"
            raise BadInput(f"allowed_token_ids has {count}")
        if allowed <= {word[0] for word in self.bad_words if len(word) == 1}:
            raise BadInput("bad_words forbid every id of allowed_token_ids")

    def check_ids(self, vocabulary: int) -> None:
        """Every id must be one that the model can make; top_k may be above the vocabulary."""
        _known("stop_token_ids id", self.stop_ids, vocabulary)
        _known("logit_bias id", self.logit_bias, vocabulary)
        _known("allowed_token_ids id", self.allowed_ids or (), vocabulary)
        _known("bad_words id", (token for word in self.bad_words for token in word), vocabulary)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def penalises(self) -> bool:
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def host_reasons(self, made_count: int = 0) -> tuple[str, ...]:
        """Why the draw behind `made_count` tokens depends on them: such a step cannot be drawn
        before the host has learned the one before. None if it does not."""
        if self.is_plain:
            return ()
        applies = {
            "penalties count the output": self.penalises,
            "min_tokens is not reached": made_count < self.tokens_min,
            "a grammar follows the output": self.grammar is not None,
            "bad words follow the output": any(len(word) > 1 for word in self.bad_words),
        }
        return tuple(reason for reason, holds in applies.items() if holds)

    @property
    def is_plain(self) -> bool:
        """Logits stay as they are."""
        return not (
            self.tokens_min
            or self.grammar is not None
            or self.bad_words
            or self.logit_bias
            or self.allowed_ids is not None
            or self.penalises
        )

    @property
    def changes_logits(self) -> bool:
        """Whether the chances of some token at least change."""
        return not self.is_plain


def _of_kind(name: str, value: Any, kind: Any, words: str) -> None:
    if not isinstance(value, kind):
        raise BadInput(f"{name} is {shown(value)}, must be {words}")


def _whole(name: str, value: Any, low: int, high: int) -> None:
    """Refuses what is not an int within the bounds; True and False are refused too."""
    if type(value) is not int:
        raise BadInput(f"{name} is {shown(value)}, must be a whole number")
    _within(name, value, low, high)


def _within(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadInput(f"{name} is {shown(value)}, must be a number")
    if not low <= value <= high:
        raise BadInput(f"{name} is {shown(value)}, must be {low:,}..{high:,}")


def _ids(name: str, ids: Iterable[Any]) -> None:
    for token in ids:
        if type(token) is not int:
            raise BadInput(f"{name} id {shown(token)}, must be a whole number")


def _known(name: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise BadInput(f"{name} {shown(token)}: the vocabulary has {vocabulary:,} ids")
