"""How often each expert of a layer was chosen recently: the loads that `balance` goes by.

Every rank counts what its own tokens choose. At the end of a window all ranks add up, so that each
knows the choices of all; the last `WINDOWS` windows are kept. Ranks count the same steps and
layers, as they go through the same exchanges.

On a device the host may not wait for the counts of the step that runs. The device adds them up.
They are copied to the host when a window ends, and count when the next window ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from ess.comm.team import Team

WINDOW_STEPS: Final = 256
WINDOWS: Final = 8
Fetch: TypeAlias = "Callable[[Tensor], Callable[[], Tensor]]"
"""Starts to bring a tensor of a device to the host; what it returns waits for that."""


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

    def share(self, team: Team, step_count: int, *, is_last: bool = False) -> None:
        """Ends a window of `step_count` steps, on all ranks together. After the last one all that
        was counted is told."""
        layers = sorted(self._own)
        counts = [self._own[layer] for layer in layers]
        size = len(layers) * self._expert_count
        shape = team.size, len(layers), self._expert_count
        mine = torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64)
        whole = team.all_gather(mine, sizes=[size] * team.size).view(shape).sum(0)
        self._windows.append((step_count, dict(zip(layers, whole, strict=True))))
        self._own = {}

    def forget(self) -> None:
        """Drops the counts of the open window."""
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


class DeviceLoads(Loads):
    """A count for each of the layers given to `expect`, in memory that stays in place: graphs add
    to it."""

    def __init__(self, expert_count: int, device: torch.device, fetch: Fetch) -> None:
        super().__init__(expert_count)
        self._device = device
        self._fetch = fetch
        self._there: dict[int, Tensor] = {}
        self._sent: tuple[int, Callable[[], Tensor]] | None = None

    def expect(self, layer: int) -> None:
        if layer not in self._there:
            zeros = torch.zeros(self._expert_count, dtype=torch.int64, device=self._device)
            self._there[layer] = zeros

    def count(self, layer: int, experts: Tensor, which: Tensor | None = None) -> None:
        """Counts these choices by expert; where `which` is given, those that it marks."""
        flat = experts.flatten().long()
        each = torch.ones_like(flat) if which is None else which.flatten().long()
        self._there[layer].scatter_add_(0, flat, each)

    def share(self, team: Team, step_count: int, *, is_last: bool = False) -> None:
        self._tell(team)
        self._send(step_count)
        if is_last:
            self._tell(team)

    def forget(self) -> None:
        for counts in self._there.values():
            counts.zero_()

    def _send(self, step_count: int) -> None:
        counts = torch.stack([self._there[layer] for layer in sorted(self._there)])
        self._sent = step_count, self._fetch(counts)
        self.forget()

    def _tell(self, team: Team) -> None:
        if self._sent is None:
            return
        step_count, landed = self._sent
        self._own = dict(zip(sorted(self._there), landed(), strict=True))
        self._sent = None
        super().share(team, step_count)
