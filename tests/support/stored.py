"""The plain model over what the codecs give back: token for token what an engine computes.

Rows and index keys come back from their codecs. Where keys are fp8, keys and queries are mixed by a
Hadamard transform first, and queries are bfloat16: they meet fp8 keys without a codec of their own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.kernels.backend import ops
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.config import ModelConfig
from ess.models.decoder import DecoderLayer
from ess.models.indexer import Probe
from ess.models.model import Model
from ess.models.plain import Plain, PlainLayer


class StoredLayer(PlainLayer):
    def __init__(self, layer: DecoderLayer, config: ModelConfig, layout: ModelLayout) -> None:
        super().__init__(layer, config)
        self._layout = layout

    def kept_rows(self, rows: Tensor) -> Tensor:
        return row_trip(rows, self._layout.row)

    def kept_probe(self, probe: Probe) -> Probe:
        codec = self._layout.index
        if codec is None or codec.form == "f32":
            return probe
        queries, keys = probe.queries, probe.keys
        if codec.hadamard:
            queries, keys = ops("reference").hadamard(queries), ops("reference").hadamard(keys)
        return Probe(queries.bfloat16().float(), probe.weights, key_trip(keys, codec))


class Stored(Plain):
    """The main model over one sequence whose rows and keys are stored as `layout` says."""

    def __init__(self, model: Model, layout: ModelLayout) -> None:
        super().__init__(model)
        self.layers = tuple(StoredLayer(layer, model.config, layout) for layer in model.layers)


def row_trip(rows: Tensor, codec: RowCodec) -> Tensor:
    encoded = torch.empty(rows.shape[0], codec.row_bytes, dtype=torch.uint8)
    ops("reference").encode_rows(rows, codec, encoded)
    return ops("reference").decode_rows(encoded, codec, torch.empty_like(rows))


def key_trip(keys: Tensor, codec: IndexCodec) -> Tensor:
    values, scales = ops("reference").encode_keys(keys, codec)
    return values.view(torch.float8_e4m3fn).float() * scales[:, None]
