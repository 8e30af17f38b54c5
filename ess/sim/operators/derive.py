"""Operator tables, derived from the package they come from; here those of the paper's constants.

    python -m ess.sim.operators.derive PACKAGE_FOLDER SYSTEM OUT_FOLDER

PACKAGE_FOLDER is an unpacked `aiconfigurator-core` (pinned in NOTICE); pyarrow must be installed.
SYSTEM is the package's name of a GPU: h200_sxm.
Rows are selected and renamed, times become microseconds, and nothing else is computed: the same
function serves `--perf-db`, so a larger or newer package can be used without committing it.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ess.errors import BadInput, Unavailable

Source = Mapping[str, Any]
Entries = list[tuple[float | str, ...]]
Entry = Callable[[Source], tuple[float | str, ...]]
Part = str | Callable[[Source], float | str]
"""A column of the package, or a function of its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """One table: which rows of which file, under which names, sorted by their keys."""

    name: str
    path: str
    columns: tuple[str, ...]
    keep: Callable[[Source], bool]
    entry: Entry
    is_optional: bool = False


def in_us(milliseconds: float) -> float:
    return round(1e3 * milliseconds, 1)


def timed(*parts: Part) -> Entry:
    """An entry of a row's key parts, then its time."""
    return lambda row: (*_cells(row, parts), in_us(row["latency"]))


def exchanged(*parts: Part, dispatch: str, combine: str) -> Entry:
    """An entry of a row's key parts, then its two times, which are in microseconds already."""
    return lambda row: (*_cells(row, parts), round(row[dispatch], 1), round(row[combine], 1))


def _cells(row: Source, parts: Sequence[Part]) -> list[float | str]:
    return [row[part] if isinstance(part, str) else part(row) for part in parts]


GEMM_SHAPES: Final = {(7168, 16384), (16384, 1536), (8192, 1536), (2048, 7168), (65536, 7168)}
GEMM_TOKENS_MAX: Final = 4097

DERIVATIONS: Final = (
    Derivation(
        name="experts",
        path="moe/sglang/0.5.10/wideep_generation_moe_perf.parquet",
        columns=("ranks", "balance", "group_tokens", "us"),
        keep=lambda row: True,
        entry=timed("moe_ep_size", "distribution", "num_tokens"),
    ),
    Derivation(
        name="exchange",
        path="comm/sglang/0.5.6.post2/wideep_deepep_ll_perf.parquet",
        columns=("nodes", "tokens", "dispatch_us", "combine_us"),
        keep=lambda row: row["num_experts"] == 256,
        entry=exchanged(
            "node_num", "num_token", dispatch="dispatch_avg_t_us", combine="combine_avg_t_us"
        ),
    ),
    Derivation(
        name="shared",
        path="mlp/sglang/0.5.6.post2/wideep_generation_mlp_perf.parquet",
        columns=("tokens", "us"),
        keep=lambda row: row["num_token"] <= 4096,
        entry=lambda row: (row["num_token"], in_us(row["avg_ms"])),
    ),
    Derivation(
        name="gemm",
        path="gemm/sglang/0.5.14/gemm_perf.parquet",
        columns=("n", "k", "tokens", "us"),
        keep=lambda row: (
            row["gemm_dtype"] == "fp8_block"
            and (row["n"], row["k"]) in GEMM_SHAPES
            and row["m"] <= GEMM_TOKENS_MAX
        ),
        entry=timed("n", "k", "m"),
    ),
    Derivation(
        name="absorb",
        path="mla_bmm/sglang/0.5.14/mla_bmm_perf.parquet",
        columns=("side", "tokens", "us"),
        keep=lambda row: row["num_heads"] == 128 and row["bmm_dtype"] == "bfloat16",
        entry=timed(lambda row: row["op_name"].removeprefix("mla_gen_"), "num_tokens"),
    ),
)


def derive(package: Path, derivations: Sequence[Derivation], *, system: str) -> dict[str, Entries]:
    """The tables of an unpacked package; a missing file is named, unless its table may be
    missing."""
    root = package / "aiconfigurator_core/systems/data" / system
    if not root.is_dir():
        raise BadInput(
            f"{package}: no folder {root.relative_to(package)}; unpack the package there"
        )
    return {
        derivation.name: _entries(derivation, root / derivation.path)
        for derivation in derivations
        if not derivation.is_optional or (root / derivation.path).is_file()
    }


def _entries(derivation: Derivation, path: Path) -> Entries:
    kept = sorted({derivation.entry(row) for row in _read(path) if derivation.keep(row)})
    if not kept:
        raise BadInput(f"{path.name}: no row is left for the table {derivation.name!r}")
    return kept


def _read(path: Path) -> Iterable[Source]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise Unavailable("reading a full package needs pyarrow; install it first") from None
    if not path.is_file():
        raise BadInput(f"{path}: no such file in this package")
    rows: Iterable[Source] = parquet.read_table(path).to_pylist()
    return rows


def write(package: Path, derivations: Sequence[Derivation], *, system: str, folder: Path) -> None:
    """Writes the derived tables into the folder, a file for each."""
    tables = derive(package, derivations, system=system)
    for derivation in derivations:
        if derivation.name not in tables:
            continue
        with (folder / f"{derivation.name}.csv").open("w", newline="") as out:
            writer = csv.writer(out, lineterminator="\n")
            writer.writerow(derivation.columns)
            writer.writerows(tables[derivation.name])


def main(arguments: list[str], derivations: Sequence[Derivation] = DERIVATIONS) -> None:
    if len(arguments) != 3:
        raise BadInput("give the unpacked package, the GPU's name in it and the folder to write to")
    package, system, folder = arguments
    write(Path(package), derivations, system=system, folder=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
