"""Engines over a tiny GLM-5-next: linear layers before, between and behind those with rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.models.model import Model
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane

RAW = checkpoints.TINY_GLM5_NEXT
TEXTS = [checkpoints.tokens(530, RAW["vocab_size"], seed=seed) for seed in (8, 9)]
LINE, OTHER = TEXTS
MADE = 6


@functools.cache
def model() -> Model:
    return checkpoints.model(RAW)


@functools.cache
def told(length: int, *, line: int = 0, count: int = MADE) -> list[int]:
    return greedy(model(), TEXTS[line][:length], count)


@contextmanager
def engines(
    *,
    chunks: int = 2,
    sequence_max: int = 8,
    host_pages: int = 40,
    is_late: bool = True,
    **config: Any,
) -> Iterator[Engine]:
    """Slots for 64 rows a chunk, in each group; copies may be late."""
    layout = model().config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=chunks * layout.group_count * layout.chunk_bytes,
        host_bytes=host_pages * layout.host_page_bytes,
        length_max=640,
        sequence_max=sequence_max,
        slot_floor=24,
        lane=ManualLane(seed=1, delay_max=3) if is_late else None,
        poison=True,
    )
    with offload:
        yield Engine(model(), offload, EngineConfig(**{"chunk_tokens": 64, **config}))


def add(engine: Engine, prompt: list[int], **wishes: Any) -> Request:
    return engine.add(prompt, Sampling(tokens_max=MADE, ignore_eos=True), **wishes)


def finish(engine: Engine) -> None:
    for _ in engine.run():
        pass
    engine.offload.check()
    engine.check()


def run(engine: Engine, prompt: list[int]) -> Request:
    request = add(engine, prompt)
    finish(engine)
    return request
