"""Small inputs of a step on their way to a device, for which the host does not wait.

They lie in pinned memory until they have arrived. Each step uses the next of `TURNS` pieces of
memory. A piece is used again only when the host has learned the step that used it last: a step at
depth 1 is launched when the step two before it has been learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

TURNS: Final = 3


class Upload:
    """Memory of one address on the device, for graphs, which know it by that."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._on_device = torch.zeros(shape, dtype=dtype, device=device)
        self._staged = [torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(TURNS)]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._on_device)

    def put(self, values: Sequence[Any]) -> Tensor:
        """Uploads the values, and returns the lines that have them."""
        count = len(values)
        assert 0 < count <= len(self._on_device), f"{count} lines of {len(self._on_device)}"
        staged, self._turn = self._staged[self._turn], (self._turn + 1) % TURNS
        staged[:count] = torch.tensor(values, dtype=staged.dtype)
        return self._on_device[:count].copy_(staged[:count], non_blocking=True)
