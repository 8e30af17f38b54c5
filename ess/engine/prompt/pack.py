"""Spans of prompts, packed one behind the other, that run through the model together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ess.door import LayerMemory
from ess.door.device.memory.uploads import sent
from ess.engine.layers.beside import Carried
from ess.engine.prompt.plain_rows import PlainRows
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.layers import Rotation
from ess.models.model import Model
from ess.pool.warmup import WINDOW_MAX


class Rows(Protocol):
    """What a chunk needs of an open sequence."""

    @property
    def page_table(self) -> Tensor: ...

    def host_rows(self, start: int, count: int) -> Tensor: ...

    def import_rows(self, layer: int, start: int, rows: Any) -> None: ...

    def import_keys(self, layer: int, start: int, keys: Any) -> None: ...

    def mark_stored(self, layer: int, start: int, count: int) -> None: ...


class Memory(Protocol):
    @property
    def layout(self) -> ModelLayout: ...

    def memory(self, layer: int) -> LayerMemory: ...


class Computer(Protocol):
    """What a chunk needs of a runner."""

    @property
    def model(self) -> Model: ...

    @property
    def offload(self) -> Memory: ...

    @property
    def ops(self) -> Ops: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """`tokens` of an open sequence, from position `start` on, that run through the model together.

    `following[i]` is the token behind `tokens[i]`: what the MTP module pairs with i. `windows` are
    filled during the run, one for each layer group. `carried` is the sequence's state, if it has
    any. If this is part of a longer span, `behind_count` is how many tokens follow that another
    rank runs.
    """

    sequence: Rows
    start: int
    tokens: Sequence[int]
    following: Sequence[int]
    windows: dict[int, Tensor] = field(default_factory=dict)
    carried: Carried | None = None
    behind_count: int = 0

    def __post_init__(self) -> None:
        count = len(self.tokens)
        assert count == len(self.following) > 0, f"{len(self.following)} tokens behind {count}"

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class PackRows(Protocol):
    """Where the indexer and the attention of a pack read, and how rows reach the host."""

    def enter(self, layer: int) -> None:
        """The layer begins."""

    def put(self, layer: int, rows: Sequence[Tensor]) -> None:
        """The new rows of each span have been made."""

    def put_keys(self, layer: int, keys: Sequence[Tensor]) -> None:
        """Stores their index keys."""

    def tell(self, then: Callable[[], None]) -> None:
        """`then` is called when the host has all that was put, at the latest when all lands."""

    @property
    def has_landed(self) -> bool:
        """Whether `land` would return at once."""

    def land(self) -> None:
        """Returns when the host has everything."""

    def reading(self, layer: int, at: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Rows, and what the selections of span number `at` are called among them."""


class HostRows:
    """Rows of the host, read in place, where `import_rows` has put them."""

    def __init__(self, computer: Computer, spans: Sequence[Span]) -> None:
        self._offload, self._spans = computer.offload, spans

    def enter(self, layer: int) -> None:
        return

    def put(self, layer: int, rows: Sequence[Tensor]) -> None:
        for span, mine in zip(self._spans, rows, strict=True):
            span.sequence.import_rows(layer, span.start, mine)

    def put_keys(self, layer: int, keys: Sequence[Tensor]) -> None:
        for span, mine in zip(self._spans, keys, strict=True):
            span.sequence.import_keys(layer, span.start, mine)

    def tell(self, then: Callable[[], None]) -> None:
        then()

    @property
    def has_landed(self) -> bool:
        return True

    def land(self) -> None:
        return

    def reading(self, layer: int, at: int, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._spans[at].sequence.host_rows(0, self._spans[at].stop)
        codes = torch.where(chosen >= 0, rows[chosen.clamp_min(0)], -1)
        return self._offload.memory(layer).host, codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """Spans, one behind the other. `places[i]` are the tokens of span i among those of all,
    `tables[i]` is its page table."""

    runner: Computer
    spans: tuple[Span, ...]
    places: tuple[slice, ...]
    rotation: Rotation
    tables: tuple[Tensor, ...]
    rows: PackRows

    @property
    def layout(self) -> ModelLayout:
        return self.runner.offload.layout

    @property
    def ops(self) -> Ops:
        return self.runner.ops

    @property
    def device(self) -> torch.device:
        return self.runner.model.device

    def unit_keys(self, layer: DecoderLayer, given: Tensor) -> Tensor:
        keys = [given[:0, : given.shape[1] // 2]]
        for _, span, place in self.each():
            assert span.carried is not None, "units without a state"
            keys.append(span.carried.unit_keys(layer, given[place]))
        return torch.cat(keys)

    def each(self) -> Iterator[tuple[int, Span, slice]]:
        return zip(range(len(self.spans)), self.spans, self.places, strict=True)


Chosen = Sequence[Tensor | None]
"""The selections of each span's queries; None before the first layer has made them."""


def packed(runner: Computer, spans: Sequence[Span]) -> Pack:
    assert len({span.sequence for span in spans}) == len(spans), "a sequence has two spans"
    device = runner.model.device
    is_there = device.type != "cpu"
    ends = list(itertools.accumulate(len(span.tokens) for span in spans))
    positions = [torch.arange(0), *(torch.arange(span.start, span.stop) for span in spans)]
    return Pack(
        runner=runner,
        spans=tuple(spans),
        places=tuple(itertools.starmap(slice, itertools.pairwise([0, *ends]))),
        rotation=runner.model.rotation(sent(torch.cat(positions), device)),
        tables=tuple(sent(span.sequence.page_table, device) for span in spans),
        rows=PlainRows(runner, spans) if is_there else HostRows(runner, spans),
    )


def window_of(span: Span, chosen: Tensor) -> Tensor:
    """The selections of the last queries, oldest first; of a part those that lie in it. A copy: a
    view would keep the selections of all queries, in every group until the pack has run."""
    return chosen[max(len(span.tokens) + span.behind_count - WINDOW_MAX, 0) :].clone()
