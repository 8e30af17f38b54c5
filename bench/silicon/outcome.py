"""Our prediction for a public row."""

from __future__ import annotations

from dataclasses import dataclass

from ess.sim.operators.silicon.chip import chip_of
from ess.sim.published.serving import Serving


@dataclass(frozen=True, slots=True)
class Outcome:
    """`ours` is in the unit of the row; None where no table covers it."""

    row: Serving
    ours: float | None
    band: tuple[float, float] = (0.0, 0.0)
    marks: tuple[str, ...] = ()

    @property
    def is_counted(self) -> bool:
        return self.ours is not None and self.row["use"] != "U" and self.row["kind"] != "ratio"

    @property
    def error(self) -> float:
        assert self.ours is not None, f"{self.row['row']}: no prediction, no error"
        return self.ours / self.row.number("value") - 1

    @property
    def is_old(self) -> bool:
        """Whether the software is a year older than that of the tables."""
        return self.row["date"].startswith("2025")

    @property
    def is_held_out(self) -> bool:
        """Whether nothing in the model was chosen with the row in view."""
        return self.row["seen"] == "no"

    @property
    def is_vllm(self) -> bool:
        return self.row["stack"] == "vllm"

    @property
    def is_decode(self) -> bool:
        return self.row["kind"] == "decode"

    @property
    def is_wide(self) -> bool:
        """Whether a network joins the GPUs, not NVLink alone."""
        machine = chip_of(self.row["gpu"]).machine
        return machine.groups_linked(self.row.parallel.stage_gpus) > 1
