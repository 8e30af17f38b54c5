"""Plain device memory for the few things that torch does not own."""

from __future__ import annotations

import weakref

from ess.kernels.cuda.driver import Device, attempt, call


class DeviceMemory:
    """Bytes on a device, freed with this object; work that was queued on them must be over then."""

    def __init__(self, device: Device, byte_count: int) -> None:
        assert byte_count > 0, f"{byte_count} bytes of device memory"
        device.make_current()
        self.byte_count = byte_count
        self.address = int(call("cuMemAlloc", byte_count))
        weakref.finalize(self, _free, device, self.address)


def _free(device: Device, address: int) -> None:
    """At interpreter exit the driver may be gone already; then so is the memory."""
    attempt("cuCtxSetCurrent", device.context)
    attempt("cuMemFree", address)
