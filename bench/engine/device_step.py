"""The engine's decode steps on a device, for the benchmarks that run from a bare checkout.

The embedded model is small: its steps show the cost of launches, copies and the host, and that the
ways agree, not the gain of a large model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ess.bench.engine.step import step_benchmark
from ess.bench.harness.report import Row


def device_step_benchmark(*, smoke: bool) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(row) for row in rows_of(steps=16, smoke=smoke)]


def device_step_kernels() -> None:
    rows_of(steps=1, smoke=False)


def rows_of(*, steps: int, smoke: bool) -> list[Row]:
    return step_benchmark(ctx="4k", batch="1,8", mtp="2", steps=steps, device="cuda", smoke=smoke)
