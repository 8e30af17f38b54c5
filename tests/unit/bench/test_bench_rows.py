"""The row benchmark compares what it says it compares."""

from __future__ import annotations

from ess.bench.kernels.rows import rows_benchmark


def test_smoke() -> None:
    rows = rows_benchmark(smoke=True)
    assert len({(row.name, row.baseline) for row in rows}) == len(rows)
    assert {row.baseline for row in rows} >= {"memmove per row, Python loop", "one memcpy"}
    for row in rows:
        assert row.unit == "GB/s"
        assert len(row.samples) == 3
        assert row.value > 0
        assert row.met is None, "smoke sizes prove nothing"
