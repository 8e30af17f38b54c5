"""The constants of the simulator, fitted only to published rows without offload.

    python -m ess.sim.fit_constants

Rows: the three distinct ones of Table 2 at ratio 1, and Fig. 1 (unlimited memory) from batch 8 up,
all with equal weight. The root mean square of the relative error of the step time is minimised: two
constants by Gauss-Newton (the step is nearly linear in them), for every expert table and every
share of the index scan that further queries may repeat. All candidates are written beside the
tables, with the error of every row that took part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from ess.sim import published
from ess.sim.decode_step import Scenario, simulate
from ess.sim.operators.paper import FITTED_FILE, FittedConstants, PaperOperators, Tables

BATCH_MIN: Final = 8
UNLIMITED_ACCEPTED: Final = 1.7
UNLIMITED_CONTEXT: Final = 32_768
ROUNDS: Final = 2
BALANCES: Final = (
    "uniform",
    "power_law_0.6",
    "power_law_0.8",
    "power_law_1.01",
    "power_law_1.02",
    "power_law_1.2",
)
REPEATS: Final = (0.0, 0.25, 0.5)
FIRST: Final = (0.9, 14.0)
NUDGE: Final = 1e-2

Reals = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    scenario: Scenario
    step_us: float
    name: str


def targets() -> list[Target]:
    printed = {
        (row.queries_each, row.context): Target(
            scenario=Scenario(
                batch=row.batch, queries_each=row.queries_each, context=row.context, tbo=row.tbo
            ),
            step_us=row.step_us,
            name=f"table 2: batch {row.batch}, MTP {row.queries_each}, context {row.context}",
        )
        for row in published.throughput()
        if row.is_resident
    }
    return [*printed.values(), *_digitised()]


def _digitised() -> list[Target]:
    return [
        Target(
            scenario=Scenario(batch=batch, queries_each=2, context=UNLIMITED_CONTEXT),
            step_us=published.step_us(batch, UNLIMITED_ACCEPTED, tokens),
            name=f"fig. 1: batch {batch}",
        )
        for batch, tokens in published.unlimited().items()
        if batch >= BATCH_MIN
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    fitted: FittedConstants
    rms: float


def relative_errors(operators: PaperOperators, rows: Sequence[Target]) -> Reals:
    steps = [simulate(operators, row.scenario).step_us for row in rows]
    errors: Reals = np.array(steps) / np.array([row.step_us for row in rows]) - 1.0
    return errors


def fit(rows: Sequence[Target]) -> list[Candidate]:
    """Every candidate, best first."""
    measured = Tables.shipped()
    candidates = [
        _fit_two(measured, rows, balance=balance, repeat=repeat)
        for balance in BALANCES
        for repeat in REPEATS
    ]
    return sorted(candidates, key=lambda candidate: candidate.rms)


def _fit_two(measured: Tables, rows: Sequence[Target], *, balance: str, repeat: float) -> Candidate:
    def constants(point: Reals) -> FittedConstants:
        scale, fixed_ms = (round(float(value), 4) for value in point)
        return FittedConstants(
            compute_scale=scale,
            query_repeat=repeat,
            step_fixed_us=round(1e3 * fixed_ms, 1),
            balance=balance,
        )

    def errors(point: Reals) -> Reals:
        return relative_errors(PaperOperators(tables=measured, fitted=constants(point)), rows)

    point = np.array(FIRST)
    for _ in range(ROUNDS):
        base = errors(point)
        slope = np.stack([(errors(point + NUDGE * unit) - base) / NUDGE for unit in np.eye(2)], 1)
        point = point + np.linalg.lstsq(slope, -base, rcond=None)[0]
    rms = float(np.sqrt(np.mean(errors(point) ** 2)))
    return Candidate(fitted=constants(point), rms=round(rms, 5))


def main() -> None:
    rows = targets()
    candidates = fit(rows)
    best = candidates[0]
    errors = relative_errors(PaperOperators(fitted=best.fitted), rows)
    document = {
        "command": "python -m ess.sim.fit_constants",
        "constants": best.fitted,
        "rms": best.rms,
        "rows": {row.name: round(float(error), 4) for row, error in zip(rows, errors, strict=True)},
        "candidates": candidates,
    }
    FITTED_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    for row, error in zip(rows, errors, strict=True):
        print(f"{error:+8.2%}  {row.name}")
    print(f"{best.rms:8.2%}  root mean square; {best.fitted}")


if __name__ == "__main__":
    main()
