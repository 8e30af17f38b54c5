"""The measured operators of a GPU, for a family."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ess.sim.operators.families import family_of
from ess.sim.operators.silicon.assembled import SiliconOperators
from ess.sim.operators.silicon.bank import package_bank, shipped_bank
from ess.sim.operators.silicon.chip import chip_of
from ess.sim.operators.silicon.stacks import SGLANG


def silicon_of(
    gpu: str,
    *,
    family: str,
    kv: str | None = None,
    package: Path | None = None,
    link_rate: float | None = None,
    stack: str = SGLANG,
) -> SiliconOperators:
    """Operators from the tables that ship, or from an unpacked package. Rows are in the form of the
    family's layout, unless `kv` says fp8 or bf16. `link_rate` is in bytes per microsecond, by
    default the machine's own. `stack` is the framework whose kernels were measured."""
    chip, known = chip_of(gpu), family_of(family)
    if link_rate is not None:
        chip = replace(chip, machine=replace(chip.machine, link_rate=link_rate))
    if package is None:
        bank = shipped_bank(chip.base, stack=stack)
    else:
        bank = package_bank(package, gpu=chip.base, system=chip.system, stack=stack)
    form = kv or ("fp8" if known.layout.row.form == "fp8" else "bf16")
    return SiliconOperators(bank=bank, chip=chip, family=known, kv=form, stack=stack)
