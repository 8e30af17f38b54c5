"""Where the live policy starts: constants of a model on a machine, and misses per layer.

`ess-bench calibrate --out FILE` measures them. FILE is a benchmark document like any other; its
rows named `calibrate: ...` are read here. It says on which machine and of which layout it was
measured: another layout is refused. Without a file the policy starts from `DEFAULT`, the embedded
model's constants on two cores of an EPYC, or on a device from `DEVICE`, those of a layer of
DeepSeek-V3.2 on one H100 (bench/results/gpu-h100.json), and no misses: no layer is split until the
counters have seen misses. What a split costs is never measured later, so it matters that this is
the machine's: by a CPU's no split would ever pay on a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ess.cost import Calibration
from ess.decoding import UNDECODABLE
from ess.errors import BadInput, unreadable
from ess.layout import ModelLayout

PREFIX: Final = "calibrate: "
RATE: Final = "bytes_per_us"
MISSES: Final = "misses"
LAYOUT: Final = "layout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`misses` of every layer per request and step, by the context length they were met at."""

    constants: Calibration
    bytes_per_us: float
    misses: Mapping[int, tuple[float, ...]]
    machine: str = ""

    def misses_at(self, context: int, layer_count: int) -> tuple[float, ...]:
        """Misses at the calibrated context nearest in ratio; empty where nothing was calibrated.

        A file with the MTP layer, the last one, serves an engine without it.
        """
        assert layer_count > 0, f"a model of {layer_count} layers"
        if not self.misses:
            return (0.0,) * layer_count
        nearest = min(self.misses, key=lambda at: max(at, context) / max(1, min(at, context)))
        misses = self.misses[nearest]
        assert len(misses) >= layer_count, f"misses of {len(misses)} layers for {layer_count}"
        return misses[:layer_count]


DEFAULT: Final = Calibrated(
    constants=Calibration(
        pre_attn_fixed_us=120.0,
        pre_attn_query_us=3.0,
        attend_query_us=100.0,
        index_fixed_us=90.0,
        index_key_us=0.025,
        split_fixed_us=0.0,
        split_query_us=115.0,
        index_split_us=60.0,
    ),
    bytes_per_us=4400.0,
    misses={},
)
"""Constants of a CPU, used until a calibration is given."""

DEVICE: Final = Calibrated(
    constants=Calibration(
        pre_attn_fixed_us=30.0,
        pre_attn_query_us=0.1,
        attend_query_us=3.0,
        index_fixed_us=70.0,
        index_key_us=0.0002,
        split_fixed_us=35.0,
        split_query_us=0.43,
        index_split_us=100.0,
    ),
    bytes_per_us=40000.0,
    misses={},
)
"""Constants of an H100 (`bench/results/gpu-h100.json`), used until a calibration is given."""


class _Row(msgspec.Struct):
    name: str
    value: float
    config: dict[str, Any] = {}


class _Machine(msgspec.Struct):
    cpu: str
    cores: int


class _Document(msgspec.Struct):
    machine: _Machine
    rows: list[_Row]


def shape_of(layout: ModelLayout) -> dict[str, int]:
    """The dimensions that two layouts must share for one to run on the other's measurements."""
    return {
        "layers": layout.layer_count,
        "groups": layout.main_group_count,
        "heads": layout.head_count,
        "top_k": layout.top_k,
        "row_bytes": layout.row_bytes,
    }


def load(path: str | Path, layout: ModelLayout) -> Calibrated:
    """Reads the file, which must have been measured of this layout, with all of its layers."""
    try:
        document = msgspec.json.decode(Path(path).read_bytes(), type=_Document)
    except OSError as error:
        raise unreadable(f"calibration {path}", error) from None
    except UNDECODABLE as error:
        raise BadInput(
            f"calibration {path} is not a file of `ess-bench calibrate --out`: {error}"
        ) from None
    rows = document.rows
    values = {row.name.removeprefix(PREFIX): row.value for row in rows if PREFIX in row.name}
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise BadInput(f"calibration {path}: {name} is {value}, must be at least 0")
    names = [field.name for field in fields(Calibration)]
    missing = [name for name in (*names, RATE) if name not in values]
    if missing:
        raise BadInput(f"calibration {path} has no row {PREFIX + missing[0]!r}")
    if values[RATE] == 0:
        raise BadInput(f"calibration {path}: {RATE} is 0.0, must be above 0")
    [rate] = [row for row in rows if row.name == PREFIX + RATE][:1]
    _check_shape(path, rate.config.get(LAYOUT), layout)
    return Calibrated(
        constants=Calibration(**{name: values[name] for name in names}),
        bytes_per_us=values[RATE],
        misses=_misses(path, [row for row in rows if row.name == PREFIX + MISSES], layout),
        machine=f"{document.machine.cpu}, {document.machine.cores} cores",
    )


def _check_shape(path: str | Path, measured: Any, layout: ModelLayout) -> None:
    ours = shape_of(layout)
    if not isinstance(measured, dict):
        raise BadInput(f"calibration {path} does not say with which {LAYOUT} it was measured")
    if measured != ours:
        other = [
            f"{name} {measured.get(name)}, not {ours[name]}"
            for name in ours
            if measured.get(name) != ours[name]
        ]
        raise BadInput(
            f"calibration {path} was measured with another model: {'; '.join(other)}."
            " Measure this one with `ess-bench calibrate`"
        )


def _misses(
    path: str | Path, rows: list[_Row], layout: ModelLayout
) -> dict[int, tuple[float, ...]]:
    """Misses of all layers by context; there must be a row for each context and layer."""
    by_context: dict[int, tuple[float, ...]] = {}
    for row in rows:
        context, layer = row.config.get("context"), row.config.get("layer")
        so_far = by_context.get(context, ()) if isinstance(context, int) else ()
        if not isinstance(context, int) or layer != len(so_far):
            raise BadInput(f"calibration {path}: misses of context {context}, layer {layer}")
        by_context[context] = (*so_far, row.value)
    assert sum(map(len, by_context.values())) == len(rows), "a row of misses was lost"
    for context, misses in by_context.items():
        if len(misses) < layout.layer_total:
            raise BadInput(
                f"calibration {path} has {len(misses)} layers at context {context}, this model has"
                f" {layout.layer_total}"
            )
    return by_context
