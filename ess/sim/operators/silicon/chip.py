"""GPUs that were measured, and GPUs that equal a measured one at stated ratios.

H800 and H20 are not in the package. An H800 is an H100 whose NVLink carries 400 GB/s instead of
900: its kernels take an H100's time, and what crosses NVLink takes longer by DeepEP's figures for
an H800 over the package's for an H100. An H20 has the H200's kind of memory at 4.0 TB/s (4.8) and
148 TFLOPS of bf16 (989): an operator takes its time on the H200 scaled by memory rate, and no less
than its operations at nine tenths of the H20's peak. Products reach only 77 % of an H200's peak in
the tables, limited by power and memory; an H20 has as much of both for a seventh of the operations.
Its node has four NICs of 400 Gbit/s where the others have eight (Ant Group, lmsys.org, 2025-09-26).

A GB200 is a B200 in a rack where 72 GPUs share an NVLink; two share a Grace CPU and its NVLink-C2C
of 450 GB/s each way. Of its 225 GB/s gathers are taken to reach the share that they reach on PCIe
5. Its memory is what nvidia-smi reports. The package has kernels measured on it: the median of a
table is 0.93 to 1.01 times a B200's time in steps, and 0.96 to 1.0 at 4,096 tokens of a prompt and
more, so a B200's stand in. Prompts of 512 tokens and fewer take 1.3 to 1.6 times as long there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.stages import Machine

PEAK_SHARE: Final = 0.9
C2C_RATE: Final = 140e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """`base` is the GPU whose tables are read. `by_memory` multiplies a measured time, unless
    operations at `bf16_rate` or `fp8_rate` take longer; `by_node` and `by_link` multiply exchanges
    within a node and between nodes. `nic_gpus` GPUs share a NIC; a measured GPU has one for itself.
    """

    base: str
    system: str
    machine: Machine
    bf16_rate: float
    by_memory: float = 1.0
    by_node: float = 1.0
    by_link: float = 1.0
    nic_gpus: int = 1
    marks: tuple[str, ...] = ()
    slack: float = 0.0

    @property
    def is_scaled(self) -> bool:
        return self.by_memory != 1.0

    def us(self, measured_us: float, *, fp8_flop: float = 0.0, bf16_flop: float = 0.0) -> float:
        """The operator's time here, given the base's time and its operations."""
        if not self.is_scaled:
            return measured_us
        flop_us = fp8_flop / self.machine.fp8_rate + bf16_flop / self.bf16_rate
        return max(measured_us * self.by_memory, flop_us / PEAK_SHARE)


TILE: Final = 64


def tiled(tokens: float) -> float:
    """The tokens that a product computes: a matrix instruction of a Hopper takes 64 at a time.

    >>> tiled(0.5), tiled(64), tiled(65)
    (64, 64, 128)
    """
    return math.ceil(tokens / TILE) * TILE


HOPPER: Final = 989e6
HOPPER_LAUNCH_US: Final = 2.4
"""The least time of any product in the tables inside a graph."""
H100: Final = Machine(
    memory_bytes=85_899_345_920, hbm_rate=0.8 * 3.35e6, launch_us=HOPPER_LAUNCH_US
)
B200: Final = Machine(
    memory_bytes=193_273_528_320,
    hbm_rate=0.8 * 8.0e6,
    fp8_rate=4500e6,
    sparse_rate=410e6 * 2250 / 989,
    launch_us=HOPPER_LAUNCH_US,
)
B200_SPARSE: Final = "the sparse kernel on B200: an H200's rate, scaled by peak operations"

CHIPS: Final[Mapping[str, Chip]] = MappingProxyType(
    {
        "h100": Chip(
            base="h100",
            system="h100_sxm",
            machine=H100,
            bf16_rate=HOPPER,
        ),
        "h200": Chip(
            base="h200",
            system="h200_sxm",
            machine=Machine(launch_us=HOPPER_LAUNCH_US),
            bf16_rate=HOPPER,
        ),
        "b200": Chip(
            base="b200",
            system="b200_sxm",
            machine=B200,
            bf16_rate=2250e6,
            marks=(B200_SPARSE, "the host link of B200: an H200's rate"),
            slack=0.05,
        ),
        "gb200": Chip(
            base="b200",
            system="b200_sxm",
            machine=replace(B200, memory_bytes=198_674_743_296, link_rate=C2C_RATE, linked_gpus=72),
            bf16_rate=2250e6,
            marks=(
                "GB200: a B200's kernels stand in",
                B200_SPARSE,
                "the host link of GB200: the share of its data sheet that gathers reach on PCIe 5",
            ),
            slack=0.05,
        ),
        "h800": Chip(
            base="h100",
            system="h100_sxm",
            machine=H100,
            bf16_rate=HOPPER,
            by_node=1.75,
            by_link=1.08,
            marks=("H800: an H100's kernels stand in; exchanges are scaled to what DeepEP prints",),
            slack=0.05,
        ),
        "h20": Chip(
            base="h200",
            system="h200_sxm",
            machine=Machine(
                memory_bytes=103_079_215_104,
                hbm_rate=0.8 * 4.0e6,
                fp8_rate=296e6,
                sparse_rate=PEAK_SHARE * 148e6,
                launch_us=HOPPER_LAUNCH_US,
            ),
            bf16_rate=148e6,
            by_memory=1.2,
            nic_gpus=2,
            marks=(
                "H20: an H200's kernels stand in, scaled by memory rate, and take no less than "
                "their operations at 9/10 of an H20's peak",
            ),
            slack=0.15,
        ),
    }
)


def chip_of(gpu: str) -> Chip:
    chip = CHIPS.get(gpu)
    if chip is None:
        raise BadInput(f"no operator tables for {gpu!r}; there are {', '.join(CHIPS)}")
    return chip
