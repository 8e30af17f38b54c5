"""Host memory near a device: on the NUMA node that the device is attached to.

Reads over the link between two sockets are slower, and many at once are much slower. A container
may not let its processes choose, and a node may be too small for a pool. So the system is asked for
near memory and may give other memory; that is never a reason not to start.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# By number, since libc has no mbind; libnuma, which has, is rarely installed.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}
_PREFERRED: Final = 1
_MASK_BITS: Final = 1024
_WORD_BITS: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


def prefer_node(memory: Bytes, node: int) -> bool:
    """Pages of `memory` that arrive from now on come from the node while it has any. Whether the
    system took the wish; `memory` starts on a page."""
    number = _MBIND.get(platform.machine())
    if number is None or not 0 <= node < _MASK_BITS - 1:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // _WORD_BITS))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    words = (_address(memory), memory.nbytes, _PREFERRED, ctypes.addressof(mask), _MASK_BITS, 0)
    return bool(_libc().syscall(number, *map(ctypes.c_ulong, words)) == 0)


def keep_from_children(memory: Bytes) -> None:
    """A forked child does not have this memory. Otherwise a page that parent or child writes after
    a fork is copied, and it may be the parent's page that moves away from what the device reads."""
    words = (_address(memory), memory.nbytes)
    if _libc().madvise(*map(ctypes.c_ulong, words), mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), "memory cannot be kept from forked processes")


def _address(memory: Bytes) -> int:
    start = int(memory.__array_interface__["data"][0])
    assert start % mmap.PAGESIZE == 0, f"memory at {start:#x} does not start on a page"
    return start


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
