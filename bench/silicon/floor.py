"""What error a perfect model would have: how far apart measurements of the same are.

A model gives one figure for one set of stated conditions. Where two measurements under these
conditions differ by a factor r, the best figure is off by (r - 1) / (r + 1) from both.

A model may also be right but for a factor that a source does not state: its site, its software. So
the last row shows what is left of our errors if all rows of a source share a factor: each row is
compared with the mean of the other rows of its source, so that no row corrects itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from ess.bench.harness.report import Row
from ess.bench.silicon.outcome import Outcome
from ess.sim.published.serving import Repeat, repeats


def floor_rows(counted: Sequence[Outcome]) -> list[Row]:
    pairs = repeats()
    kinds = dict.fromkeys(pair.apart for pair in pairs)
    return [
        *(_floor(kind, [pair for pair in pairs if pair.apart == kind]) for kind in kinds),
        _within_sources(counted),
    ]


def _floor(kind: str, pairs: Sequence[Repeat]) -> Row:
    errors = sorted(pair.least_error for pair in pairs)
    return Row(
        name=f"least error of any model, {kind} apart",
        value=statistics.median(errors),
        unit="of 1",
        config={"pairs": len(errors), "each": " ".join(f"{error:.1%}" for error in errors)},
    )


def _within_sources(counted: Sequence[Outcome]) -> Row:
    def source(outcome: Outcome) -> str:
        return outcome.row["source"]

    left: list[float] = []
    for _, rows in groupby(sorted(counted, key=source), key=source):
        logs = [math.log1p(outcome.error) for outcome in rows]
        if len(logs) > 1:
            total = math.fsum(logs)
            left += [abs(mine - (total - mine) / (len(logs) - 1)) for mine in logs]
    return Row(
        name="middle error, within sources",
        value=math.expm1(statistics.median(left)),
        unit="of 1",
        config={"rows": len(left)},
    )
