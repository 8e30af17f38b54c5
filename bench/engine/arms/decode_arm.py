"""One way to decode a batch at a context: pools, engine and requests, ready to step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.bench.engine.arms.resident_baseline import EveryRow
from ess.bench.harness.prefix import Prefix
from ess.door import Offload
from ess.door.side import MakePlacement
from ess.engine.devices import backend_of, is_device
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState
from ess.kernels.streams import Lane
from ess.layout import ModelLayout
from ess.models.model import Model
from ess.pool.lru.eviction import PolicyName
from ess.units import PAGE_ROWS, div_ceil

CHUNK_TOKENS: Final = EngineConfig().chunk_tokens
STAGGER: Final = PAGE_ROWS
"""The difference in tokens between the lengths of neighbours in a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWork:
    """The work: `batch` requests of about `context` tokens decode `steps` times `mtp` tokens.
    Beside every step `chunk` tokens of one more prompt are prefilled, behind about `context`
    tokens."""

    context: int
    batch: int
    mtp: int
    steps: int
    temperature: float = 0.0
    chunk: int = 0

    @property
    def tokens_max(self) -> int:
        """The tokens of each request, with those of the steps that fill the batch."""
        return (self.steps + self.batch + 1) * self.mtp

    @property
    def length_max(self) -> int:
        return self.context + 1 + max(self.tokens_max, self.chunk * (self.steps + 1))

    @property
    def sequence_count(self) -> int:
        return self.batch + (self.chunk > 0)

    @property
    def cached_tokens(self) -> int:
        return self.context // PAGE_ROWS * PAGE_ROWS

    def lengths(self) -> list[int]:
        """Prompt lengths. Neighbours differ, so that they continue different sentences.

        One more than whole pages: then one page, enough for warm-up, is prefilled.
        """
        longest = self.cached_tokens + 1
        if longest - STAGGER * (self.batch - 1) < 2 * PAGE_ROWS:
            raise BadInput(f"a batch of {self.batch} needs a context beyond {self.context} tokens")
        return [longest - STAGGER * place for place in range(self.batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeWay:
    """How it is decoded. A ratio is slots over context; None means without residency."""

    name: str
    mode: Any
    ratio: float | None
    evict: PolicyName = "lru"


@dataclass(slots=True, kw_only=True)
class StepMeasurements:
    """Measurements of steps: seconds, tokens, and missed rows [step, group]."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    misses: list[npt.NDArray[np.int64]] = field(default_factory=list)


class DecodeArm:
    """An engine that stands right before its first decode step."""

    def __init__(
        self,
        prefix: Prefix,
        shape: DecodeWork,
        way: DecodeWay,
        *,
        lane: Lane | None = None,
        placement: MakePlacement | None = None,
        model: Model | None = None,
    ) -> None:
        """With `model` given, decodes where that lies: on a device."""
        self.shape, self.way = shape, way
        if way.ratio is None:
            placement = EveryRow
        model = model or prefix.model
        device = str(model.device)
        self.offload = _offload(prefix.layout, shape, way, placement, lane, device)
        moves = way.ratio is not None and way.ratio < 1.0 and not is_device(device)
        self.engine = Engine(
            model,
            self.offload,
            EngineConfig(
                modes=way.mode,
                mtp=shape.mtp,
                max_running=shape.sequence_count,
                chunk_tokens=shape.chunk or CHUNK_TOKENS,
                query_max=max(shape.batch * shape.mtp, 1),
                warm=way.ratio is not None,
                budget_every=64 if moves else 0,
                backend=backend_of(device),
            ),
        )
        self.taken = StepMeasurements()
        self.requests = self._enter(prefix)
        self._misses = self.offload.stats().miss_count

    def _enter(self, prefix: Prefix) -> list[Request]:
        """Takes prompts from the prefix cache, except their last pages, which are prefilled."""
        shape = self.shape
        tokens = prefix.tokens(shape.length_max)
        vocabulary = prefix.model.config.vocab_size
        *prompts, beside = (
            [(tokens[0] + place) % vocabulary, *tokens[1:length]]
            for place, length in enumerate([*shape.lengths(), shape.length_max])
        )
        cached = [beside[: shape.cached_tokens]] if shape.chunk else []
        lay_in(self.offload, prefix, [*prompts, *cached])
        requests = [
            self.engine.add(
                prompt,
                Sampling(tokens_max=shape.tokens_max, temperature=shape.temperature, seed=place),
            )
            for place, prompt in enumerate(prompts)
        ]
        while any(request.state != "decoding" for request in requests):
            self.engine.step()
            if self.engine.refusal is not None:
                raise BadState(f"{self.way.name}: a request does not fit: {self.engine.refusal}")
        if shape.chunk:
            self.engine.add(beside, Sampling(tokens_max=1))
        return requests

    def step(self) -> None:
        started = time.perf_counter()
        result = self.engine.step()
        self.taken.seconds.append(time.perf_counter() - started)
        if len(result.made) != self.shape.batch:
            raise BadState(f"{self.way.name}: a request ended early, after {self.taken.tokens}")
        if sum(chunk.count for chunk in result.chunks) != self.shape.chunk:
            raise BadState(f"{self.way.name}: a step took other prompt tokens: {result.chunks}")
        self.taken.tokens.append(sum(len(made.tokens) for made in result.made))
        seen = self.offload.stats().miss_count
        self.taken.misses.append(seen - self._misses)
        self._misses = seen

    def forget(self) -> None:
        """Drops the measurements so far, which were warm-up."""
        self.taken = StepMeasurements()

    @property
    def outputs(self) -> list[list[int]]:
        return [request.output for request in self.requests]

    def close(self) -> None:
        self.offload.close()


def lay_in(offload: Offload, prefix: Prefix, prompts: Sequence[Sequence[int]]) -> None:
    """Stores the prefix's rows and keys as cached pages of every prompt. Prompts differ in their
    first token, so no two share a page."""
    count = max(len(prompt) for prompt in prompts)
    sequences = [offload.open(prompt) for prompt in prompts]
    for layer in range(prefix.layout.layer_total):
        rows = prefix.rows(layer, count)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.import_rows(layer=layer, start=0, rows=rows[: len(prompt)])
    for group, layers in enumerate(prefix.layout.groups):
        keys = prefix.keys(group, count)
        for sequence, prompt in zip(sequences, prompts, strict=True):
            sequence.import_keys(layer=layers[0], start=0, keys=keys[: len(prompt)])
    for sequence in sequences:
        sequence.close()


def slots_each(shape: DecodeWork, ratio: float) -> int:
    """Slots per request and group for a ratio, at least those that one step writes."""
    return max(shape.mtp, min(int(ratio * shape.context), shape.length_max))


def _offload(
    layout: ModelLayout,
    shape: DecodeWork,
    way: DecodeWay,
    placement: MakePlacement | None,
    lane: Lane | None,
    device: str,
) -> Offload:
    each = 1 if way.ratio is None else slots_each(shape, way.ratio)
    if way.ratio is not None and way.ratio >= 1.0:
        each = div_ceil(shape.length_max + 1, PAGE_ROWS) * PAGE_ROWS
    count = shape.sequence_count
    chunks = div_ceil(each * count, PAGE_ROWS) * layout.group_count
    pages = count * (div_ceil(shape.length_max, PAGE_ROWS) + 2)
    return Offload.create(
        layout,
        slot_bytes=chunks * layout.chunk_bytes,
        host_bytes=pages * layout.host_page_bytes,
        sequence_max=count,
        length_max=shape.length_max + PAGE_ROWS,
        query_max=max(shape.batch * shape.mtp, 1),
        slot_floor=max(1, min(each, shape.length_max)),
        evict=way.evict,
        lane=lane,
        placement=placement,
        device=device,
    )
