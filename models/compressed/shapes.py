"""The tensors of a model that attends to entries, by the names of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ess.models.config import Compressed, ModelConfig
from ess.models.weights.stored import Role


class Promised(NamedTuple):
    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    expert: int | None = None


def compressed_tensors(config: ModelConfig, *, mtp: bool) -> Iterator[Promised]:
    yield from (Promised(*shape) for shape in _outside(config))
    for layer in range(config.layer_total if mtp else config.layer_count):
        is_module = layer == config.layer_count
        prefix = MODULE if is_module else f"layers.{layer}."
        if is_module:
            yield from (Promised(*shape, layer) for shape in _module(config))
        yield from (Promised(*shape, layer) for shape in _layer(config, layer, prefix))
        yield from _experts(config, layer, f"{prefix}ffn.experts.")


MODULE: Final = "mtp.0."


Shape = tuple[str, tuple[int, ...], Role]


def _compressed(config: ModelConfig) -> Compressed:
    assert config.compressed is not None, f"{config.family} attends to rows of tokens"
    return config.compressed


def _outside(config: ModelConfig) -> Iterator[Shape]:
    table = (config.vocab_size, config.hidden_dim)
    yield "embed.weight", table, "table"
    yield "norm.weight", (config.hidden_dim,), "norm"
    yield from _streams(config, "hc_head_", config.stream_count, 1)
    yield "head.weight", table, "table"


def _streams(config: ModelConfig, prefix: str, shares: int, scales: int) -> Iterator[Shape]:
    yield f"{prefix}fn", (shares, config.residual_dim), "norm"
    yield f"{prefix}base", (shares,), "norm"
    yield f"{prefix}scale", (scales,), "norm"


def _module(config: ModelConfig) -> Iterator[Shape]:
    """The tensors of the MTP module beside its layer."""
    dim = config.hidden_dim
    for name in ("e_proj", "h_proj"):
        yield f"{MODULE}{name}.weight", (dim, dim), "linear"
    for name in ("enorm", "hnorm", "norm"):
        yield f"{MODULE}{name}.weight", (dim,), "norm"
    yield from _streams(config, f"{MODULE}hc_head_", config.stream_count, 1)


def _layer(config: ModelConfig, layer: int, prefix: str) -> Iterator[Shape]:
    streams = config.stream_count
    for norm in ("attn_norm", "ffn_norm"):
        yield f"{prefix}{norm}.weight", (config.hidden_dim,), "norm"
    for block in ("attn", "ffn"):
        yield from _streams(config, f"{prefix}hc_{block}_", (2 + streams) * streams, 3)
    yield from _attention(config, layer, f"{prefix}attn.")
    yield from _routing(config, layer, f"{prefix}ffn.")
    if config.shared_expert_count:
        yield from _mlp(config, f"{prefix}ffn.shared_experts.", config.shared_width)


def _attention(config: ModelConfig, layer: int, prefix: str) -> Iterator[Shape]:
    c, own, dim = config, _compressed(config), config.value_dim
    middle = own.output_groups * own.output_rank
    for name, shape in (
        ("wq_a", (c.query_rank, c.hidden_dim)),
        ("wq_b", (c.head_count * dim, c.query_rank)),
        ("wkv", (dim, c.hidden_dim)),
        ("wo_a", (middle, c.head_count * dim // own.output_groups)),
        ("wo_b", (c.hidden_dim, middle)),
    ):
        yield f"{prefix}{name}.weight", shape, "linear"
    yield f"{prefix}q_norm.weight", (c.query_rank,), "norm"
    yield f"{prefix}kv_norm.weight", (dim,), "norm"
    yield f"{prefix}attn_sink", (c.head_count,), "norm"
    if rate := own.rate(layer):
        series = 2 if own.kinds[layer] == "sparse" else 1
        yield from _compressor(config, f"{prefix}compressor.", rate, dim, series)
    if config.has_indexer(layer):
        yield from _indexer(config, own.sparse_rate, f"{prefix}indexer.")


def _compressor(
    config: ModelConfig, prefix: str, rate: int, dim: int, series: int
) -> Iterator[Shape]:
    for name in ("wkv", "wgate"):
        yield f"{prefix}{name}.weight", (series * dim, config.hidden_dim), "table"
    yield f"{prefix}ape", (rate, series * dim), "norm"
    yield f"{prefix}norm.weight", (dim,), "norm"


def _indexer(config: ModelConfig, rate: int, prefix: str) -> Iterator[Shape]:
    heads, dim = config.index_head_count, config.index_dim
    yield f"{prefix}wq_b.weight", (heads * dim, config.query_rank), "linear"
    yield f"{prefix}weights_proj.weight", (heads, config.hidden_dim), "table"
    yield from _compressor(config, f"{prefix}compressor.", rate, dim, 2)


def _routing(config: ModelConfig, layer: int, prefix: str) -> Iterator[Shape]:
    count, per_token = config.expert_count, config.experts_per_token
    yield f"{prefix}gate.weight", (count, config.hidden_dim), "table"
    if _compressed(config).hashed[layer]:
        yield f"{prefix}gate.tid2eid", (config.vocab_size, per_token), "numbers"
    else:
        yield f"{prefix}gate.e_score_correction_bias", (count,), "correction"


def _experts(config: ModelConfig, layer: int, prefix: str) -> Iterator[Promised]:
    for expert in range(config.expert_count):
        for shape in _mlp(config, f"{prefix}{expert}.", config.expert_dim):
            yield Promised(*shape, layer, expert)


def _mlp(config: ModelConfig, prefix: str, width: int) -> Iterator[Shape]:
    for name in ("gate_proj", "up_proj"):
        yield f"{prefix}{name}.weight", (width, config.hidden_dim), "linear"
    yield f"{prefix}down_proj.weight", (config.hidden_dim, width), "linear"
