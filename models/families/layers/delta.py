"""Linear attention by gated delta rules (KDA): a state of one size in the place of rows.

Each head has a matrix S of keys by values. A token lets each key channel of it fade, replaces by
its share `b` what S says of the token's key with the token's value, and reads S by its query:

    S <- exp(g) S;   S <- S + k u^T, u = b (v - S^T k);   out = S^T q

Queries, keys and values are sums over the channel's last tokens, behind a gate of their own.

A block of tokens is taken at once. With G the sum of g up to a token, and S the matrix before the
block, what a token t finds in its place is made of S and of the changes u of the tokens before:

    u_t = b_t (v_t - S^T (exp(G_t) k_t) - sum over i < t of a_ti u_i)
    a_ti = sum over channels of k_t exp(G_t - G_i) k_i

So the changes are the solution of a triangular system, and the same sums with q_t for k_t, i = t
among them, are what t reads. exp(G_t - G_i) is taken channel by channel, not as a product of two
powers: so all exponents are at most 0, and nothing overflows, however fast a channel fades.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models import decoder
from ess.models.config import ModelConfig
from ess.models.families.layers.pooled import MixedLayer
from ess.models.layers import Source, linear, rms_norm
from ess.models.mla import Mla
from ess.models.part import LayerPlace
from ess.models.weights.kept import plain

UNIT_EPS: Final = 1e-6
BLOCK: Final = 8


class State(NamedTuple):
    """The states of some sequences, float32 [sequences, heads, keys, values], and the channels of
    the tokens before, [sequences, kernel - 1, 3 * dim]."""

    matrix: Tensor
    channels: Tensor


class Delta(Mla):
    """It has no rows, so of attention to rows it has nothing but its name in a layer."""

    def __init__(self, config: ModelConfig, source: Source) -> None:
        own, hidden = config.recurrent, config.hidden_dim
        assert own is not None, "a layer of another kind"
        self._config, self._own = config, own
        self.head_count, dim = own.head_count, own.head_dim
        self._dim = wide = own.head_count * dim
        self._in = torch.cat([source.matrix(f"{part}_proj", wide, hidden) for part in "qkv"])
        kernels = [source.values(f"{part}_conv1d.weight", wide, 1, own.kernel) for part in "qkv"]
        self._kernel = torch.cat(kernels).squeeze(1)
        self._fade = [source.matrix("f_a_proj", dim, hidden), source.matrix("f_b_proj", wide, dim)]
        self._fade_base = source.vector("dt_bias", wide)
        self._fade_rate = source.vector("A_log", own.head_count).exp()[:, None]
        self._share = source.matrix("b_proj", own.head_count, hidden)
        self._gate = [source.matrix("g_a_proj", dim, hidden), source.matrix("g_b_proj", wide, dim)]
        self._norm = source.vector("o_norm.weight", dim)
        self._out = source.weight("o_proj", hidden, wide)

    @property
    def dtype(self) -> torch.dtype:
        return self._in.dtype

    @property
    def device(self) -> torch.device:
        return self._in.device

    def first(self) -> State:
        """The state of a sequence before its first token."""
        own = self._own
        shapes = own.matrix_shape, own.channel_shape
        return State(*(torch.zeros(1, *shape, device=self.device) for shape in shapes))

    def given(self, normed: Tensor) -> Tensor:
        """From the layer's normed input [tokens, hidden]: channels, how each fades, and shares,
        [tokens, 4 * dim + heads]."""
        faded = linear(linear(normed, self._fade[0]), self._fade[1]) + self._fade_base
        share = linear(normed, self._share).sigmoid()
        return torch.cat((linear(normed, self._in), self._faded(faded), share), -1)

    def _faded(self, raw: Tensor) -> Tensor:
        """The logarithm of what is kept of each key channel."""
        heads = raw.view(-1, self.head_count, self._own.head_dim)
        bound = self._own.decay_bound
        if bound is None:
            return (-self._fade_rate * F.softplus(heads)).flatten(1)
        return (bound * (self._fade_rate * heads).sigmoid()).flatten(1)

    def run(self, given: Tensor, state: State) -> tuple[Tensor, State]:
        """The values that each token reads, float32 [sequences, tokens, heads, dim], and the states
        after the last tokens; `given` is [sequences, tokens, ...]."""
        wide, heads, count = self._dim, self.head_count, given.shape[1]
        raw, fades, shares = torch.split(given, [3 * wide, wide, heads], -1)
        channels = torch.cat((state.channels, raw), 1)
        parts = self._summed(channels, count).view(*given.shape[:2], 3, heads, -1).unbind(2)
        queries, keys = (_unit(part) for part in parts[:2])
        queries, fades = queries * self._own.head_dim**-0.5, fades.view_as(keys)
        tokens = (queries, keys, parts[2], fades, shares[..., None])
        blocks = (torch.split(each.transpose(1, 2), BLOCK, 2) for each in tokens)
        matrix, reads = state.matrix, []
        for block in zip(*blocks, strict=True):
            read, matrix = _through(matrix, *block)
            reads.append(read)
        return torch.cat(reads, 2).transpose(1, 2), State(matrix, channels[:, count:])

    def _summed(self, channels: Tensor, count: int) -> Tensor:
        """Sums over each of the last `count` tokens and those before it."""
        first, *others = self._kernel.T
        summed = channels[:, :count] * first
        for at, tap in enumerate(others, 1):
            summed.addcmul_(channels[:, at : at + count], tap)
        return F.silu(summed)

    def read(self, normed: Tensor, told: Tensor) -> Tensor:
        """[tokens, hidden] of what tokens have read; gates are made of the layer's normed input."""
        gates = linear(linear(normed, self._gate[0]), self._gate[1]).sigmoid().view_as(told)
        values = rms_norm(told, self._norm, self._config.norm_eps) * gates
        return linear(values.flatten(1), plain(self._out))


class RecurrentLayer(MixedLayer):
    """`attended`, the input of its output projection, is what the tokens have read from the
    state."""

    has_rows = False

    @property
    def delta(self) -> Delta:
        assert isinstance(self.mla, Delta), "a layer of another kind"
        return self.mla

    def first_state(self) -> decoder.State:
        return self.delta.first()._asdict()

    def carry(self, hidden: Tensor, state: decoder.State) -> tuple[Tensor, decoder.State]:
        given = self.delta.given(self.normed(hidden.flatten(0, 1)))
        read, after = self.delta.run(given.view(*hidden.shape[:2], -1), State(**state))
        return read, after._asdict()

    def _attention(self, config: ModelConfig, source: Source, tp: int) -> Mla:
        return Delta(config, source)

    def made(self, normed: Tensor, attended: Tensor) -> Tensor:
        return self.delta.read(normed, attended)


def _through(
    matrix: Tensor, queries: Tensor, keys: Tensor, values: Tensor, fades: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    """A block of tokens, each [sequences, heads, tokens, dim]: what they read, and the matrix
    behind them. `seen[t, i]` is what of key i is left at t; where i comes later it is finite, and
    cut off."""
    count, faded = keys.shape[2], fades.cumsum(2)
    kept, asked = faded.exp(), torch.stack((keys, queries), -1)
    seen = (faded[:, :, :, None] - faded[:, :, None]).clamp_(max=0).exp_().mul_(keys[:, :, None])
    of_keys, of_queries = (each.tril() for each in (seen @ asked).unbind(-1))
    recalled = torch.cat((keys * kept, queries * kept), 2) @ matrix
    stored, read = torch.split(recalled, count, 2)
    changes = shares * (values - stored)
    if count > 1:
        own = shares * of_keys
        changes = torch.linalg.solve_triangular(own, changes, upper=False, unitriangular=True)
    new, left = matrix * kept[:, :, -1, :, None], seen[:, :, -1].transpose(2, 3)
    new.view(-1, *new.shape[2:]).baddbmm_(left.flatten(0, 1), changes.flatten(0, 1))
    return read + of_queries @ changes, new


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + UNIT_EPS).sqrt()


def layer_of(
    config: ModelConfig, source: Source, number: int, **place: Unpack[LayerPlace]
) -> MixedLayer:
    """The door counts layers with rows alone; one without has the number of the next."""
    kind = RecurrentLayer if number in config.recurrent_layers else MixedLayer
    layer = kind(config, source, number, **place)
    layer.number = sum(each < number for each in config.row_layers)
    return layer
