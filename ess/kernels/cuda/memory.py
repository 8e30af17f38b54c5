"""Plain device memory for the few things that torch does not own, and copies to it and from it."""

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


def copy_to_device(
    device: Device, *, target: int, source: int, byte_count: int, stream: int
) -> None:
    """From registered memory of the host. Queued; one copy for each registration that it meets."""
    device.make_current()
    for at, size in device.pinned.pieces(source, byte_count):
        call("cuMemcpyHtoDAsync", target + at, source + at, size, stream)


def copy_to_host(device: Device, *, target: int, source: int, byte_count: int, stream: int) -> None:
    """Queues a copy to registered memory of the host, in one piece for each registration that it
    crosses."""
    device.make_current()
    for at, size in device.pinned.pieces(target, byte_count):
        call("cuMemcpyDtoHAsync", target + at, source + at, size, stream)


def _free(device: Device, address: int) -> None:
    """At interpreter exit the driver may be gone already; then so is the memory."""
    attempt("cuCtxSetCurrent", device.context)
    attempt("cuMemFree", address)
