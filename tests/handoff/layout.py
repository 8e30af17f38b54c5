"""The layout of the workers in these tests: three layers, an MTP layer, keys of three groups."""

from __future__ import annotations

from ess.layout import IndexCodec, ModelLayout, RowCodec

LAYOUT = ModelLayout(
    name="t",
    layer_count=3,
    groups=((0, 1), (2,), (3,)),
    row=RowCodec(form="opaque", opaque_bytes=16),
    index=IndexCodec(key_dim=8, head_count=1),
    mtp_layer_count=1,
    top_k=8,
    slot_floor=8,
)
