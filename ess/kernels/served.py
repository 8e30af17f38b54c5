"""The names of the sets of ops, and which of them serve today. Needs no torch."""

from __future__ import annotations

from typing import Literal

from ess.errors import Unavailable

BackendName = Literal["reference", "cpu", "cuda"]


def refuse_cuda(name: str, value: str) -> None:
    """For engines. Pools, benchmarks and device tests do use a GPU."""
    if value.startswith("cuda"):
        raise Unavailable(
            f"{name} is {value!r}, but `ess serve` runs on the CPU today; CUDA kernels are compiled"
            " and tested on an emulator only"
        )
