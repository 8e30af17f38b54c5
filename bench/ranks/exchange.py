"""`ess-bench comm`: what ranks that divide a model send, and how long they wait for it.

Two ranks run the embedded model, a thread each; ranks that divide experts use a line of a stated
latency and bandwidth.

    volume    bytes per token and layer, beside the formula: for divided heads, tokens and layers
              (`volumes`), and for experts that are chosen evenly
    balance   the average work of a rank over the busiest rank's, where some experts are chosen
              more often: placed by load, and with copies, against contiguous runs
    exposed   milliseconds of a step in which a rank only waits for the line: with TBO, with each
              order of SBO and with both, against neither in the same run
    pool      MiB of a host pool that two processes of one engine share
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Final

from ess.bench.engine import orders
from ess.bench.engine.calibrate import SETTLE_STEPS, settled_engine
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.bench.ranks.line import LateTeam, Line
from ess.bench.ranks.members import member_rows
from ess.bench.ranks.together import together
from ess.bench.ranks.volumes import embedded_config, volume_rows
from ess.comm.experts.balance import balance, balanced
from ess.comm.experts.expert_ranks import ExpertRanks, Traffic
from ess.comm.experts.placement import even
from ess.comm.group import Group
from ess.comm.local import local_group
from ess.engine.ranks.agreement import Many
from ess.models.config import ModelConfig
from ess.models.load import load_model
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo

RANKS: Final = 2
CONTEXT: Final = 256
BATCH: Final = 8
STEPS: Final = 12
LATENCY_S: Final = 500e-6
BYTES_PER_S: Final = 200e6
MANY: Final = 32
EXPERTS: Final = 256
LAYERS: Final = 58
STEEPNESS: Final = 0.5
"""Zipf's exponent in the balance rows: the busiest expert has 8 times the mean choices."""
LEAST_MS: Final = 1e-3
"""The least time, as a ratio to 0 is undefined."""

ORDERS: Final[tuple[tuple[Tbo, Sbo], ...]] = (
    *orders.ORDERS,
    ("on", "combine-shared"),
    ("on", "dispatch-shared"),
)


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """One rank's figures: for each step the milliseconds in which it only waited for the line; over
    all of them the bytes that it sent, by token and layer."""

    exposed_ms: list[float]
    out_bytes: float
    back_bytes: float


@compute_threads()
def comm_benchmark(*, smoke: bool = False) -> list[Row]:
    steps, batch = (2, 2) if smoke else (STEPS, BATCH)
    serial = decoded(batch, steps, tbo="off", sbo="off")
    rows = [*volume_rows(), *volumes(serial, embedded_config()), *balance_rows()]
    baseline = exposed(serial)
    line = {"latency_us": LATENCY_S * 1e6, "bytes_per_us": BYTES_PER_S / 1e6}
    for tbo, sbo in ORDERS[:2] if smoke else ORDERS:
        rows.append(
            compare(
                name=f"exposed: tbo {tbo}, sbo {sbo}",
                unit="ms",
                ours=exposed(decoded(batch, steps, tbo=tbo, sbo=sbo)),
                baseline=("tbo off, sbo off", baseline),
                config={"ranks": RANKS, "batch": batch, "context": CONTEXT, **line},
            )
        )
    return [*rows, *member_rows(smoke=smoke)]


def exposed(ranks: list[DecodeFigures]) -> list[float]:
    """For each step, the time of the rank which waited longest."""
    each = zip(*(rank.exposed_ms for rank in ranks), strict=True)
    return [max(LEAST_MS, *ms) for ms in each]


def balance_rows() -> list[Row]:
    """Balance with as many ranks and experts as DeepSeek has; each layer has its own favourites."""
    layers = [favourites(seed) for seed in range(LAYERS)]
    plain = [balance(even(EXPERTS, MANY).places, loads) for loads in layers]
    return [
        compare(
            name=f"balance: {how}",
            unit="mean/max",
            ours=[balance(balanced(loads, MANY, copies), loads) for loads in layers],
            baseline=("contiguous runs", plain),
            better="higher",
            config={"ranks": MANY, "experts": EXPERTS, "copies": copies, "zipf": STEEPNESS},
        )
        for how, copies in (("placed by load", 0), ("placed by load, with copies", MANY))
    ]


def favourites(seed: int) -> list[float]:
    """How often each expert is chosen, by Zipf's law in random order."""
    loads = [1e6 / (1 + at) ** STEEPNESS for at in range(EXPERTS)]
    random.Random(seed).shuffle(loads)
    return loads


def volumes(ranks: list[DecodeFigures], config: ModelConfig) -> list[Row]:
    out, back = even_bytes(config, RANKS)
    return [
        compare(
            name=f"volume: {name}",
            unit="B/token/layer",
            ours=[getattr(rank, field) for rank in ranks],
            baseline=("experts chosen evenly", [formula]),
            config={"ranks": RANKS, "experts": config.expert_count},
        )
        for name, field, formula in (
            ("tokens out", "out_bytes", out),
            ("made by experts, back", "back_bytes", back),
        )
    ]


def even_bytes(config: ModelConfig, ranks: int) -> tuple[float, float]:
    """A token sends a line in bfloat16, and 2 bytes for each choice, to each other rank that has
    one of its experts; it gets back a line for each of its experts on other ranks."""
    total, chosen = config.expert_count, config.experts_per_token
    missed = math.comb(total - total // ranks, chosen) / math.comb(total, chosen)
    line = 2 * config.hidden_dim
    reached = (ranks - 1) * (1 - missed)
    return reached * (line + 2 * chosen), chosen * (ranks - 1) / ranks * line


def decoded(batch: int, steps: int, *, tbo: Tbo, sbo: Sbo) -> list[DecodeFigures]:
    line = Line(LATENCY_S, BYTES_PER_S)
    return together(
        local_group(RANKS, team=RANKS),
        lambda group: decode(group, line, batch, steps, tbo=tbo, sbo=sbo),
    )


def decode(
    group: Group, line: Line, batch: int, steps: int, *, tbo: Tbo, sbo: Sbo
) -> DecodeFigures:
    team = LateTeam(group.team, line)
    expert_ranks = ExpertRanks(team, even(embedded_config().expert_count, group.size))
    model = load_model(expert_ranks=expert_ranks)
    engine = settled_engine(
        model,
        context=CONTEXT,
        batch=batch,
        steps=steps,
        modes="none",
        tbo=tbo,
        sbo=sbo,
        ranks=Many(expert_ranks, on_meet=group.advance),
    )
    exposed_ms = []
    for at in range(SETTLE_STEPS + steps):
        before_s = team.exposed_s
        if at == SETTLE_STEPS:
            expert_ranks.traffic = Traffic()
        engine.step()
        if at >= SETTLE_STEPS:
            exposed_ms.append((team.exposed_s - before_s) * 1e3)
    sent = expert_ranks.traffic
    seen = DecodeFigures(
        exposed_ms, sent.out_bytes / sent.token_count, sent.back_bytes / sent.token_count
    )
    engine.close()
    engine.offload.close()
    return seen
