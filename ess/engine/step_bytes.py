"""What a step takes of a device beside weights and pools: estimated from a model's dimensions.

A step and a chunk of prompts each take the most of their moments, which have names here and in
`layer_bytes`. On the pretended device an engine's arrays and those that launches of our kernels
make are counted beside it; nothing has been measured on a device yet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ess.comm.experts.sizes import CUT_TOKENS
from ess.engine.layer_bytes import BF16, F32, LayerBytes
from ess.kernels.served import ROOM_BYTES_MAX, ROOM_UNIT
from ess.layout import SCALE_GROUP, ModelLayout
from ess.models.config import ModelConfig
from ess.pool.warmup import WINDOW_MAX
from ess.units import PAGE_ROWS, align_up, div_ceil

KEPT: Final = 1
"""Lines of logits that are kept for chances of tokens, from one step to the next."""
MADE: Final = 1
"""Lines of logits that the model makes; they stay until the step has ended."""
DRAWN: Final = 5
"""Lines of logits while a token is drawn: as made, kept, changed by penalties, over the
temperature, and cut."""
CANDIDATES: Final = 8192
"""How many logits of a line the kernel that looks for the best keeps, with their places."""
SCORED: Final = 640
"""Queries of a prompt that are scored at a time. A prompt is cut into equal pieces, so that none is
as small as the batches that other kernels score, with other roundings."""
PIECES: Final = 2
"""Pieces, for each program, of lists that attention cuts so that its programs have equal shares."""
PROGRAMS_MAX: Final = 192
"""A program for each multiprocessor: GPUs that we serve on have up to 188."""
SIDES: Final = 2
"""Layers whose rows of a prompt are on the device at a time."""
STAGED_BYTES: Final = 64 << 20
"""The most bytes of a prompt's rows and keys on their way to the host; beyond it the host waits."""
GRAPH_LAYER_BYTES: Final = 64 << 10
"""What the driver keeps of a captured layer at least, beside the memory that all graphs share."""
GRAPH_LAYER_BYTES_MAX: Final = 1 << 20
"""The same at most: NVIDIA says around 10 KB a kernel (NVIDIA/cccl#3768), of which a layer has some
100."""


def decode_bytes(
    config: ModelConfig,
    *,
    query_max: int,
    length_max: int,
    value_bytes: int = BF16,
    rank_count: int = 1,
    has_rooms: bool = False,
) -> int:
    """`value_bytes` are those of a weight that is multiplied; `has_rooms`: a library multiplies the
    experts' lines."""
    moments = decode_moments(
        config,
        query_max=query_max,
        length_max=length_max,
        value_bytes=value_bytes,
        rank_count=rank_count,
    )
    return max(moments.values()) + has_rooms * room_bytes(config, query_max, rank_count)


def decode_moments(
    config: ModelConfig, *, query_max: int, length_max: int, value_bytes: int, rank_count: int
) -> Mapping[str, int]:
    """What a step takes at each of its moments. In halves one exchanges while the other attends:
    what the larger moment takes of the whole batch is enough for both."""
    logits, states = config.vocab_size * F32, (config.residual_dim + config.hidden_dim) * F32
    layer = LayerBytes(config=config, value_bytes=value_bytes, is_step=True)
    most = max(layer.most, layer.scored + _score_bytes(length_max))
    most = max(most, layer.waiting + layer.exchanged(rank_count))
    partials = _partial_bytes(layer, query_max)
    candidates = 2 * CANDIDATES * F32 * (config.vocab_size > CANDIDATES)
    ending = states + layer.product(config.hidden_dim, config.vocab_size)
    ending += 2 * logits * (config.logit_cap > 0)
    behind = (KEPT + MADE) * logits + states
    moments = {
        "layers": query_max * (KEPT * logits + most) + partials,
        "logits": query_max * (KEPT * logits + ending),
        "drawing": query_max * (DRAWN * logits + candidates + states),
    }
    if config.mtp_layer_count:
        moments["draft"] = query_max * (behind + most) + partials
        moments["logits of drafts"] = query_max * (behind + ending)
    return moments


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
    value_bytes: int = BF16,
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
    cut = min(tokens, CUT_TOKENS)
    rooms = has_rooms * room_bytes(config, tokens, rank_count)
    layer = LayerBytes(config=config, value_bytes=value_bytes)
    exchanged = tokens * layer.waiting + cut * layer.exchanged(rank_count)
    scored = tokens * layer.scored + min(tokens, SCORED) * _score_bytes(length_max)
    # Behind the main layers their states stay for the MTP module's.
    states = tokens * config.residual_dim * F32 * (layout.mtp_layer_count > 0)
    return kept + states + max(tokens * layer.most, scored, exchanged) + rooms


def exchange_bytes(
    config: ModelConfig, token_count: int, rank_count: int, *, value_bytes: int
) -> int:
    """Of a layer whose experts ranks divide, at its end."""
    layer = LayerBytes(config=config, value_bytes=value_bytes, is_step=True)
    return token_count * (layer.waiting + layer.exchanged(rank_count))


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
    value_bytes: int = BF16,
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
        value_bytes=value_bytes,
        rank_count=rank_count,
        has_rooms=has_rooms,
    )
    return max(step, pool_bytes) + graph_count * layout.layer_total * GRAPH_LAYER_BYTES


def graph_bytes_more(layout: ModelLayout, graph_count: int) -> int:
    """What the driver may keep of graphs beyond `graph_bytes`."""
    return graph_count * layout.layer_total * (GRAPH_LAYER_BYTES_MAX - GRAPH_LAYER_BYTES)


def _score_bytes(length_max: int) -> int:
    """Bytes of a query: scores of all keys, the best of them, and its pages."""
    pages = div_ceil(length_max, PAGE_ROWS)
    scores = pages * PAGE_ROWS
    best = 2 * CANDIDATES if scores > CANDIDATES else 0
    return (scores + best + 2 * pages) * F32


def _partial_bytes(layer: LayerBytes, query_max: int) -> int:
    """Partials over pieces of lists, of each program. No program is without a block of a list."""
    c, (heads, keys) = layer.config, layer.blocks
    blocks = query_max * div_ceil(c.head_count, heads) * div_ceil(2 * c.top_k, keys)
    return PIECES * min(PROGRAMS_MAX, blocks) * heads * (c.latent_dim + 1) * F32
