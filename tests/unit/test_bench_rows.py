"""The row benchmark speaks the common form and compares what it says it compares."""

from __future__ import annotations

from ess.bench.kernels.rows import rows_benchmark

KEYS = {
    "name",
    "value",
    "unit",
    "baseline",
    "baseline_value",
    "ratio",
    "target",
    "met",
    "config",
    "samples",
}


def test_smoke() -> None:
    rows = rows_benchmark(smoke=True)
    assert all(set(row) == KEYS for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert {row["baseline"] for row in rows} >= {"memmove per row, Python loop", "one memcpy"}
    for row in rows:
        assert row["unit"] == "GB/s"
        assert len(row["samples"]) == 3
        assert sorted(row["samples"])[1] == row["value"] > 0
        assert row["ratio"] == row["value"] / row["baseline_value"]
        assert row["met"] is None, "smoke sizes prove nothing"
