"""The ops of a CPU: compiled where that is there, the reference for the rest."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.checks import check_attention
from ess.kernels.cpu import codec as compiled
from ess.kernels.cpu import native
from ess.kernels.merge import Partial
from ess.kernels.reference import ops as reference
from ess.kernels.reference.formats import Array
from ess.kernels.reference.ops import Keys, expert_products, hadamard, read_keys, write_keys
from ess.layout import IndexCodec, RowCodec, RowForm

if native.available():
    from ess.kernels.cpu.attend import attend, merge
    from ess.kernels.cpu.index import index_logits, index_top_k, top_k
else:
    from ess.kernels.merge import merge
    from ess.kernels.reference.ops import attend, index_logits, index_top_k, top_k

PLAIN_FORMS: Final[dict[torch.dtype, RowForm]] = {torch.float32: "f32", torch.bfloat16: "bf16"}

__all__ = [
    "attend",
    "decode_rows",
    "encode_keys",
    "encode_rows",
    "expert_products",
    "hadamard",
    "has_stages",
    "implementation",
    "index_logits",
    "index_top_k",
    "merge",
    "read_keys",
    "sparse_attention",
    "top_k",
    "write_keys",
]


def implementation() -> str:
    compute = f"native {native.kernels()}" if native.available() else "torch"
    return f"rows and keys {compiled.implementation()}, attention, index and merge {compute}"


def has_stages() -> bool:
    return native.available()


def sparse_attention(
    queries: Tensor, rows: Tensor, slots: Tensor, *, latent_dim: int, scale: float
) -> Partial:
    """Over plain rows [slot, dim]: those of float32 and bfloat16 are encoded as they lie."""
    check_attention(queries, rows, slots, latent_dim)
    form = PLAIN_FORMS.get(rows.dtype)
    if form is None or rows.shape[1] * rows.element_size() % 4:
        return reference.sparse_attention(queries, rows, slots, latent_dim=latent_dim, scale=scale)
    codec = RowCodec(form=form, latent_dim=latent_dim, rope_dim=rows.shape[1] - latent_dim)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return attend(queries, rows.view(torch.uint8), slots, codec, scale=scale)


def encode_rows(values: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Values [n, latent + rope], float32 or bfloat16, into rows [n, row_bytes]."""
    compiled.encode_rows(_array("values", values), codec, _array("out", out))
    return out


def decode_rows(rows: Tensor, codec: RowCodec, out: Tensor) -> Tensor:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16."""
    compiled.decode_rows(_array("rows", rows), codec, _array("out", out))
    return out


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16."""
    keys = compiled.encode_keys(_array("values", values), codec)
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
