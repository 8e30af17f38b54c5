"""Arrays in the memory of a device, without torch: what the kernels' callers ask of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np

from ess.kernels.cuda.driver import Device, call
from ess.kernels.cuda.memory import DeviceMemory
from ess.kernels.cuda.pinned import pinned_memory
from ess.kernels.cuda.streams import CudaStream


class DeviceArray:
    """A copy of `array` over there. `write` and `read` wait; no other stream may be at it."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self.shape, self._numpy_dtype = array.shape, array.dtype
        self.dtype = f"torch.{array.dtype}"
        self.device = type("device", (), {"type": "cuda", "index": 0})()
        self._stream = CudaStream(device)
        size = max(1, array.nbytes)
        self._memory: Any = DeviceMemory(device, size)
        self._passing = pinned_memory(device, size, touch_threads=1)
        self._address = self._memory.address
        self.write(array)

    def data_ptr(self) -> int:
        return self._address

    def element_size(self) -> int:
        return self._numpy_dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        strides = np.empty(self.shape, np.int8).strides
        return tuple(int(step) for step in strides)

    def write(self, array: np.ndarray | list[int]) -> None:
        given = np.ascontiguousarray(array, self._numpy_dtype).reshape(self.shape)
        size = given.nbytes
        self._passing[:size] = given.reshape(-1).view(np.uint8)
        if size:
            here = int(self._passing.__array_interface__["data"][0])
            call("cuMemcpyHtoDAsync", self._address, here, size, self._stream.handle)
        self._stream.synchronize()

    def read(self) -> np.ndarray:
        size = int(np.prod(self.shape)) * self._numpy_dtype.itemsize
        if size:
            here = int(self._passing.__array_interface__["data"][0])
            call("cuMemcpyDtoHAsync", here, self._address, size, self._stream.handle)
        self._stream.synchronize()
        return self._passing[:size].copy().view(self._numpy_dtype).reshape(self.shape)

    def tolist(self) -> list[int]:
        return self.read().tolist()

    def __getitem__(self, rows: slice) -> DeviceArray:
        """A view of consecutive rows."""
        start, stop, step = rows.indices(self.shape[0])
        assert step == 1, rows
        view = object.__new__(DeviceArray)
        view.__dict__ |= self.__dict__
        view.shape = (max(0, stop - start), *self.shape[1:])
        row_bytes = self._numpy_dtype.itemsize * int(np.prod(self.shape[1:]))
        view._address = self._address + start * row_bytes
        return view
