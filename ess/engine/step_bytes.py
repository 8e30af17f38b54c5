"""What a step takes of a device beside weights and pools: estimated from a model's dimensions.

This counts the largest arrays that live at the same time: logits, index scores over the whole
context, the attention's queries and partials, the experts' lines, selections. Nothing has been
measured on a device yet.
"""

from __future__ import annotations

import math
from typing import Final

from ess.comm.experts.sizes import CUT_TOKENS
from ess.kernels.served import ROOM_BYTES_MAX, ROOM_UNIT
from ess.layout import SCALE_GROUP, ModelLayout
from ess.models.config import ModelConfig
from ess.pool.warmup import WINDOW_MAX
from ess.units import PAGE_ROWS, align_up, div_ceil

F32: Final = 4
BF16: Final = 2
LOGITS: Final = 3
"""Beside the MTP layer: of the model, kept for chances of tokens, and of the layer."""
DRAWN: Final = 7
"""Where a token is drawn: as they are made, kept, changed by penalties, over the temperature, cut,
and noise twice."""
CANDIDATES: Final = 8192
"""What a kernel that looks for the best of a line keeps of it, with their places."""
SCORED: Final = 640
"""Queries of a prompt that are scored at a time. A prompt is cut into equal pieces, so that none is
as small as the batches that other kernels score, with other roundings."""
LISTS: Final = 4
"""A selection, what it is called among the rows, and two on the way there."""
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
    config: ModelConfig,
    *,
    query_max: int,
    length_max: int,
    rank_count: int = 1,
    has_rooms: bool = False,
) -> int:
    """`has_rooms`: a library multiplies the experts' lines."""
    logits = config.vocab_size * F32
    layer = LOGITS * logits + _token_bytes(config) + _score_bytes(length_max)
    each = max(layer, DRAWN * logits + 2 * CANDIDATES * F32)
    rooms = has_rooms * room_bytes(config, query_max, rank_count)
    return query_max * each + exchange_bytes(config, query_max, rank_count) + rooms


def positions_max(length_max: int, *, on_device: bool) -> float:
    """The most positions of the prompts of one pack, cached ones included. A device has memory for
    a layer's rows of the longest prompt, and a pack needs those of all its prompts at once."""
    return align_up(length_max, PAGE_ROWS) if on_device else math.inf


def prompt_bytes(
    config: ModelConfig,
    layout: ModelLayout,
    *,
    chunk_tokens: int,
    length_max: int,
    prompt_max: int,
    rank_count: int = 1,
    pack_count: int = 1,
    has_rooms: bool = False,
) -> int:
    """Bytes of `pack_count` packs of up to `prompt_max` prompts: all have their rows and windows in
    memory, one runs."""
    positions = align_up(length_max, PAGE_ROWS)
    rows = pack_count * SIDES * positions * layout.row_bytes
    tokens = min(chunk_tokens, positions)
    windows = pack_count * min(tokens, prompt_max * WINDOW_MAX) + min(tokens, WINDOW_MAX)
    kept = rows + windows * layout.group_count * layout.top_k * F32
    exchanged = exchange_bytes(config, min(tokens, CUT_TOKENS), rank_count)
    rooms = has_rooms * room_bytes(config, tokens, rank_count)
    scored = min(tokens, SCORED) * _score_bytes(length_max)
    return kept + tokens * _token_bytes(config) + scored + exchanged + rooms


def exchange_bytes(config: ModelConfig, token_count: int, rank_count: int) -> int:
    """Bytes of the exchanges of ranks that divide the experts: tokens of all ranks, a line for each
    of their experts, whether it is here or not, and the sums that go back."""
    if rank_count == 1:
        return 0
    sums = config.hidden_dim * (EXCHANGED * BF16 + SUMS * F32)
    outer, inner = config.hidden_dim * (BF16 + F32), 2 * config.expert_dim * (F32 + BF16)
    lines = config.experts_per_token * (outer + inner)
    return rank_count * token_count * (lines + sums)


def room_bytes(config: ModelConfig, token_count: int, rank_count: int) -> int:
    """Bytes for a library that gives each expert here room for all lines: codes with their scales,
    twice, and products. Where that is too much for it, our own kernels multiply."""
    lines = rank_count * token_count * config.experts_per_token
    experts = div_ceil(config.expert_count, rank_count)
    inner, outer = config.expert_dim, config.hidden_dim
    return max(_room(lines, experts, *shape) for shape in ((outer, 2 * inner), (inner, outer)))


def _room(lines: int, experts: int, depth: int, width: int) -> int:
    most = ROOM_BYTES_MAX // (experts * max(depth, BF16 * width)) // ROOM_UNIT * ROOM_UNIT
    each = depth + 2 * F32 * div_ceil(depth, SCALE_GROUP) + BF16 * width
    return experts * min(align_up(lines, ROOM_UNIT), most) * each


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
    has_rooms: bool = False,
) -> int:
    """Graphs work in memory of their own, which they share: as much as the largest of them takes,
    and no less than the `pool_bytes` that it has by now."""
    if not graph_count:
        return 0
    step = decode_bytes(
        config,
        query_max=query_max,
        length_max=length_max,
        rank_count=rank_count,
        has_rooms=has_rooms,
    )
    return max(step, pool_bytes) + graph_count * layout.layer_total * GRAPH_LAYER_BYTES


def _score_bytes(length_max: int) -> int:
    """Bytes of a query: scores of all keys, the best of them, and its pages."""
    pages = div_ceil(length_max, PAGE_ROWS)
    scores = pages * PAGE_ROWS
    best = 2 * CANDIDATES if scores > CANDIDATES else 0
    return (scores + best + 2 * pages) * F32


def _token_bytes(config: ModelConfig) -> int:
    """Bytes of a token, without scores, in the layer that takes the most."""
    queries = config.head_count * (config.nope_dim + config.rope_dim) * F32
    absorbed = 2 * config.head_count * config.row_dim * BF16
    partials = PARTIALS * config.head_count * config.latent_dim * F32
    hidden = HIDDENS * config.residual_dim * F32
    lists = LISTS * config.top_k * F32
    return queries + absorbed + partials + _expert_bytes(config) + hidden + lists


def _expert_bytes(config: ModelConfig) -> int:
    """Bytes of a token, with a line for each of its experts: either the input and its gates, in
    float32; or the input and the output, the output in order, and weighed."""
    outer, inner = config.hidden_dim, config.expert_dim
    gates = outer * BF16 + inner * (3 * BF16 + 6 * F32)
    sums = outer * 2 * (BF16 + F32) + inner * 3 * BF16
    return config.experts_per_token * max(gates, sums)
