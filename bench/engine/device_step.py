"""The engine's decode steps on a device, for the benchmarks that run from a bare checkout.

The model in the box is small: its steps show what launches, copies and the host cost, and that the
ways agree, not what a large model gains.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ess.bench.engine.step import step_benchmark


def device_step_benchmark(*, smoke: bool) -> list[dict[str, Any]]:
    rows = step_benchmark(ctx="4k", batch="1,8", mtp="2", steps=16, device="cuda", smoke=smoke)
    return [msgspec.to_builtins(row) for row in rows]
