"""Recorded selections of a real language model: 20 prompts of different kinds."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np

from ess.bench.locality.replay import JUDGED, MULTIPLES, recorded_rows
from ess.trace import TraceReader

RECORDINGS = sorted((Path(__file__).parents[1] / "golden" / "guest").glob("*.trace"))
PREFIX = "misses over MIN at "


def test_there_are_twenty_whole_ones_with_scores() -> None:
    assert len(RECORDINGS) == 20
    for path in RECORDINGS:
        with TraceReader(path) as reader:
            assert reader.header.scored
            assert (reader.header.group_count, reader.header.top_k, len(reader)) == (1, 64, 64)
    assert sum(path.stat().st_size for path in RECORDINGS) < 1 << 20


def test_every_policy_keeps_its_order_on_them() -> None:
    """MIN has the fewest misses of all; in a small pool score has fewer than LRU, in the mean."""
    over: dict[tuple[str, str], list[float]] = defaultdict(list)
    for path in RECORDINGS[::3]:
        for row in recorded_rows(path):
            if row.name.startswith(PREFIX):
                multiple, _, name = row.name.removeprefix(PREFIX).partition(" top-k, ")
                over[multiple, name].append(row.value)
    for multiple in MULTIPLES:
        means = {name: np.mean(over[f"{multiple:g}", name]) for name in JUDGED}
        assert min(means.values()) >= 1
        assert means["score"] < 1.03 * means["lru"], (multiple, means)
        assert multiple > 2 or means["score"] < means["lru"], (multiple, means)
