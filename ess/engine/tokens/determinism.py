"""Determinism: what it asks of a configuration and of the kernels. Needs no torch, so a server can
refuse before anything is loaded.

The same rows in the same order are the same bits, whatever else is in the batch: attention, the
indexer and the compiled stages keep that promise. What breaks it is a merge of two partials whose
cut follows residency (DA, DBA), and torch's products, whose rounding follows the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ess.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from ess.kernels.ops import Ops


def check_deterministic(modes: str | Sequence[str], **others: str | int) -> None:
    """`others` are the options that must be off."""
    if modes not in ("layerwise", "none"):
        raise BadInput(f"deterministic runs every layer as NONE, but modes is {modes!r}")
    for name, value in others.items():
        if value != "off":
            raise BadInput(f"deterministic needs {name} off, but it is {value!r}")


def require_alike(ops: Ops, backend: str) -> None:
    if not ops.has_stages():
        raise Unavailable(
            f"deterministic needs compiled stages, which backend {backend!r} lacks here: "
            f"{ops.implementation()}"
        )
