"""The weights of a model that attends to entries, as pure calls over explicit tensors.

`ess.models.compressed.plain` puts the state and the entries of a sequence between them.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from ess.errors import BadInput
from ess.models.compressed.attention import Attention, turn
from ess.models.compressed.compressor import Compressor
from ess.models.compressed.experts import Experts
from ess.models.compressed.streams import Ending, Mixing
from ess.models.config import ModelConfig
from ess.models.indexer import Probe
from ess.models.layers import Norm, RotaryPositions, Rotation, Source, TensorSource, linear
from ess.models.model import Model
from ess.models.weights.kept import plain


class Indexer:
    """Its keys are entries of its own compressor; its queries are made from attention's low-rank
    query."""

    def __init__(self, config: ModelConfig, source: Source, rate: int) -> None:
        c, heads = config, config.index_head_count
        self._config = c
        self._query_up = source.weight("wq_b", heads * c.index_dim, c.query_rank)
        self._head = source.matrix("weights_proj", heads, c.hidden_dim).float()
        self._scale = heads**-0.5 * c.index_dim**-0.5
        self.compressor = Compressor(
            c, source.under("compressor"), rate=rate, dim=c.index_dim, overlaps=True
        )

    def probe(self, hidden: Tensor, query: Tensor, keys: Tensor, rotation: Rotation) -> Probe:
        c = self._config
        heads = linear(query, self._query_up).view(-1, c.index_head_count, c.index_dim)
        weights = (hidden.float() @ self._head.T) * self._scale
        return Probe(turn(c, heads, rotation), weights, keys)


class Layer:
    def __init__(self, config: ModelConfig, source: Source, number: int) -> None:
        own, attention = config.compressed, source.under("attn")
        assert own is not None, "a layer of another family"
        self.number, self.kind, self.rate = number, own.kinds[number], own.rate(number)
        self.attention = Attention(config, attention)
        self.compressor = self.indexer = None
        if self.rate:
            sparse = self.kind == "sparse"
            self.compressor = Compressor(
                config,
                attention.under("compressor"),
                rate=self.rate,
                dim=config.value_dim,
                overlaps=sparse,
            )
            if sparse:
                self.indexer = Indexer(config, attention.under("indexer"), self.rate)
        self.experts = Experts(config, source.under("ffn"), number)
        self.around_attention = Mixing(config, source, "hc_attn_")
        self.around_experts = Mixing(config, source, "hc_ffn_")
        self.attention_norm = Norm(source.under("attn_norm"), config.hidden_dim, config.norm_eps)
        self.experts_norm = Norm(source.under("ffn_norm"), config.hidden_dim, config.norm_eps)

    def mlp(self, streams: Tensor, tokens: Tensor) -> Tensor:
        read = self.around_experts.read(streams)
        output = self.experts.run(self.experts_norm(read.sum), tokens)
        return self.around_experts.write(streams, read, output)


class Module:
    """Multi-token prediction: one layer of the last tokens alone guesses the token after next.

    Its row p pairs the streams that the last layer has made of position p with the embedding of
    token p + 1, at position p. For further guesses its own streams take their place. Embedding and
    head are the model's; how streams are joined, and the norm before the head, are its own.
    """

    def __init__(self, config: ModelConfig, source: Source) -> None:
        dim, eps = config.hidden_dim, config.norm_eps
        self.layer = Layer(config, source, config.layer_count)
        self._embedding_norm = Norm(source.under("enorm"), dim, eps)
        self._streams_norm = Norm(source.under("hnorm"), dim, eps)
        self._from_embedding = source.weight("e_proj", dim, dim)
        self._from_streams = source.weight("h_proj", dim, dim)
        self._joining = Ending(config, source)
        self._last_norm = Norm(source.under("norm"), dim, eps)

    def join(self, embedded: Tensor, streams: Tensor) -> Tensor:
        """Next tokens' embeddings [tokens, hidden] and these positions' streams, as streams."""
        next_token = linear(self._embedding_norm(embedded), self._from_embedding)
        return next_token[:, None] + linear(self._streams_norm(streams), self._from_streams)

    def finish(self, streams: Tensor) -> Tensor:
        """The hidden states from which the model's head guesses."""
        return self._last_norm(self._joining(streams))


class CompressedModel(Model):
    """Its `blocks` are no decoder layers of other families, and its `module` no MTP module of
    theirs: of those it has none."""

    has_stages = False

    def __init__(self, config: ModelConfig, tensor: TensorSource) -> None:
        c, source, own = config, Source(tensor), config.compressed
        if own is None:
            raise BadInput(f"{c.family} does not attend to entries of several tokens")
        self.config = c
        self.is_first = self.is_last = True
        self.layers, self.mtp = (), None
        self.blocks = tuple(
            Layer(c, source.under(f"layers.{number}"), number) for number in range(c.layer_count)
        )
        has_module = c.mtp_layer_count > 0
        self.module = Module(c, source.under("mtp.0")) if has_module else None
        self.chosen_layers = tuple(each.number for each in self.blocks if each.kind == "sparse")
        self._table = source.matrix("embed", c.vocab_size, c.hidden_dim)
        self._last_norm = Norm(source.under("norm"), c.hidden_dim, c.norm_eps)
        self._out = source.matrix("head", c.vocab_size, c.hidden_dim)
        self._joining = Ending(c, source)
        self.device = device = self._table.device
        self.positions = RotaryPositions(c, device)
        self._window_positions = RotaryPositions(in_windows(c), device)

    def turning(self, kind: str) -> RotaryPositions:
        """The rotary positions of layers of this kind."""
        return self._window_positions if kind == "window" else self.positions

    def embed(self, tokens: Tensor) -> Tensor:
        """[tokens, streams, hidden], all streams the same."""
        return self.embedded(tokens)[:, None].repeat(1, self.config.stream_count, 1)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[tokens, hidden]"""
        return self._table[tokens].float()

    def rotation(self, positions: Tensor) -> Rotation:
        """The rotation of layers with entries."""
        return self.positions.at(positions)

    def finish(self, hidden: Tensor) -> Tensor:
        """Joins the streams and norms the result."""
        return self._last_norm(self._joining(hidden))

    def logits(self, finished: Tensor) -> Tensor:
        return linear(finished, plain(self._out))


def in_windows(config: ModelConfig) -> ModelConfig:
    """The configuration with the rope of layers that have no entries."""
    assert config.compressed is not None, "windows of another family"
    return msgspec.structs.replace(config, rope=config.compressed.window_rope)


def check_tokens(tokens: Tensor, config: ModelConfig) -> None:
    if not len(tokens):
        raise BadInput("no tokens were given")
    low, high = int(tokens.min()), int(tokens.max())
    if not 0 <= low <= high < config.vocab_size:
        raise BadInput(f"tokens {low}..{high} are outside 0..{config.vocab_size - 1}")
