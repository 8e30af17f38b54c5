"""Published results of ESS (arXiv 2512.10576), as numbers to reproduce.

Throughput is per node of 8 GPUs. `throughput.csv` is Table 2 as printed; `unlimited.csv` (Fig. 1),
`overhead.csv` (Fig. 7), `layer_misses.csv` (Figs. 5 and 8) and `mean_misses.csv` (Fig. 9) were read
off the plots: one per cent on throughput, 4 us on overhead, 5 misses on a layer, 8 on a mean (10
beyond a ratio of 0.4). Misses are rows per request and layer in one step of two queries; a ratio is
slots over context. Two layers hidden in the plot at 128K have the mean of the others.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ess.cost import Exposed

FOLDER: Final = Path(__file__).resolve().parent
NODE_GPUS: Final = 8
OVERHEAD_READING_US: Final = 4.0
DEVICE_BYTES: Final = 80 << 30
"""The only memory budget in which every printed pair of batch and ratio fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """One row of Table 2; `ratio` is slots over context, 1 without offload."""

    queries_each: int
    accepted: float
    context: int
    tbo: bool
    batch: int
    ratio: float
    node_tokens_per_s: float

    @property
    def is_resident(self) -> bool:
        return self.ratio == 1.0

    @property
    def step_us(self) -> float:
        return step_us(self.batch, self.accepted, self.node_tokens_per_s)


def step_us(batch: int, accepted: float, node_tokens_per_s: float) -> float:
    return NODE_GPUS * batch * accepted / node_tokens_per_s * 1e6


def throughput() -> tuple[Throughput, ...]:
    return tuple(
        Throughput(
            queries_each=int(queries),
            accepted=accepted,
            context=int(context),
            tbo=bool(tbo),
            batch=int(batch),
            ratio=ratio,
            node_tokens_per_s=tokens,
        )
        for queries, accepted, context, tbo, batch, ratio, tokens in _rows("throughput.csv")
    )


def unlimited() -> dict[int, float]:
    """Tokens per second and node by batch: MTP 2, 32K, unlimited memory."""
    return {int(batch): tokens for batch, tokens in _rows("unlimited.csv")}


def overhead() -> dict[int, Exposed]:
    """Added microseconds a layer by misses per request: 128K, batch 160 in two halves, MTP 2."""
    return {int(miss): Exposed(none, da, dba) for miss, none, da, dba in _rows("overhead.csv")}


def mean_misses() -> dict[int, dict[float, float]]:
    """Mean misses over layers by context and slots over context, for two queries a step."""
    rows = list(_rows("mean_misses.csv"))
    return {
        int(context): {ratio: miss for at, ratio, miss in rows if at == context}
        for context in dict.fromkeys(row[0] for row in rows)
    }


def layer_misses() -> dict[tuple[int, float], tuple[float, ...]]:
    """Misses of every layer by context and slots over context, for two queries a step."""
    rows = list(_rows("layer_misses.csv"))
    return {
        (int(context), ratio): tuple(row[3] for row in rows if row[:2] == (context, ratio))
        for context, ratio in dict.fromkeys(row[:2] for row in rows)
    }


def _rows(name: str) -> list[tuple[float, ...]]:
    with (FOLDER / name).open(newline="") as lines:
        return [tuple(map(float, line)) for line in list(csv.reader(lines))[1:]]
