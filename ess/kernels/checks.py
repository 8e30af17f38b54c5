"""The door of the kernels: shapes and types, checked once, for NumPy and torch alike.

Behind it kernels trust. What needs a look at the values themselves (ids in range) is checked where
the values are on the host anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, Protocol

from ess.errors import BadInput
from ess.layout import SCALE_GROUP, IndexCodec, RowCodec
from ess.units import div_ceil

PLAIN: Final = ("float32", "uint16", "torch.float32", "torch.bfloat16")
BYTES: Final = ("uint8", "torch.uint8")
SINGLE: Final = ("float32", "torch.float32")
COUNTS: Final = ("int32", "int64", "torch.int32", "torch.int64")
FLOATS: Final = ("torch.float32", "torch.bfloat16")
CODED: Final = "torch.float8_e4m3fn"
QUERIES: Final = (*PLAIN, "torch.float64", CODED)


class Shaped(Protocol):
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> Any: ...


def require(name: str, array: Shaped, shape: Sequence[int | None], dtypes: Sequence[str]) -> None:
    """`None` in the shape is any size."""
    if not fits(array.shape, shape):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise BadInput(f"{name} has shape {tuple(array.shape)}, must be ({sizes})")
    if _name(array.dtype) not in dtypes:
        raise BadInput(f"{name} has type {array.dtype}, must be one of {', '.join(dtypes)}")


def fits(got: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(got) != len(wanted):
        return False
    for size, want in zip(got, wanted, strict=True):  # a generator would take twice as long
        if want is not None and size != want:
            return False
    return True


@functools.cache
def _name(dtype: Any) -> str:
    """NumPy takes microseconds to spell one."""
    return str(dtype)


def require_ids(name: str, least: int, greatest: int, *, low: int, limit: int) -> None:
    """Ids whose least and greatest are given lie in low..limit-1."""
    if least < low or greatest >= limit:
        raise BadInput(f"{name} holds {least}..{greatest}, outside {low}..{limit - 1}")


def check_rows(values: Shaped, codec: RowCodec, rows: Shaped) -> None:
    if codec.form == "opaque":
        raise BadInput("an opaque row is read and written by its owner only")
    require("rows", rows, (None, codec.row_bytes), BYTES)
    require("values", values, (rows.shape[0], codec.latent_dim + codec.rope_dim), PLAIN)


def check_keys(values: Shaped, scales: Shaped, row_ids: Shaped, codec: IndexCodec) -> None:
    require("row_ids", row_ids, (None,), COUNTS)
    require("keys.values", values, (row_ids.shape[0], codec.value_bytes), BYTES)
    require("keys.scales", scales, (row_ids.shape[0],), SINGLE)


def check_pages(pages: Shaped, codec: IndexCodec) -> None:
    require("pages", pages, (None, codec.page_bytes), BYTES)


def check_attention(queries: Shaped, rows: Shaped, slots: Shaped, latent_dim: int) -> None:
    require("rows", rows, (None, None), (*PLAIN, "torch.float64"))
    require("queries", queries, (None, None, rows.shape[1]), QUERIES)
    require("slots", slots, (queries.shape[0], None), COUNTS)
    if not 0 < latent_dim <= rows.shape[1]:
        raise BadInput(f"latent_dim {latent_dim} is outside 1..{rows.shape[1]}")


def check_attend(
    queries: Shaped,
    rows: Shaped,
    slots: Shaped,
    codec: RowCodec,
    placed: Shaped | None,
    into: tuple[Shaped, Shaped] | None,
) -> None:
    if codec.form == "opaque":
        raise BadInput("an opaque row is attended by its owner only")
    require("rows", rows, (None, codec.row_bytes), BYTES)
    if placed is not None:
        require("placed", placed, (None, codec.row_bytes), BYTES)
    require("queries", queries, (None, None, codec.latent_dim + codec.rope_dim), QUERIES)
    count, heads = queries.shape[0], queries.shape[1]
    require("slots", slots, (count, None), COUNTS)
    if into is not None:
        require("into.out", into[0], (count, heads, codec.latent_dim), SINGLE)
        require("into.lse", into[1], (count, heads), SINGLE)


def check_top_k(logits: Shaped, lengths: Shaped, k: int) -> None:
    require("logits", logits, (None, None), SINGLE)
    require("lengths", lengths, (logits.shape[0],), COUNTS)
    if k < 1:
        raise BadInput(f"k is {k}, must be positive")


def check_index(
    queries: Shaped, weights: Shaped, page_table: Shaped, lengths: Shaped, codec: IndexCodec
) -> None:
    require("queries", queries, (None, None, codec.key_dim), QUERIES)
    count, heads = queries.shape[0], queries.shape[1]
    require("weights", weights, (count, heads), SINGLE)
    require("page_table", page_table, (count, None), COUNTS)
    require("lengths", lengths, (count,), COUNTS)


def check_products(
    tokens: Shaped, ends: Shaped, weights: Shaped, scales: Shaped | None, out: Shaped | None
) -> None:
    require("tokens", tokens, (None, None), FLOATS)
    require("weights", weights, (None, None, tokens.shape[1]), (*FLOATS, CODED))
    experts, width, depth = weights.shape
    if not depth:
        raise BadInput(f"tokens of shape {tuple(tokens.shape)} have no depth")
    require("ends", ends, (experts,), ("torch.int32",))
    if out is not None:
        require("out", out, (tokens.shape[0], width), FLOATS)
    if (_name(weights.dtype) == CODED) != (scales is not None):
        raise BadInput(
            f"weights of {weights.dtype} with {'no scales' if scales is None else 'scales'}"
        )
    if scales is not None:
        blocks = div_ceil(width, SCALE_GROUP), div_ceil(depth, SCALE_GROUP)
        require("scales", scales, (experts, *blocks), SINGLE)


def require_ends(ends: Sequence[int], *, count: int) -> None:
    """Experts' tokens lie one behind the other, among `count`."""
    for expert, (start, end) in enumerate(pairwise((0, *ends))):
        if not start <= end <= count:
            raise BadInput(f"ends[{expert}] is {end}, outside {start}..{count}")
