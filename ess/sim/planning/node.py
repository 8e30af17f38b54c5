"""A node: memory, links and network that its GPUs share, each figure with its source.

The rate at which a GPU fetches rows is the least of three: that of its own link, its share of the
node's memory rate, and, if rows lie on either socket, its share of the link between sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from ess.errors import BadInput
from ess.sim.operators.stages import Machine

Numa = Literal["local", "interleaved"]

SOCKETS: Final = 2
GIGABYTE_US: Final = 1e3
"""Bytes per microsecond in 1 GB/s."""

NORMAL_HOST_BYTES: Final = 2 << 40
DRAM_RATE: Final = 491.5 * GIGABYTE_US
SOCKET_RATE: Final = 153.6 * GIGABYTE_US
NIC_RATE: Final = 8 * 50.0 * GIGABYTE_US

SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "host memory": "2 TiB a node: DGX H200, DGX BasePOD reference architecture",
        "host link": "37 GiB/s a GPU: published rate of row gathers over PCIe 5 (FlashTrans)",
        "node DRAM": "492 GB/s a node: two sockets of eight DDR5-4800 channels, four fifths of it",
        "socket link": "154 GB/s each way: four UPI links at 16 GT/s, four fifths of it",
        "NIC": "400 GB/s a node: eight ConnectX-7 of 400 Gbit/s, as in a DGX H200",
        "NUMA": "local: rows are taken to lie on the socket of their GPU",
    }
)
TRAY_SOURCES: Final[Mapping[str, str]] = MappingProxyType(
    {
        **SOURCES,
        "host memory": "960 GB a tray: two Grace CPUs of 480 GB, as in a GB200 NVL72",
        "host link": "140 GB/s a GPU: half of NVLink-C2C's 450 GB/s each way, and of it the share "
        "that gathers reach on PCIe 5",
        "node DRAM": "622 GB/s a tray: a GB200 NVL72 has 14 TB/s in 18 trays, four fifths of it",
        "socket link": "154 GB/s each way: taken as between two Xeons",
        "NIC": "200 GB/s a tray: four ConnectX-7 of 400 Gbit/s, as in a DGX GB200",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Rates are bytes per microsecond of the whole node, except `link_rate`, which is for one GPU
    and by default the machine's own."""

    gpu_count: int = 8
    host_bytes: int = NORMAL_HOST_BYTES
    link_rate: float | None = None
    dram_rate: float = DRAM_RATE
    numa: Numa = "local"
    socket_rate: float = SOCKET_RATE
    nic_rate: float = NIC_RATE

    def __post_init__(self) -> None:
        if self.gpu_count < 1 or self.host_bytes < 1:
            raise BadInput(
                f"a node of {self.gpu_count:,} GPUs and {self.host_bytes:,} bytes of host memory: "
                "both must be 1 or more"
            )
        rates = {
            "link": 1.0 if self.link_rate is None else self.link_rate,
            "DRAM": self.dram_rate,
            "socket": self.socket_rate,
            "NIC": self.nic_rate,
        }
        for name, rate in rates.items():
            if not 0.0 < rate < float("inf"):
                raise BadInput(f"a {name} rate of {rate / GIGABYTE_US:g} GB/s must be above 0")

    def host_bytes_of(self, gpus: int) -> int:
        """Host bytes for these GPUs over all nodes, at a full node's share for each GPU."""
        return self.host_bytes * gpus // self.neighbours(gpus)

    def neighbours(self, gpus: int) -> int:
        """How many GPUs of a deployment of `gpus` share one node."""
        return min(gpus, self.gpu_count)

    def fetch_limits(self, machine: Machine, *, gpus: int) -> dict[str, float]:
        """The bytes per microsecond that one GPU can fetch, by limiter."""
        sharing = self.neighbours(gpus)
        limits = {
            "host link": machine.link_rate if self.link_rate is None else self.link_rate,
            "node DRAM": self.dram_rate / sharing,
        }
        if self.numa == "interleaved":
            # Half of the rows that the GPUs of one socket fetch lie on the other socket.
            limits["socket link"] = 2 * self.socket_rate / -(-sharing // SOCKETS)
        return limits


TRAY: Final = Node(
    gpu_count=4,
    host_bytes=960 * 10**9,
    dram_rate=622.0 * GIGABYTE_US,
    nic_rate=4 * 50.0 * GIGABYTE_US,
)
"""A GB200 NVL72: four GPUs share memory and NICs in a tray; the NVLink of all 72 is the GPU's."""


def node_of(gpu: str) -> Node:
    """The node that a GPU comes in."""
    return TRAY if gpu == "gb200" else Node()


def sources_of(gpu: str) -> Mapping[str, str]:
    """Where the figures of that node come from."""
    return TRAY_SOURCES if node_of(gpu) == TRAY else SOURCES
