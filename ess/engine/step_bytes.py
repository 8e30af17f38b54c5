"""What a step takes of a device beside weights and pools: estimated from a model's dimensions.

Counted are the largest arrays that live at a time: logits, index scores over the whole context, the
attention's queries and partials, the experts' lines. Nothing has been measured on a device yet.
"""

from __future__ import annotations

import math
from typing import Final

from ess.comm.experts.sizes import CUT_TOKENS
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.units import PAGE_ROWS, align_up, div_ceil

F32: Final = 4
BF16: Final = 2
LOGITS: Final = 3
"""As they are made, changed by penalties and temperature, and sorted."""
PARTIALS: Final = 4
"""Attention over hits, over fetched rows, over both, and the last in the type of the weights."""
HIDDENS: Final = 8
EXCHANGED: Final = 4
"""Lines that a rank sends and gets, sums that it sends and gets."""
SUMS: Final = 4
"""The sum, one expert's part of it, that part weighed, and what is added."""
SIDES: Final = 2
"""Layers whose rows of a prompt are on the device at a time."""
STAGED_BYTES: Final = 64 << 20
"""Bytes of a prompt's rows and keys on their way to the host: at so many the host waits."""
GRAPH_LAYER_BYTES: Final = 64 << 10
"""What the driver keeps of a captured layer, beside the memory that all graphs share."""


def decode_bytes(
    config: ModelConfig, *, query_max: int, length_max: int, rank_count: int = 1
) -> int:
    each = config.vocab_size * F32 * LOGITS + _token_bytes(config, length_max)
    return query_max * each + exchange_bytes(config, query_max, rank_count)


def positions_max(length_max: int, *, on_device: bool) -> float:
    """Of the prompts that one pack runs, cached positions included. A device has memory for a
    layer's rows of the longest prompt, and a pack needs those of all its prompts at once."""
    return align_up(length_max, PAGE_ROWS) if on_device else math.inf


def prompt_bytes(
    config: ModelConfig,
    layout: ModelLayout,
    *,
    chunk_tokens: int,
    length_max: int,
    rank_count: int = 1,
    pack_count: int = 1,
) -> int:
    """Of so many packs whose rows are there, one of which is run."""
    positions = align_up(length_max, PAGE_ROWS)
    rows = pack_count * SIDES * positions * layout.row_bytes
    tokens = min(chunk_tokens, positions)
    exchanged = exchange_bytes(config, min(tokens, CUT_TOKENS), rank_count)
    return rows + tokens * _token_bytes(config, length_max) + exchanged


def exchange_bytes(config: ModelConfig, token_count: int, rank_count: int) -> int:
    """Of ranks that divide the experts: tokens of all ranks, a line for each of their experts,
    whether it is here or not, and the sums that go back."""
    if rank_count == 1:
        return 0
    sums = config.hidden_dim * (EXCHANGED * BF16 + SUMS * F32)
    return rank_count * token_count * (_expert_bytes(config) + sums)


def staged_bytes(
    layout: ModelLayout, *, chunk_tokens: int, length_max: int, pack_count: int = 1
) -> int:
    """Memory of the host with pages locked: all that chunks make, or as much as may be on its way
    when a layer's rows come on top."""
    tokens = pack_count * min(chunk_tokens, align_up(length_max, PAGE_ROWS))
    all_bytes = div_ceil(tokens * layout.host_page_bytes, PAGE_ROWS)
    return min(all_bytes, STAGED_BYTES + tokens * layout.row_bytes)


def graph_bytes(
    config: ModelConfig,
    layout: ModelLayout,
    *,
    query_max: int,
    graph_count: int,
    length_max: int,
    rank_count: int = 1,
    pool_bytes: int = 0,
) -> int:
    """Graphs work in memory of their own, which they share: as much as the largest of them takes,
    and no less than the `pool_bytes` that it has by now."""
    if not graph_count:
        return 0
    step = decode_bytes(config, query_max=query_max, length_max=length_max, rank_count=rank_count)
    return max(step, pool_bytes) + graph_count * layout.layer_total * GRAPH_LAYER_BYTES


def _token_bytes(config: ModelConfig, length_max: int) -> int:
    """In the layer that takes the most."""
    pages = div_ceil(length_max, PAGE_ROWS)
    index = pages * PAGE_ROWS * F32 + 2 * pages * F32
    queries = config.head_count * (config.nope_dim + config.rope_dim) * F32
    absorbed = 2 * config.head_count * config.row_dim * BF16
    partials = PARTIALS * config.head_count * config.latent_dim * F32
    hidden = HIDDENS * config.residual_dim * F32
    return index + queries + absorbed + partials + _expert_bytes(config) + hidden


def _expert_bytes(config: ModelConfig) -> int:
    """Of a token: what goes into its experts and comes out, a line for each."""
    outer, inner = config.hidden_dim * (BF16 + F32), 2 * config.expert_dim * (F32 + BF16)
    return config.experts_per_token * (outer + inner)
