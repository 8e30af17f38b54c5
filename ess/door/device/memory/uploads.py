"""Small arrays copied to a device and back; no thread waits for them.

To upload an array, the host copies it into page-locked memory and queues a copy from there. Torch
lends that memory, and takes it back only when the device has read it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ess.door.checks import TYPES
from ess.errors import BadInput
from ess.kernels.checks import fits
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.streams import CudaEvent
from ess.pool.device_bytes import BEHIND


def sent(values: Tensor, home: torch.device) -> Tensor:
    """The values on the home device, there before any work that is queued from now on; on a host
    the values themselves."""
    if home.type == "cpu":
        return values
    if not len(values):
        return torch.empty(values.shape, dtype=values.dtype, device=home)
    return values.pin_memory().to(home, non_blocking=True)


def upload(array: npt.NDArray[Any], home: torch.device) -> Tensor:
    return sent(torch.from_numpy(np.ascontiguousarray(array)), home)


def upload_into(target: Tensor, array: npt.NDArray[Any]) -> None:
    """Uploads an array into a tensor that keeps its address."""
    assert tuple(target.shape) == array.shape, f"{array.shape} into {tuple(target.shape)}"
    pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
    target.copy_(pinned, non_blocking=True)


class LatestCopy:
    """The latest copy of some numbers of the device that has reached the host.

    `send` queues a copy; `newest` is what the last copy that has landed brought. Places take turns:
    where all places are under way none is overwritten, and the host keeps the numbers that it has.
    """

    def __init__(self, device: Device, like: Tensor) -> None:
        self._device = device
        self._places = [
            torch.zeros(like.shape, dtype=like.dtype, pin_memory=True) for _ in range(BEHIND)
        ]
        self._sent: list[tuple[int, int, CudaEvent]] = []
        self._free = list(range(BEHIND))
        self._known: npt.NDArray[Any] = np.zeros(tuple(like.shape), self._places[0].numpy().dtype)
        self._count = 0
        self.landed_count = 0

    def send(self, numbers: Tensor, stream: int) -> int:
        """The number of this sending; they count from 1. 0 where no place is free: try later."""
        self._receive()
        if not self._free:
            return 0
        place = self._free.pop()
        self._places[place].copy_(numbers, non_blocking=True)
        self._count += 1
        self._sent.append((self._count, place, CudaEvent(self._device).record(stream)))
        return self._count

    def newest(self) -> npt.NDArray[Any]:
        self._receive()
        return self._known

    def wait(self) -> npt.NDArray[Any]:
        """Waits for the newest numbers sent, and returns them. For audits."""
        if self._sent:
            self._sent[-1][2].wait()
        return self.newest()

    def _receive(self) -> None:
        while self._sent and self._sent[0][2].done():
            self.landed_count, place, _ = self._sent.pop(0)
            self._known = self._places[place].numpy().copy()
            self._free.append(place)


class Download:
    """The values of a tensor of a device, once that device has made them; it need not be the
    current device of the caller's thread."""

    def __init__(self, tensor: Tensor) -> None:
        self._staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._staged.copy_(tensor, non_blocking=True)
        self._landed: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._landed.record(torch.cuda.current_stream(tensor.device))

    @property
    def shape(self) -> torch.Size:
        return self._staged.shape

    def done(self) -> bool:
        done: bool = self._landed.query()
        return done

    def read(self) -> Tensor:
        """Waits, if it must."""
        self._landed.synchronize()
        return self._staged


def given(
    value: Any, name: str, dtype: str, shape: tuple[int | None, ...], home: torch.device
) -> Tensor:
    """A dense tensor of this device, which is not looked into."""
    if not isinstance(value, Tensor):
        raise BadInput(f"{name} is a {type(value).__name__}, must be a tensor on {home}")
    if value.dtype is not TYPES[dtype]:
        raise BadInput(f"{name} is {str(value.dtype).removeprefix('torch.')}, must be {dtype}")
    if value.device != home:
        raise BadInput(f"{name} is on {value.device}, this pool is on {home}")
    if not fits(value.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadInput(f"{name} has shape {list(value.shape)}, must be [{wanted}]")
    if not value.is_contiguous():
        raise BadInput(f"{name} is not contiguous (strides {list(value.stride())})")
    return value
