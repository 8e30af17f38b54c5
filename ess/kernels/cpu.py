"""The ops of a CPU: compiled where that is there, the reference for the rest."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels import rowcodec
from ess.kernels.reference import (
    Keys,
    hadamard,
    index_logits,
    merge,
    read_keys,
    sparse_attention,
    top_k,
    write_keys,
)
from ess.kernels.spec import Array
from ess.layout import IndexCodec, RowCodec

__all__ = [
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "hadamard",
    "implementation",
    "index_logits",
    "merge",
    "read_keys",
    "sparse_attention",
    "top_k",
    "write_keys",
]


def implementation() -> str:
    return f"rows and keys {rowcodec.implementation()}, attention, index and merge torch"


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
    rowcodec.encode_rows(_array("values", values), codec, _array("out", out))
    return out


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
    rowcodec.decode_rows(_array("rows", rows), codec, _array("out", out))
    return out


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16."""
    keys = rowcodec.encode_keys(_array("values", values), codec)
    return Keys(torch.from_numpy(keys.values), torch.from_numpy(keys.scales))


def _array(name: str, tensor: Tensor) -> Array:
    """The same memory as NumPy sees it; bfloat16 becomes its bits."""
    if tensor.device.type != "cpu":
        raise BadInput(f"{name} is on {tensor.device}, the cpu ops need it on the host")
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    if tensor.dtype not in (torch.float32, torch.uint8):
        raise BadInput(f"{name} has type {tensor.dtype}, must be float32, bfloat16 or uint8")
    return tensor.detach().numpy()
