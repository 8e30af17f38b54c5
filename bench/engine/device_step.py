"""The engine's decode steps on a device, for the benchmarks that run from a bare checkout.

The embedded model is small: its steps show the cost of launches, copies and the host, and that the
ways agree, not the gain of a large model.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ess.bench.engine.step import step_benchmark


def device_step_benchmark(*, smoke: bool) -> list[dict[str, Any]]:
    rows = step_benchmark(ctx="4k", batch="1,8", mtp="2", steps=16, device="cuda", smoke=smoke)
    return [msgspec.to_builtins(row) for row in rows]
