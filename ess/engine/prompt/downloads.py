"""What a pack has made, on its way from a device to the host: nobody waits for it layer by layer.

Copies to pinned memory are queued as rows and keys are made, and handed on once the host has waited
for the last of them: at the pack's end, or when `STAGED_BYTES` are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ess.engine.step_bytes import STAGED_BYTES


class Downloads:
    def __init__(self) -> None:
        self._coming: list[tuple[Tensor, Callable[[Tensor], None]]] = []
        self._byte_count = 0

    def bring(self, made: Tensor, then: Callable[[Tensor], None]) -> None:
        here = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        here.copy_(made, non_blocking=True)
        self._coming.append((here, then))
        self._byte_count += here.nbytes
        if self._byte_count >= STAGED_BYTES:
            self.land()

    def land(self) -> None:
        """All has been handed on when this returns."""
        if not self._coming:
            return
        landed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        landed.record()
        landed.synchronize()
        coming, self._coming, self._byte_count = self._coming, [], 0
        for here, then in coming:
            then(here)
