"""Families whose requests keep a state beside their rows: tiny models of each, and engines over
them.

GLM-5-next has a state in its linear layers and of the unit of tokens that is not whole yet,
DeepSeek-V4 one of its windows and open entries.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from safetensors.torch import save_file
from torch import Tensor

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.layout import ModelLayout
from ess.models.compressed.model import CompressedModel
from ess.models.compressed.plain import Plain as PlainCompressed
from ess.models.load import EMBEDDED
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.registry import read_config
from tests.compressed import world as compressed
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane

LINE: Final = checkpoints.tokens(900, 96, seed=8)
OTHER: Final = checkpoints.tokens(900, 96, seed=9)
MADE: Final = 6
AnyModel = Model | CompressedModel


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """`page` is how many tokens a page has. `served` is the configuration of a checkpoint whose
    index keys may be rounded: what a server has by default."""

    family: str
    model: Callable[[], AnyModel]
    logits: Callable[[list[int]], Tensor]
    page: int
    slot_floor: int
    served: Mapping[str, Any]
    weights: Callable[[], dict[str, Tensor]]

    def layout(self, *, mtp: int = 1) -> ModelLayout:
        """As a server that verifies so many tokens has it."""
        return self.model().config.layout(row="f32", index="f32", has_mtp=mtp > 1)

    def offload(self, *, chunks: int, mtp: int = 1, **sizes: Any) -> Offload:
        """Slots for 64 rows a chunk, in each group."""
        layout = self.layout(mtp=mtp)
        return Offload.create(
            layout,
            slot_bytes=chunks * layout.group_count * layout.chunk_bytes,
            slot_floor=self.slot_floor,
            poison=True,
            **sizes,
        )

    @contextmanager
    def engines(
        self,
        *,
        chunks: int = 2,
        sequence_max: int = 8,
        host_pages: int = 40,
        is_late: bool = True,
        mtp: int = 1,
        **config: Any,
    ) -> Iterator[Engine]:
        """Copies may be late."""
        offload = self.offload(
            chunks=chunks,
            mtp=mtp,
            host_bytes=host_pages * self.layout(mtp=mtp).host_page_bytes,
            length_max=1024,
            sequence_max=sequence_max,
            lane=ManualLane(seed=1, delay_max=3) if is_late else None,
        )
        with offload:
            made = EngineConfig(**{"chunk_tokens": 64, "mtp": mtp, **config})
            yield Engine(self.model(), offload, made)

    def told(self, length: int, *, line: int = 0, count: int = MADE) -> list[int]:
        """What the plain model says behind the beginning of a line."""
        return _told(self, length, line, count)

    def stored(self, folder: Path) -> Path:
        """A checkpoint by published names, with the tokenizer of the model in the box."""
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(EMBEDDED / name, folder / name)
        (folder / "config.json").write_text(json.dumps(self.served))
        save_file(self.weights(), folder / "model.safetensors")
        return folder


@functools.cache
def _told(world: World, length: int, line: int, count: int) -> list[int]:
    return greedy(world.model(), (LINE, OTHER)[line][:length], count)


@functools.cache
def glm5_next() -> Model:
    """Linear layers before, between and behind those with rows."""
    return checkpoints.model(checkpoints.TINY_GLM5_NEXT)


SERVED: Final = checkpoints.tiny_glm5_next("LILIL", index_topk=256)
"""With so many rows to a query, no rounding of keys leaves one out."""


def _served_weights() -> dict[str, Tensor]:
    config = read_config(SERVED)
    return checkpoints.published(checkpoints.tensors(config), config)


GLM5: Final = World(
    family="glm5_next",
    model=glm5_next,
    logits=lambda prompt: Plain(glm5_next()).run(prompt).logits,
    page=64,
    slot_floor=24,
    served=SERVED,
    weights=_served_weights,
)


def _deepseek_v4(spelling: str) -> World:
    return World(
        family="deepseek_v4",
        model=lambda: compressed.tiny(spelling),
        logits=lambda prompt: PlainCompressed(compressed.tiny(spelling)).run(prompt),
        page=256,
        slot_floor=8,
        served=compressed.LISTED,
        weights=lambda: compressed.published(compressed.weights(read_config(compressed.LISTED))),
    )


V4: Final = _deepseek_v4("listed")
V4_PUBLISHED: Final = _deepseek_v4("ratios")
"""With windows of the published sizes."""
WORLDS: Final = (GLM5, V4)
EACH: Final = pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.family)


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
