"""Many short prompts at once: how long each waits for its first token.

All requests are added before the first step. As many enter per step as its prompt tokens allow, or,
for comparison, one per step. The target is the prompts' own work, which no engine can avoid: all
their tokens at the rate of packs of them when nothing else runs. Decoding goes on beside it, so the
last first token may take twice that.

Seconds are those of the engine's thread, which computes alone, so that a busy machine counts less.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from ess.bench.engine.calibrate import texts
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.door import Offload
from ess.door import Sequence as Opened
from ess.engine.engine import Engine, EngineConfig
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import run_chunks
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState
from ess.models.load import load_model
from ess.models.model import Model
from ess.units import PAGE_ROWS, div_ceil

PACK_TARGET: Final = 1.2
WORK_SHARE: Final = 2.0
PACKS: Final = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingPrompts:
    """The arriving prompts, and the prompt tokens that a step may run."""

    requests: int
    prompt: int = 64
    output: int = 64
    mtp: int = 2
    chunk_tokens: int = 512

    @property
    def prefill_count(self) -> int:
        """Tokens of each prompt without the last, which is left to decode."""
        return self.prompt - 1

    @property
    def pack(self) -> int:
        """How many prompts enter in the first step."""
        return min(self.requests, self.chunk_tokens // self.prefill_count)


@dataclass(slots=True)
class FirstTokens:
    """Seconds until each first token, and how many requests decoded in each step until then."""

    first_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)


@compute_threads(1)
def rows_of(load: ArrivingPrompts) -> list[Row]:
    """First tokens against one prompt per step, and the gain of packing itself."""
    model = load_model()
    prompts = texts(load.requests, load.prompt)
    alone, packed = _prefilled(model, load, prompts)
    work_s = load.requests / load.pack * statistics.median(packed)
    by_one, by_pack = (
        _waited(model, load, prompts, chunk_tokens)
        for chunk_tokens in (load.prefill_count, load.chunk_tokens)
    )
    config = {"requests": load.requests, "prompt": load.prompt, "mtp": load.mtp}
    return [
        compare(
            name=f"a pack of {load.pack} prompts, thread time",
            unit="ms",
            ours=[1e3 * seconds for seconds in packed],
            baseline=("one by one", [1e3 * seconds for seconds in alone]),
            target=PACK_TARGET,
            config=config,
        ),
        compare(
            name="first token, median, thread time",
            unit="s",
            ours=[statistics.median(by_pack.first_s)],
            baseline=("one prompt a step", [statistics.median(by_one.first_s)]),
            config=config | _running(by_pack, by_one),
        ),
        compare(
            name="first token, last, thread time",
            unit="s",
            ours=[max(by_pack.first_s)],
            baseline=("twice the prompts' work", [WORK_SHARE * work_s]),
            target=1.0,
            config=config | {"one_prompt_a_step_s": round(max(by_one.first_s), 2)},
        ),
    ]


def _running(by_pack: FirstTokens, by_one: FirstTokens) -> dict[str, Any]:
    return {
        "steps": len(by_pack.running),
        "running": round(statistics.fmean(by_pack.running)),
        "steps_before": len(by_one.running),
        "running_before": round(statistics.fmean(by_one.running)),
    }


def _engine(model: Model, load: ArrivingPrompts, chunk_tokens: int) -> Engine:
    """Every row has a slot, so that only the order of entry is measured."""
    layout = model.config.layout(name="ess-embedded", has_mtp=load.mtp > 1)
    pages = div_ceil(load.prompt + load.output, PAGE_ROWS) + 1
    total = load.requests * pages
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * total,
        host_bytes=2 * total * layout.host_page_bytes,
        length_max=pages * PAGE_ROWS,
        sequence_max=load.requests,
        query_max=load.requests * load.mtp,
    )
    return Engine(
        model,
        offload,
        EngineConfig(
            mtp=load.mtp,
            chunk_tokens=chunk_tokens,
            max_running=load.requests,
            query_max=load.requests * load.mtp,
        ),
    )


@torch.inference_mode()
def _prefilled(
    model: Model, load: ArrivingPrompts, prompts: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Seconds for a pack of prompts, one prompt at a time and all together, in turn, after a
    warm-up."""
    eng = _engine(model, load, load.chunk_tokens)
    seconds: dict[int, list[float]] = {1: [], load.pack: []}
    chosen = prompts[: load.pack]
    for _ in range(PACKS + 1):
        for at_once, taken in seconds.items():
            opened = [eng.offload.open(prompt, length_max=len(prompt)) for prompt in chosen]
            spans = list(map(_span, opened, chosen))
            started_s = time.thread_time()
            for first in range(0, len(spans), at_once):
                run_chunks(eng.runner, spans[first : first + at_once])
            taken.append(time.thread_time() - started_s)
            for sequence in opened:
                sequence.close()
            eng.offload.forget_prefixes()
    eng.offload.close()
    return seconds[1][1:], seconds[load.pack][1:]


def _span(sequence: Opened, prompt: Sequence[int]) -> Span:
    if sequence.cached_count:
        raise BadState(f"{sequence} found {sequence.cached_count} rows: two prompts begin alike")
    return Span(sequence=sequence, start=0, tokens=prompt[:-1], following=prompt[1:])


def _waited(
    model: Model, load: ArrivingPrompts, prompts: Sequence[Sequence[int]], chunk_tokens: int
) -> FirstTokens:
    eng, waited = _engine(model, load, chunk_tokens), FirstTokens()
    eng.add(prompts[0][:2], Sampling(tokens_max=4))
    for _ in eng.run():
        pass
    wish = Sampling(tokens_max=load.output, ignore_eos=True)
    requests = [eng.add(prompt, wish) for prompt in prompts]
    first_s: dict[int, float] = {}
    started_s = time.thread_time()
    while len(first_s) < len(requests):
        result = eng.step()
        now_s = time.thread_time() - started_s
        if result.is_empty:
            raise BadState(f"{len(requests) - len(first_s)} requests do not fit: {eng.refusal}")
        for made in result.made:
            first_s.setdefault(made.request.number, now_s)
        waited.running.append(result.turn_count)
    waited.first_s = list(first_s.values())
    eng.close()
    eng.offload.close()
    return waited
