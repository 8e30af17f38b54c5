"""Measured tables of one GPU, each read at its first use."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Final

from ess.sim.operators import tables
from ess.sim.operators.derive import Entries, derive
from ess.sim.operators.silicon.stacks import BY_NAME, SGLANG, own_names, tables_of
from ess.sim.operators.tables import FOLDER, Curve, Exchange, Keyed, Surfaces, entries_of

EXPERTS: Final = 256
CHOSEN: Final = 8
FEW_TOKENS: Final = (8, 48)
FITTED_TOKENS: Final = 128
SHARING_MODEL: Final = "glm-5.2"


def _surface_table(name: str, *, keys: int) -> cached_property[Surfaces]:
    return cached_property(lambda bank: tables.surfaces(bank.read(name), keys=keys))


def _curve_table(name: str, *, keys: int) -> cached_property[Keyed]:
    return cached_property(lambda bank: tables.curves(bank.read(name), keys=keys))


@dataclass(frozen=True, kw_only=True)
class Bank:
    """`read` gives the entries of a table by name. Keys are columns in the order of the files.
    `lender` has SGLang's tables, if these are another stack's."""

    source: str
    read: Callable[[str], Entries]
    lender: Bank | None = None

    @cached_property
    def sparse_decode(self) -> Surfaces:
        """Surfaces over queries and context, by model, heads and form of a row. Layers that share a
        selection use SGLang's if a stack has none."""
        own = tables.surfaces(self.read("sparse_decode"), keys=3)
        if self.lender is None:
            return own
        lent = self.lender.sparse_decode.items()
        return own | {key: surface for key, surface in lent if key[0] == SHARING_MODEL}

    index_growth = _surface_table("index_growth", keys=1)
    """Surfaces over queries and context, by model."""

    dense_decode = _surface_table("dense_decode", keys=1)
    """Surfaces over queries and context, by heads."""

    dense_kernel = _surface_table("dense_kernel", keys=1)
    """As `dense_decode`, for the attention kernel alone."""

    sparse_prompt = _surface_table("sparse_prompt", keys=4)
    """Surfaces over tokens of each prompt and prefix, by model, heads, form and prompts at once."""

    dense_prompt = _surface_table("dense_prompt", keys=1)
    """Surfaces over tokens of each prompt and prompts at once, by heads."""

    wide_experts = _curve_table("wide_experts", keys=2)
    """Curves over tokens of all ranks, by ranks and balance."""

    wide_experts_prompt = _curve_table("wide_experts_prompt", keys=2)
    """As `wide_experts`, for prompt kernels."""

    reduce = _curve_table("reduce", keys=1)
    """Curves over bytes, by GPUs."""

    gather = _curve_table("gather", keys=2)
    """Curves over bytes, by verb and GPUs."""

    products = _curve_table("products", keys=3)
    """Curves over tokens, by form, columns and depth."""

    @cached_property
    def fused_experts(self) -> Keyed:
        """Curves over tokens of all ranks, by width, EP and TP."""
        curves = tables.curves(self.read("fused_experts"), keys=3)
        return {key: _by_touched(curve) for key, curve in curves.items()}

    @cached_property
    def exchange(self) -> Mapping[float, Exchange]:
        """The exchange by number of nodes; within a node at the width of DeepSeek."""
        near = [entry[1:] for entry in self.read("exchange_near") if entry[0] == 7168]
        return tables.exchanges(self.read("exchange_far"), near=near)

    @cached_property
    def bulk(self) -> Mapping[float, Exchange]:
        """The exchange of prompts, by number of nodes."""
        return tables.exchanges(self.read("bulk_far"), near=self.read("bulk_near"))


@cache
def shipped_bank(gpu: str, *, stack: str) -> Bank:
    """The tables that ship, read once. SGLang's fill a stack's gaps, an H200's those of B200
    between nodes."""
    own = own_names(stack, gpu)

    def read(name: str) -> Entries:
        if name in own:
            return entries_of(FOLDER / gpu / stack / f"{name}.csv", BY_NAME[name].columns)
        path = FOLDER / gpu / f"{name}.csv"
        far = FOLDER / ("h200" if gpu == "b200" else gpu) / path.name
        return entries_of(path if path.is_file() else far, BY_NAME[name].columns)

    lender = shipped_bank(gpu, stack=SGLANG) if stack != SGLANG else None
    return Bank(source=f"shipped {gpu} subset", read=read, lender=lender)


def package_bank(package: Path, *, gpu: str, system: str, stack: str = SGLANG) -> Bank:
    """The tables of a package; those that ship fill its gaps."""
    own = own_names(stack, gpu)
    chosen = {**BY_NAME, **{table.name: table for table in tables_of(stack) if table.name in own}}
    shipped = shipped_bank(gpu, stack=stack)

    def read(name: str) -> Entries:
        derived = derive(package, [chosen[name]], system=system)
        return derived[name] if derived else shipped.read(name)

    lender = package_bank(package, gpu=gpu, system=system) if stack != SGLANG else None
    return Bank(source=str(package), read=read, lender=lender)


def _by_touched(curve: Curve) -> Curve:
    """Few tokens take the time to read the experts that they touch, on a line through the
    measurements. The tables' loads are drawn and rounded to whole tokens: 8 to 16 of them touch up
    to a quarter more experts, 32 a tenth fewer, than tokens that choose 8 of 256 at random."""
    points = list(zip(curve.sizes, curve.times, strict=True))
    few = [(_touched(tokens), us) for tokens, us in points if tokens <= FITTED_TOKENS]
    least, most = FEW_TOKENS
    line = statistics.linear_regression([count for count, _ in few], [us for _, us in few])
    return Curve(
        curve.sizes,
        tuple(
            line.intercept + line.slope * _touched(tokens) if least <= tokens <= most else us
            for tokens, us in points
        ),
    )


def _touched(tokens: float) -> float:
    missed: float = (1 - CHOSEN / EXPERTS) ** tokens
    return EXPERTS * (1 - missed)
