"""What the pools need to know of a model that attends to entries. Needs no torch.

Their layers are those whose indexer chooses among entries, counted by themselves. Beside its rows a
request keeps a state, and the entries of other layers, to which all tokens attend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ess.errors import BadInput
from ess.layout import BYTE_SCALED, IndexCodec, IndexForm, ModelLayout, RowCodec, RowForm
from ess.models.compressed.form import (
    HEADER_ALIGNMENT,
    HEADER_BYTES,
    VALUE_BYTES,
    entry_pages,
    state_form,
)

if TYPE_CHECKING:
    from ess.models.config import ModelConfig

VERIFIED_MAX: Final = 4
"""Tokens of a request that a step verifies: its rings have a line for each. Of a model without an
MTP module it is one."""


def layout_of(config: ModelConfig, *, name: str, row: RowForm, index: IndexForm) -> ModelLayout:
    own, unit_bytes = config.compressed, VALUE_BYTES * config.value_dim
    assert own is not None, f"{config.family} keeps rows of tokens"
    count = own.kinds.count("sparse")
    where = f"config.json of {config.family}"
    verified_max = VERIFIED_MAX if config.mtp_layer_count else 1
    if not count:
        raise BadInput(f"{where}: no layer has an indexer that chooses entries: none is offloaded")
    if row == "fp8" and config.nope_dim % BYTE_SCALED:
        raise BadInput(
            f"{where}: the {config.nope_dim} dimensions of an entry that are not turned are no"
            f" multiple of {BYTE_SCALED}, which fp8 rows need: choose row bf16 or f32"
        )
    if unit_bytes < HEADER_BYTES or unit_bytes % HEADER_ALIGNMENT:
        raise BadInput(f"{where}: head_dim {config.value_dim} is no even number from 4 on")
    return ModelLayout(
        name=name or config.family,
        layer_count=count,
        groups=tuple((layer,) for layer in range(count)),
        row=_row_codec(config, row),
        index=IndexCodec(
            form=index,
            key_dim=config.index_dim,
            head_count=config.index_head_count,
            hadamard=False,
            rope_style="interleaved",
        ),
        top_k=config.top_k,
        head_count=config.head_count,
        hidden_dim=config.hidden_dim,
        nope_dim=config.nope_dim,
        value_dim=config.value_dim,
        query_rank=config.query_rank,
        slot_floor=max(1024, 25 * config.top_k // 8),
        row_tokens=own.sparse_rate,
        verified_max=verified_max,
        state_bytes=state_form(config, drafts=verified_max).byte_count,
        state_page_bytes=entry_pages(config).page_units * unit_bytes,
    )


def _row_codec(config: ModelConfig, row: RowForm) -> RowCodec:
    """An entry is key and value at once. In fp8 its last dimensions, which are turned, are bf16."""
    dim = config.value_dim
    if row != "fp8":
        return RowCodec(form=row, latent_dim=dim, rope_dim=0)
    return RowCodec(form="fp8_64", latent_dim=dim, rope_dim=0, plain_dim=config.rope_dim)
