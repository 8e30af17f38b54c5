"""What stored values are passed through on the way to the plain runner: nothing, or the codecs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ess.kernels.backend import ops
from ess.layout import IndexCodec, ModelLayout, RowCodec

Through = Callable[[Tensor], Tensor]


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """For rows [n, latent + rope], and for both sides of the indexer's dot product [..., dim]."""

    rows: Through = unchanged
    index: Through = unchanged


def as_stored(layout: ModelLayout) -> Precision:
    """Rows, index keys and index queries as they come back from the layout's own codecs."""
    codec = layout.index
    if codec is None:
        return Precision(rows=lambda x: _row_trip(x, layout.row))
    return Precision(rows=lambda x: _row_trip(x, layout.row), index=lambda x: _index_trip(x, codec))


def _row_trip(rows: Tensor, codec: RowCodec) -> Tensor:
    encoded = torch.empty(rows.shape[0], codec.row_bytes, dtype=torch.uint8)
    ops("reference").encode_rows(rows, codec, encoded)
    return ops("reference").decode_rows(encoded, codec, torch.empty_like(rows))


def _index_trip(x: Tensor, codec: IndexCodec) -> Tensor:
    if codec.form == "f32":
        return x
    turned = ops("reference").hadamard(x) if codec.hadamard else x
    values, scales = ops("reference").encode_keys(turned.flatten(0, -2), codec)
    return (values.view(torch.float8_e4m3fn).float() * scales[:, None]).view(x.shape)
