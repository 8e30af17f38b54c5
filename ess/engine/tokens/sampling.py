"""What a request asks of its tokens. Needs no torch, so a server can refuse before an engine does.

Penalties, bias, the allowed ids, the bad words, the least length and the grammar change the logits,
in this order; temperature divides them; top-k, top-p and min-p then each drop tokens from what the
one before left, and always leave the best one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.stops import check_stops
from ess.errors import BadInput

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
        _within("max_tokens", self.tokens_max, 1, 1 << 24)
        _within("min_tokens", self.tokens_min, 0, self.tokens_max)
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 1e-9, 1.0)
        _within("top_k", self.top_k, 0, 1 << 24)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _within("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if not all(-BIAS_MAX <= bias <= BIAS_MAX for bias in self.logit_bias.values()):
            for token, bias in self.logit_bias.items():
                _within(f"logit_bias of id {token}", bias, -BIAS_MAX, BIAS_MAX)
        for name in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, name)) is not None:
                _within(name, count, 0, LOGPROBS_MAX)
        _within("prompt_start", self.prompt_start, 0, 1 << 24)
        if self.grammar is not None and self.ignore_eos:
            raise BadInput("ignore_eos is not served with a grammar: a complete text ends")
        check_stops(self.stop)
        self._check_bad_words()
        if self.allowed_ids is not None:
            self._check_allowed(self.allowed_ids)

    def _check_bad_words(self) -> None:
        if len(self.bad_words) > BAD_SEQUENCES_MAX:
            count = len(self.bad_words)
            raise BadInput(f"bad_words make {count} sequences; at most {BAD_SEQUENCES_MAX}")
        for word in self.bad_words:
            if not 0 < len(word) <= BAD_SEQUENCE_IDS_MAX:
                raise BadInput(
                    f"bad_words: {len(word)} ids in a word, not 1..{BAD_SEQUENCE_IDS_MAX}"
                )

    def _check_allowed(self, allowed: frozenset[int]) -> None:
        if self.grammar is not None:
            raise BadInput("allowed_token_ids is not served with a grammar: give one of them")
        if not 0 < len(allowed) <= ALLOWED_IDS_MAX:
            raise BadInput(f"allowed_token_ids has {len(allowed)} ids, not 1..{ALLOWED_IDS_MAX}")
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


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadInput(f"{name} is {value}, must be {low}..{high}")


def _known(name: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise BadInput(f"{name} {token}: the vocabulary has {vocabulary} ids")
