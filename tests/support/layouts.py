"""Layouts of rows and keys of a few bytes, for tests of what holds or moves them."""

from __future__ import annotations

from typing import Final

from ess.layout import IndexCodec, ModelLayout, RowCodec

PLAIN: Final = ModelLayout(
    name="t",
    layer_count=2,
    groups=((0,), (1,)),
    row=RowCodec(form="opaque", opaque_bytes=8),
    index=IndexCodec(key_dim=8, head_count=1),
    top_k=4,
)
"""Every layer selects for itself."""
