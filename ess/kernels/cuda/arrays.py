"""Arrays in the memory of a device: what callers of kernels ask of a tensor, without torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.memory import DeviceMemory, copy_to_device, copy_to_host
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaStream

Array = npt.NDArray[Any]


class DeviceArray:
    """A copy of `array` on a device. `write` and `read` wait; no other stream may use it then."""

    def __init__(self, device: Device, array: Array) -> None:
        array = np.ascontiguousarray(array)
        self.shape: tuple[int, ...] = array.shape
        self.dtype = f"torch.{array.dtype}"
        self.device = SimpleNamespace(type="cuda", index=0)
        self._element = array.dtype
        self._device = device
        self._stream = CudaStream(device)
        self._memory = DeviceMemory(device, max(1, array.nbytes))
        self._passing = pinned_memory(device, max(1, array.nbytes), touch_threads=1)
        self._address = self._memory.address
        self.write(array)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * self._element.itemsize

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._element.itemsize

    def stride(self) -> tuple[int, ...]:
        """In elements; arrays of a device are dense."""
        return tuple(int(np.prod(self.shape[axis + 1 :])) for axis in range(len(self.shape)))

    def write(self, array: npt.ArrayLike) -> None:
        given = np.ascontiguousarray(array, self._element).reshape(self.shape)
        self._passing[: self.nbytes] = given.reshape(-1).view(np.uint8)
        if self.nbytes:
            copy_to_device(target=self._address, source=self._here, **self._way)
        self._stream.synchronize()

    def read(self) -> Array:
        if self.nbytes:
            copy_to_host(target=self._here, source=self._address, **self._way)
        self._stream.synchronize()
        return self._passing[: self.nbytes].copy().view(self._element).reshape(self.shape)

    def numpy(self) -> Array:
        return self.read()

    def tolist(self) -> list[Any]:
        return list(self.read().tolist())

    def __getitem__(self, rows: slice) -> DeviceArray:
        """A view of consecutive rows, on the same memory."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, f"{rows} is not a run of rows"
        view = object.__new__(DeviceArray)
        view.__dict__ |= self.__dict__
        view.shape = (max(0, stop - start), *self.shape[1:])
        view._address = self._address + start * self.stride()[0] * self._element.itemsize
        return view

    @property
    def _way(self) -> dict[str, Any]:
        stream = self._stream.handle
        return {"device": self._device, "byte_count": self.nbytes, "stream": stream}

    @property
    def _here(self) -> int:
        return int(self._passing.__array_interface__["data"][0])
