"""The ops of a CPU: compiled where that is there, the reference for the rest."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ess.kernels.calls import Keys, RowFinish
from ess.kernels.cpu import codec as compiled
from ess.kernels.cpu import native
from ess.kernels.reference import finish as finishing
from ess.kernels.reference.formats import Array
from ess.kernels.reference.ops import (
    counts_to_build,
    cut,
    draw,
    expert_products,
    finish_keys,
    hadamard,
    linear_fp8,
    turn_queries,
)
from ess.kernels.reference.received import add_received, gate_received, take_received
from ess.layout import IndexCodec, RowCodec

if native.available():
    from ess.kernels.cpu.attend import attend, merge
    from ess.kernels.cpu.index import index_logits, index_scored, index_top_k, top_k
else:
    from ess.kernels.reference.ops import (
        attend,
        index_logits,
        index_scored,
        index_top_k,
        merge,
        top_k,
    )

CHECKED: Final = ("slots", "lengths", "page_table") if native.available() else ()


def implementation() -> str:
    tiles = " with tiles" if native.available() and native.has_tiles() else ""
    compute = f"native {native.kernels()}{tiles}" if native.available() else "torch"
    return f"rows and keys {compiled.implementation()}, attention, index and merge {compute}"


def has_stages() -> bool:
    return native.available()


def reaches(tensor: Tensor, *, in_place: bool) -> bool:
    return tensor.is_cpu


def checked_before(name: str, ids: Tensor) -> bool:
    """Compiled functions check int32; int64 is looked at before it is narrowed."""
    return name not in CHECKED or ids.dtype != torch.int32


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> None:
    compiled.encode_rows(_array(values), codec, _array(out))


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> None:
    compiled.decode_rows(_array(rows), codec, _array(out))


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    keys = compiled.encode_keys(_array(values), codec)
    return Keys(torch.from_numpy(keys.values), torch.from_numpy(keys.scales))


def store_rows(values: Tensor, codec: RowCodec, out: Tensor, places: Tensor) -> None:
    finishing.store_rows(values, codec, out, places, encode_rows)


def finish_rows(
    values: Tensor, finish: RowFinish, codec: RowCodec, out: Tensor, places: Tensor | None
) -> None:
    finishing.finish_rows(values, finish, codec, out, places, encode_rows)


def _array(tensor: Tensor) -> Array:
    """The same memory as NumPy sees it; bfloat16 becomes its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()
