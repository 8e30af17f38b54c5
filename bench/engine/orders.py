"""The cost of a step in halves (TBO) and of other expert orders (SBO) on a single rank.

Decode steps of the embedded model under DA, timed by the compute thread's run time. On one rank
nothing is dispatched, and a CPU's batch is too small to keep two halves busy: this is the cost that
TBO and SBO must make up for elsewhere.
"""

from __future__ import annotations

import time
from typing import Final

from ess.bench.engine.calibrate import SETTLE_STEPS, settled_engine
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.models.load import load_model
from ess.models.model import Model
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo

CONTEXT: Final = 512
STEPS: Final = 20
ORDERS: Final[tuple[tuple[Tbo, Sbo], ...]] = (
    ("on", "off"),
    ("off", "combine-down"),
    ("off", "combine-shared"),
    ("off", "dispatch-shared"),
)


@compute_threads()
def orders_benchmark(*, smoke: bool = False) -> list[Row]:
    model, batch, steps = load_model(), 2 if smoke else 8, 3 if smoke else STEPS
    whole = step_ms(model, batch, steps, tbo="off", sbo="off")
    return [
        compare(
            name=f"step: tbo {tbo}, sbo {sbo}",
            unit="ms",
            ours=step_ms(model, batch, steps, tbo=tbo, sbo=sbo),
            baseline=("whole, sbo off", whole),
            config={"batch": batch, "context": CONTEXT, "modes": "da"},
        )
        for tbo, sbo in ORDERS
    ]


def step_ms(model: Model, batch: int, steps: int, *, tbo: Tbo, sbo: Sbo) -> list[float]:
    made = settled_engine(
        model, context=CONTEXT, batch=batch, steps=steps, modes="da", tbo=tbo, sbo=sbo
    )
    samples = []
    for at in range(SETTLE_STEPS + steps):
        started_s = time.thread_time()
        made.step()
        if at >= SETTLE_STEPS:
            samples.append((time.thread_time() - started_s) * 1e3)
    made.offload.close()
    return samples
