"""How often each expert of a layer was chosen recently: the loads that `balance` goes by.

Every rank counts what its own tokens choose. At the end of a window all ranks add up, so that each
knows the choices of all; the last `WINDOWS` windows are kept. Ranks count the same steps and
layers, as they go through the same exchanges.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ess.comm.team import Team

WINDOW_STEPS: Final = 256
WINDOWS: Final = 8


class Loads:
    def __init__(self, expert_count: int) -> None:
        self._expert_count = expert_count
        self._own: dict[int, Tensor] = {}
        self._windows: deque[tuple[int, dict[int, Tensor]]] = deque(maxlen=WINDOWS)

    def count(self, layer: int, experts: Tensor) -> None:
        """Counts the choices of this rank's tokens."""
        counts = torch.bincount(experts.flatten(), minlength=self._expert_count)
        own = self._own.get(layer)
        self._own[layer] = counts if own is None else own + counts

    def share(self, team: Team, step_count: int) -> None:
        """Ends a window of `step_count` steps, on all ranks together."""
        layers = sorted(self._own)
        counts = [self._own[layer] for layer in layers]
        size = len(layers) * self._expert_count
        shape = team.size, len(layers), self._expert_count
        mine = torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64)
        whole = team.all_gather(mine, sizes=[size] * team.size).view(shape).sum(0)
        self._windows.append((step_count, dict(zip(layers, whole, strict=True))))
        self._own = {}

    @property
    def step_count(self) -> int:
        """How many steps the kept windows have."""
        return sum(step_count for step_count, _ in self._windows)

    def recent(self) -> dict[int, list[int]]:
        """How often tokens of all ranks chose each expert in the kept windows, by layer."""
        total: dict[int, Tensor] = {}
        for _, counts in self._windows:
            for layer, count in counts.items():
                total[layer] = total[layer] + count if layer in total else count
        return {layer: count.tolist() for layer, count in sorted(total.items())}
