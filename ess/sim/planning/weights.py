"""The bytes of a model's weights on each GPU, from its dimensions; matrices in fp8.

Attention is divided over the heads of a group, experts over all GPUs of a stage, layers over the
stages. Projections before the heads, and the indexer, are whole on every GPU of a group; embedding
and head are bf16, divided over a group, and counted on every stage, since one stage has both.
"""

from __future__ import annotations

from ess.sim.operators.families import Family
from ess.sim.operators.parallel import Parallel


def weight_bytes(family: Family, parallel: Parallel) -> int:
    """Bytes per GPU."""
    layout, split = family.layout, parallel.attention_tp
    moe_layers = layout.layer_total - family.dense_layers
    attention = _before_heads(family) + _heads(family) / split
    gated = 3 * layout.hidden_dim
    dense = family.dense_layers * gated * family.dense_dim / split
    shared = moe_layers * gated * family.expert_dim / parallel.expert_tp
    experts = moe_layers * gated * family.expert_dim * family.expert_count / parallel.stage_gpus
    ends = 2 * 2 * family.vocabulary * layout.hidden_dim / split
    layers = layout.layer_total * attention + dense + shared + experts
    return round(layers / parallel.pp + ends)


def _before_heads(family: Family) -> int:
    """Weights of a layer's projections to the ranks of q and kv, and of its indexer. They are
    counted even for layers without an indexer, which is one per cent too much."""
    layout = family.layout
    row_dim = layout.row.latent_dim + layout.row.rope_dim
    down = layout.hidden_dim * (layout.query_rank + row_dim)
    if layout.index is None:
        return down
    key_dim, heads = layout.index.key_dim, layout.index.head_count
    return down + layout.query_rank * heads * key_dim + layout.hidden_dim * (key_dim + heads)


def _heads(family: Family) -> int:
    """Weights of a layer's projections from q's rank to heads, from the latent, to the output."""
    layout = family.layout
    query = layout.query_rank * (layout.nope_dim + layout.row.rope_dim)
    latent = layout.row.latent_dim * (layout.nope_dim + layout.value_dim)
    return layout.head_count * (query + latent + layout.value_dim * layout.hidden_dim)
