"""GPUs with operator tables: the pinned package measured every operator that we use on them.

H100 and H200 are one chip with different memory, so constants fitted for the H200 hold for both as
far as they concern kernels; no publication allows fitting them for the H100. Blackwell is not
included: its shared expert was not measured, and no rate of the sparse kernel is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from ess.errors import BadInput
from ess.sim.operators import tables
from ess.sim.operators.families import family_of
from ess.sim.operators.paper import FittedConstants, PaperOperators
from ess.sim.operators.silicon.assembled import SiliconOperators
from ess.sim.operators.silicon.bank import package_bank, shipped_bank
from ess.sim.operators.silicon.chip import chip_of
from ess.sim.operators.silicon.stacks import SGLANG
from ess.sim.operators.stages import Machine, Operators

MODELS: Final = ("deepseek-v3.2",)
Constants = Literal["silicon", "paper"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """`system` is the package's name for the GPU."""

    system: str
    machine: Machine


GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "h100": Gpu(
            system="h100_sxm",
            machine=Machine(memory_bytes=85_899_345_920, hbm_rate=0.8 * 3.35e6),
        ),
        "h200": Gpu(system="h200_sxm", machine=Machine()),
    }
)


def check_planned(model: str, gpu: str) -> None:
    if model not in MODELS or gpu not in GPUS:
        raise BadInput(
            f"no operator tables for {model!r} on {gpu!r}; "
            f"there are {', '.join(MODELS)} on {', '.join(GPUS)}"
        )


def operators_of(
    gpu: str,
    *,
    family: str = MODELS[0],
    constants: Constants = "silicon",
    package: Path | None = None,
    link_rate: float | None = None,
    stack: str = SGLANG,
) -> Operators:
    """Operators from the tables that ship, or from an unpacked package. `link_rate` is in bytes per
    microsecond, by default the machine's own. `stack` is the framework whose kernels were measured;
    the paper's constants have no such choice."""
    if constants == "silicon":
        return silicon_of(gpu, family=family, package=package, link_rate=link_rate, stack=stack)
    check_planned(family, gpu)
    known = GPUS[gpu]
    machine = known.machine if link_rate is None else replace(known.machine, link_rate=link_rate)
    return PaperOperators(
        tables=tables.load(package, gpu=gpu, system=known.system),
        fitted=FittedConstants.shipped(),
        machine=machine,
    )


def silicon_of(
    gpu: str,
    *,
    family: str,
    kv: str | None = None,
    package: Path | None = None,
    link_rate: float | None = None,
    stack: str = SGLANG,
) -> SiliconOperators:
    """Operators; rows are in the form of the family's layout, unless `kv` says fp8 or bf16."""
    chip, known = chip_of(gpu), family_of(family)
    if link_rate is not None:
        chip = replace(chip, machine=replace(chip.machine, link_rate=link_rate))
    if package is None:
        bank = shipped_bank(chip.base, stack=stack)
    else:
        bank = package_bank(package, gpu=chip.base, system=chip.system, stack=stack)
    form = kv or ("fp8" if known.layout.row.form == "fp8" else "bf16")
    return SiliconOperators(bank=bank, chip=chip, family=known, kv=form, stack=stack)
