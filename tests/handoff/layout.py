"""The layouts of the workers in these tests: three layers, an MTP layer, keys of three groups; and
what keeps a state beside its rows, of several tokens or of one."""

from __future__ import annotations

from dataclasses import replace

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
ENTRIES = replace(
    LAYOUT,
    groups=((0, 1), (2,)),
    mtp_layer_count=0,
    row_tokens=4,
    state_bytes=150_001,
    state_page_bytes=9_000,
)
LINEAR = replace(LAYOUT, groups=((0, 1), (2,)), mtp_layer_count=0, state_bytes=200_000)
STATES = {"entries": ENTRIES, "linear": LINEAR}
