"""Determinism: what it asks of a configuration and of the kernels. Needs no torch, so a server can
refuse before anything is loaded.

The same rows in the same order are the same bits, whatever else is in the batch: attention, the
indexer and the compiled stages keep that promise. What breaks it is a merge of two partials whose
cut follows residency (DA, DBA), and torch's products, whose rounding follows the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ess.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from ess.kernels.ops import Ops

FEW: Final = (4, 8)


def check_deterministic(modes: str | Sequence[str], **others: str | int) -> None:
    """`others` are the options that must be off."""
    if modes not in ("layerwise", "none"):
        raise BadInput(f"deterministic runs every layer as NONE, but modes is {modes!r}")
    for name, value in others.items():
        if value != "off":
            raise BadInput(f"deterministic needs {name} off, but it is {value!r}")


def check_heads(size: int, *, head_count: int, deterministic: bool) -> None:
    """Refuses a `tp_size`. Compiled attention sums a head's products in an order that depends on
    whether the call has up to 4 heads, up to 8, or more: a split that crosses one of these bounds
    changes bits."""
    if head_count % size:
        raise BadInput(f"tp_size is {size}: {head_count} heads cannot be shared equally")
    own_count = head_count // size
    if deterministic and _order_of(own_count) != _order_of(head_count):
        raise BadInput(
            f"tp_size is {size}: a rank's {own_count} of {head_count} heads round otherwise than "
            f"all; a deterministic engine needs more than {FEW[-1]} heads a rank or a smaller"
            " tp_size, or in a prefill worker cp_size"
        )


def _order_of(head_count: int) -> int:
    return sum(head_count > few for few in FEW)


def require_alike(ops: Ops, backend: str) -> None:
    if not ops.has_stages():
        raise Unavailable(
            f"deterministic needs compiled stages, which backend {backend!r} lacks here: "
            f"{ops.implementation()}"
        )
