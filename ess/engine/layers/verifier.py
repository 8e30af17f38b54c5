"""Verify mode: now and then a layer is computed again from the truth and compared.

Two comparisons, on one layer of every n-th step, another layer each time. Every clean slot must
hold the bytes of its row on the host. And the layer's attention, over any mix of hits, fetched rows
and rows in place its schedule used, must equal one pass over the host's own rows. The first finds a
wrong copy even if no query selects it; the second finds a right copy that is read for the wrong
row.

On a device both are queued with the step, and the host does not wait: it reads the findings when it
learns the step. There a row's weight is rounded to bf16, by 2^-9 of it at most, and two passes over
the same rows, cut differently, round differently. `TOLERANCES` leaves each pass four times that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor

from ess.door.device.memory.uploads import Download
from ess.door.side import Differing
from ess.engine.layers.batch import Batch
from ess.errors import EssError

TOLERANCES: Final[Mapping[str, float]] = {"cpu": 1e-3, "cuda": 2**-6}
"""The allowed difference as a share of the largest attended value, by kind of device."""
LISTED_MAX: Final = 100


class Mismatched(EssError):
    """Verify mode found a difference and was asked to stop at the first."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Where: a query whose attention differs, or a slot whose bytes differ."""

    step: int
    layer: int
    sentence: str


class Truth(Protocol):
    """A layer of a step that can attend to the host's own rows."""

    number: int
    first_query: int

    def attend_truth(self) -> Tensor: ...


class Readable(Protocol):
    def read(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OnHost:
    values: Tensor

    def read(self) -> Tensor:
        return self.values


@dataclass(frozen=True, slots=True)
class Check:
    """The findings in one layer: slots that differ; how much the attention of each query differs,
    and last, how much it may."""

    step: int
    layer: int
    first_query: int
    slots: Differing
    attention: Readable


@dataclass(slots=True, kw_only=True)
class Verifier:
    """`every` n-th step one layer is checked; 0 never. The counts are for people and metrics."""

    every: int = 0
    is_fatal: bool = False
    checked_count: int = 0
    mismatch_count: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)
    _under_way: deque[Check] = field(default_factory=deque)

    def layer_for(self, step_number: int, layer_count: int) -> int | None:
        if self.every == 0 or step_number % self.every:
            return None
        return step_number // self.every % layer_count

    @contextmanager
    def off(self) -> Iterator[None]:
        """Checks no layer inside the block: for steps that serve no request."""
        every, self.every = self.every, 0
        try:
            yield
        finally:
            self.every = every

    def check(self, batch: Batch, stages: Truth, attended: Tensor) -> None:
        """Compare one layer of this step; call before the step is committed."""
        layer, step, on_cpu = stages.number, batch.step.number, attended.device.type == "cpu"
        slots = batch.offload.compare(layer, most=LISTED_MAX)
        attention = _differences(attended, stages.attend_truth())
        brought = OnHost(attention) if on_cpu else Download(attention)
        self._under_way.append(Check(step, layer, stages.first_query, slots, brought))
        if on_cpu:
            self.learned(step)

    def learned(self, step: int) -> None:
        """The device has finished this step and all steps before it."""
        while self._under_way and self._under_way[0].step <= step:
            self._read(self._under_way.popleft())

    def _read(self, check: Check) -> None:
        self.checked_count += 1
        differing = check.slots.read()
        for slot, row in differing.listed:
            self._note(check, f"slot {slot} differs from row {row} on the host")
        self.mismatch_count += differing.count - len(differing.listed)
        *worst, bound = check.attention.read().tolist()
        for query, difference in enumerate(worst, check.first_query):
            if not difference <= bound:
                self._note(check, f"query {query}: attention differs by {difference:.2e}")

    def _note(self, check: Check, sentence: str) -> None:
        self.mismatch_count += 1
        mismatch = Mismatch(check.step, check.layer, sentence)
        if len(self.mismatches) < LISTED_MAX:
            self.mismatches.append(mismatch)
        if self.is_fatal:
            raise Mismatched(f"step {mismatch.step}, layer {mismatch.layer}: {sentence}")


def _differences(attended: Tensor, expected: Tensor) -> Tensor:
    """The largest difference of each query, and last what is allowed."""
    assert attended.shape == expected.shape, f"{attended.shape} against {expected.shape}"
    worst = (attended - expected).abs().flatten(1).amax(1).float()
    scale = expected.abs().amax().clamp_min(1.0).float()
    return torch.cat((worst, (scale * TOLERANCES[attended.device.type]).view(1)))
