"""The way of a fetch: a kernel reads rows in place, or the host gathers and DMA sends.

A kernel starts at once and needs a few multiprocessors, but a device can have only so many reads on
PCIe at a time, which keeps it below the link's rate. The copy engine reaches that rate and takes no
multiprocessor; it waits for the list to be handed to the host, and needs host cores that gather as
fast as it sends. The figures are predictions from published measurements (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

FetchWay = Literal["flat", "staged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Rates are in bytes per microsecond, which is a thousandth of GB/s."""

    kernel_us: float = 4.0
    kernel_rate: float = 37_000.0
    handover_us: float = 18.0
    gather_rate: float = 20_000.0
    gather_rate_max: float = 60_000.0
    dma_rate: float = 55_000.0
    chunk_bytes: int = 1 << 20


PCIE5: Final = Link()


def kernel_time_us(byte_count: int, link: Link = PCIE5) -> float:
    assert byte_count >= 0, f"{byte_count} bytes"
    return link.kernel_us + byte_count / link.kernel_rate


def staged_time_us(byte_count: int, *, threads: int, link: Link = PCIE5) -> float:
    """The first chunk is gathered while nothing is sent; then gathering and sending overlap."""
    assert byte_count >= 0, f"{byte_count} bytes"
    assert threads > 0, f"{threads} threads"
    gather_rate = min(threads * link.gather_rate, link.gather_rate_max)
    first = min(byte_count, link.chunk_bytes) / gather_rate
    return link.handover_us + first + byte_count / min(gather_rate, link.dma_rate)


def pick_way(
    byte_count: int,
    *,
    host_lists: bool,
    compute_fills_device: bool = False,
    threads: int = 1,
    link: Link = PCIE5,
) -> FetchWay:
    """`staged` where it is faster, or where no multiprocessor is left for a kernel.

    Lists on the device cannot be staged: the host would have to wait for them.
    """
    if not host_lists:
        return "flat"
    if compute_fills_device:
        return "staged"
    faster = staged_time_us(byte_count, threads=threads, link=link)
    return "staged" if faster < kernel_time_us(byte_count, link) else "flat"
