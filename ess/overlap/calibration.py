"""Where the live policy starts: constants of one model on one machine, and misses per layer.

`ess-bench calibrate --out FILE` measures them; FILE is a benchmark document like any other, and its
rows named `calibrate: ...` are what is read here. Without a file the policy starts from `DEFAULT`,
the embedded model's constants on two cores of an EPYC, and no misses: so no layer is split until
the counters have seen some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ess.cost import Calibration
from ess.errors import BadInput

PREFIX: Final = "calibrate: "
RATE: Final = "bytes_per_us"
MISSES: Final = "misses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """`misses` of every layer per request and step, by the context length they were met at."""

    constants: Calibration
    bytes_per_us: float
    misses: Mapping[int, tuple[float, ...]]

    def misses_at(self, context: int, layer_count: int) -> tuple[float, ...]:
        """At the calibrated context nearest in ratio; none where nothing was calibrated.

        A file with the MTP layer, the last one, serves an engine without it.
        """
        if not self.misses:
            return (0.0,) * layer_count
        nearest = min(self.misses, key=lambda at: max(at, context) / max(1, min(at, context)))
        found = self.misses[nearest]
        if len(found) < layer_count:
            raise BadInput(f"calibrated for {len(found)} layers, this model has {layer_count}")
        return found[:layer_count]


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


class _Row(msgspec.Struct):
    name: str
    value: float
    config: dict[str, Any] = {}


class _Document(msgspec.Struct):
    rows: list[_Row]


def load(path: str | Path) -> Calibrated:
    try:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=_Document).rows
    except (OSError, msgspec.DecodeError) as error:
        raise BadInput(f"calibration {path}: {error}") from None
    values = {row.name.removeprefix(PREFIX): row.value for row in rows if PREFIX in row.name}
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise BadInput(f"calibration {path}: {name} is {value}, must be at least 0")
    names = [one.name for one in fields(Calibration)]
    missing = [name for name in (*names, RATE) if name not in values]
    if missing:
        raise BadInput(f"calibration {path} has no row {PREFIX + missing[0]!r}")
    if values[RATE] == 0:
        raise BadInput(f"calibration {path}: {RATE} is 0.0, must be above 0")
    return Calibrated(
        constants=Calibration(**{name: values[name] for name in names}),
        bytes_per_us=values[RATE],
        misses=_misses(path, [row for row in rows if row.name == PREFIX + MISSES]),
    )


def _misses(path: str | Path, rows: list[_Row]) -> dict[int, tuple[float, ...]]:
    """One row per context and layer, layers ascending from 0."""
    found: dict[int, tuple[float, ...]] = {}
    for row in rows:
        context, layer = row.config.get("context"), row.config.get("layer")
        so_far = found.get(context, ()) if isinstance(context, int) else ()
        if not isinstance(context, int) or layer != len(so_far):
            raise BadInput(f"calibration {path}: misses of context {context}, layer {layer}")
        found[context] = (*so_far, row.value)
    return found
