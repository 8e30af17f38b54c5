"""What a request must say: the plain model, a token at a time, and draws by their definition."""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.tokens.draw import noise_keys
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.kernels.reference.noise import gumbel
from ess.models.compressed import plain as compressed
from ess.models.compressed.model import CompressedModel
from ess.models.load import EMBEDDED
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.text.tokenizer import Tokenizer
from tests.campaign.lives.plan import LINES, OF_TEXT, Ask
from tests.model.grid import checkpoint
from tests.support.checkpoints import tokens

LINE_COUNT = 1024
KEYS: Final = {"f32": "f32", "bf16": None, "fp8": None}
MIXED_WITH_TEXT: Final = ("greedy", "cut", "penalised", "ended", "told", "scored")
GRAMMARS: Final = (
    Grammar("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])( and [a-z]{3,9})*"),
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["module", "mode", 17, null]}}'),
    Grammar("lark", 'start: ("yes" | "no" | "é") start?'),
)


@dataclass(frozen=True)
class Truth:
    """`scores` are log chances, of all ids, before each token behind the first of the prompt."""

    tokens: list[int]
    reason: str
    scores: Tensor
    prompt: int


def model(family: str) -> Model:
    return checkpoint(family)


@functools.cache
def lines(family: str) -> list[list[int]]:
    """Drawn; the same for more than two pages, then another; one id; two in turn; three ids; the
    first but for the last token of its second page."""
    vocabulary = model(family).config.vocab_size
    first, other = (tokens(LINE_COUNT, vocabulary, seed=seed) for seed in (5, 6))
    few = [vocabulary - 1 - token % 3 for token in other]
    near = [*first[:127], first[127] ^ 1, *first[128:]]
    two = [0, vocabulary - 1] * LINE_COUNT
    made = [first, first[:131] + other, [7] * LINE_COUNT, two, few, near]
    assert len(made) == LINES, f"{len(made)} lines"
    return made


def wish(ask: Ask, vocabulary: int) -> Sampling:
    of, text = _wishes(ask, vocabulary), _wishes_of_text(ask)
    named = {**of, **text}
    if ask.wish == "mixed":
        named["mixed"] = _mixed(ask, [*of.values()])
    if ask.wish == "mixed text":
        named["mixed text"] = _mixed(ask, [*(of[name] for name in MIXED_WITH_TEXT), *text.values()])
    more = named[ask.wish]
    ends = not {"stop_ids", "grammar"}.isdisjoint(more)
    return Sampling(tokens_max=ask.tokens, ignore_eos=not ends, **more)


def _mixed(ask: Ask, wishes: list[dict[str, Any]]) -> dict[str, Any]:
    """Some of them at once; the same for the same request."""
    draw = random.Random(f"{ask.line} {ask.length} {ask.tokens} {ask.seed}")
    mixed: dict[str, Any] = {}
    for each in draw.sample(wishes, draw.randint(2, 4)):
        mixed |= each
    if "grammar" in mixed and draw.random() < 0.5:
        del mixed["grammar"]
    return mixed


def _wishes(ask: Ask, vocabulary: int) -> dict[str, dict[str, Any]]:
    heat = {"temperature": 1.2, "seed": ask.seed}
    return {
        "greedy": {},
        "warm": heat,
        "cut": {**heat, "top_p": 0.8, "top_k": 20, "min_p": 0.02},
        "penalised": {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.7,
            "presence_penalty": 0.4,
            "logit_bias": {0: -100.0, vocabulary - 1: 1.5},
        },
        "bound": {
            **heat,
            "allowed_ids": frozenset(range(3, vocabulary, 9)) | {vocabulary - 1},
            "bad_words": ((3,), (12, 12), (21, 30, 3), (vocabulary - 1, 12)),
        },
        "ended": {
            **heat,
            "tokens_min": ask.tokens // 2,
            "stop_ids": frozenset(range(0, vocabulary, 5)),
        },
        "told": {**heat, "logprobs": 3},
        "scored": {"prompt_logprobs": 2, "prompt_start": ask.length // 2},
    }


def _wishes_of_text(ask: Ask) -> dict[str, dict[str, Any]]:
    heat = {"temperature": 1.2, "seed": ask.seed}
    return {
        "grammar": {**heat, "grammar": GRAMMARS[ask.seed % len(GRAMMARS)], "bad_words": ((5,),)},
        "stop": {**heat, "stop": ("e", "the "), "tokens_min": ask.tokens // 3},
    }


@functools.cache
def truth(family: str, line: int, length: int, count: int, name: str, seed: int) -> Truth:
    ask = Ask(at=0, line=line, length=length, tokens=count, wish=name, seed=seed)
    if name in OF_TEXT:
        return alone(family, ask, "f32")
    made, prompt = model(family), lines(family)[line][:length]
    asked, forward = wish(ask, made.config.vocab_size), _forward(made)
    ends = set(asked.stop_ids)
    if not asked.ignore_eos:
        eos = made.config.eos_ids
        ends |= {eos} if isinstance(eos, int) else set(eos)
    scores, output, reason = [forward(prompt)], [], "length"
    while len(output) < count:
        output.append(_drawn(scores[-1][-1], asked, prompt, output, ends))
        if output[-1] in ends:
            reason = "stop"
            break
        scores.append(forward(output[-1:]))
    return Truth(output, reason, torch.cat(scores).log_softmax(-1), length)


def nearest(*given: Any) -> float:
    """By how little anything was chosen, or left out, on the way to this truth."""
    gaps, whole = [math.inf], Tensor.topk

    def topk(values: Tensor, k: int, *more: Any, **named: Any) -> Any:
        if 0 < k < values.shape[-1]:
            order = values.float().sort(-1, descending=True).values
            apart = (order[..., k - 1] - order[..., k]).flatten()
            gaps.extend(apart[apart.isfinite()].tolist())
        return whole(values, k, *more, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "topk", topk)
        truth.__wrapped__(*given)
    return min(gaps)


def _forward(made: Model) -> Any:
    if isinstance(made, CompressedModel):
        return compressed.Plain(made).run
    plain = Plain(made)
    return lambda given: plain.run(given).logits


def _drawn(
    logits: Tensor, asked: Sampling, prompt: list[int], output: list[int], ends: set[int]
) -> int:
    changed = _changed(logits.tolist(), asked, prompt, output, ends)
    if asked.is_greedy:
        return max(range(len(changed)), key=lambda token: (changed[token], -token))
    scores = [score / asked.temperature for score in changed]
    position = len(prompt) + len(output)
    noise = gumbel(noise_keys([asked.seed], [position]), torch.arange(len(scores)))[0].tolist()
    kept = _kept(scores, asked)
    return max(kept, key=lambda token: scores[token] + noise[token])


def _changed(
    scores: list[float], asked: Sampling, prompt: list[int], output: list[int], ends: set[int]
) -> list[float]:
    for token in {*prompt, *output}:
        penalty = asked.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= asked.frequency_penalty * output.count(token) + asked.presence_penalty
    for token, bias in asked.logit_bias.items():
        scores[token] += bias
    gone = set() if asked.allowed_ids is None else {*range(len(scores))} - asked.allowed_ids
    for *before, last in asked.bad_words:
        if before == output[len(output) - len(before) :]:
            gone.add(last)
    if len(output) < asked.tokens_min:
        gone |= ends
    return [-math.inf if token in gone else score for token, score in enumerate(scores)]


def _kept(scores: list[float], asked: Sampling) -> list[int]:
    """Top-k, then top-p of the remaining tokens, then min-p of the remaining tokens."""
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    order = [token for token in order if scores[token] > -math.inf][: asked.top_k or None]
    chance = {token: math.exp(scores[token] - scores[order[0]]) for token in order}
    mass, summed, kept = sum(chance.values()), 0.0, []
    for token in order:
        if kept and asked.top_p < 1 and summed >= asked.top_p * mass:
            break
        kept.append(token)
        summed += chance[token]
    return [token for token in kept if chance[token] >= asked.min_p]


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(EMBEDDED)


@functools.cache
def alone(family: str, ask: Ask, form: str, chunk_tokens: int = 512) -> Truth:
    """What an engine says of one request, all of whose rows are resident, a token a step: where
    rows are rounded, or where text decides. `scores` are the leads of its likeliest tokens. A last
    bit of a row may depend on the length of its chunk, and decide how it is rounded."""
    made = model(family)
    layout = made.config.layout(row=form, index=KEYS[form], has_mtp=False)
    offload = Offload.create(
        layout,
        slot_bytes=20 * layout.group_count * layout.chunk_bytes,
        host_bytes=20 * layout.host_page_bytes,
        length_max=LINE_COUNT,
        slot_floor=64,
    )
    text = tokenizer() if ask.wish in OF_TEXT else None
    engine = Engine(
        made, offload, EngineConfig(modes="resident", chunk_tokens=chunk_tokens), tokenizer=text
    )
    asked = dataclasses.replace(wish(ask, made.config.vocab_size), logprobs=2, prompt_logprobs=None)
    request = engine.add(lines(family)[ask.line][: ask.length], asked)
    chances = [chance for step in engine.run() for said in step.made for chance in said.chances]
    leads = [chance.top[0][1] - chance.top[1][1] for chance in chances]
    engine.close()
    offload.close()
    return Truth(request.output, str(request.reason), torch.tensor(leads)[:, None], ask.length)
