"""The rows and keys of a pack on their way from a device to the host, which does not wait layer by
layer.

Copies to pinned memory are queued as rows and keys are made, and handed on once the host has waited
for the last of them: at the pack's end, or when `STAGED_BYTES` are under way. Where a caller is to
hear of each layer, the host waits for a layer when the next one has been queued: its rows leave
for another worker while the prompt is made, and the device is never without work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ess.engine.step_bytes import STAGED_BYTES

Coming = list[tuple[Tensor, Callable[[Tensor], None]]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies that have landed once an event has passed, and the functions to call then."""

    landed: Any
    coming: Coming
    then: Callable[[], None]


class Downloads:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: Coming = []
        self._batches: deque[Batch] = deque()
        self._byte_count = 0

    def bring(self, made: Tensor, then: Callable[[Tensor], None]) -> None:
        staged = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        staged.copy_(made, non_blocking=True)
        self._open.append((staged, then))
        self._byte_count += staged.nbytes
        if self._byte_count >= STAGED_BYTES:
            self.land()

    def mark(self, then: Callable[[], None]) -> None:
        """`then` is called when all that was brought up to now has been handed on: at the next
        mark, or when all lands."""
        self._close(then)
        while len(self._batches) > 1:
            self._hand_on()

    @property
    def has_landed(self) -> bool:
        return not self._open and all(batch.landed.query() for batch in self._batches)

    def land(self) -> None:
        """Returns when everything has been handed on."""
        if self._open:
            self._close(lambda: None)
        while self._batches:
            self._hand_on()

    def _close(self, then: Callable[[], None]) -> None:
        landed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record(torch.cuda.current_stream(self._device))
        self._batches.append(Batch(landed, self._open, then))
        self._open = []

    def _hand_on(self) -> None:
        """Hands on the oldest batch."""
        batch = self._batches.popleft()
        batch.landed.synchronize()
        for staged, each in batch.coming:
            self._byte_count -= staged.nbytes
            each(staged)
        batch.then()
