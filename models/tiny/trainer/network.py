"""The embedded model in its training form: un-absorbed MLA, indexer, MoE, one MTP module.

Parameters carry the names of the published checkpoint, except that the experts of a layer are
stacked (export.py takes them apart). Masters are fp32 in the optimiser; modules run in bf16, save
for the gate and the indexer's head weights, which the published model keeps wide as well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ess.models.tiny.trainer.attention import attend, causal_mask
from ess.models.tiny.trainer.experts import Mlp, Moe
from ess.models.tiny.trainer.fuse import fused
from ess.models.tiny.trainer.shape import ModelShape

Mode = Literal["dense", "warm", "sparse"]
QUERY_CHUNK = 256


def rope_tables(shape: ModelShape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, rope / 2] of YaRN: fast pairs as they are, slow ones stretched."""
    pairs = torch.arange(0, shape.rope, 2).float()
    plain = shape.rope_base ** (-pairs / shape.rope)

    def pair_turning(turns: float) -> float:
        ratio = shape.rope_original / (turns * 2 * math.pi)
        return shape.rope * math.log(ratio) / (2 * math.log(shape.rope_base))

    low = max(math.floor(pair_turning(32)), 0)
    high = min(math.ceil(pair_turning(1)), shape.rope - 1)
    ramp = ((torch.arange(shape.rope // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    angle = torch.outer(torch.arange(length).float(), plain * (1 - ramp + ramp / shape.rope_factor))
    return angle.cos(), angle.sin()


def softmax_scale(shape: ModelShape) -> float:
    stretch = 0.1 * math.log(shape.rope_factor) + 1
    return float((shape.nope + shape.rope) ** -0.5 * stretch * stretch)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Main attention: interleaved pairs (x0, x1), (x2, x3)."""
    first, second = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), -1)
    return turned.flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Indexer: half-split pairs (x_i, x_{i + n/2})."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


@fused
def scaled_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * weight.float()).to(x.dtype)


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return scaled_norm(x, self.weight, self.eps)


def linear(width_in: int, width_out: int) -> nn.Linear:
    return nn.Linear(width_in, width_out, bias=False)


@dataclass(slots=True)
class Trace:
    """What one pass leaves behind per layer: indexer losses and captured attention mass."""

    losses: list[Tensor] = field(default_factory=list)
    captured: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    measure: bool = False


@fused
def weighted_relu(pair: Tensor, weight: Tensor) -> Tensor:
    """The heads' scores [batch, head, query, key] under their weights [batch, query, head]."""
    return (F.relu(pair).float() * weight.transpose(1, 2)[..., None]).sum(1)


class Indexer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.wq_b = linear(shape.query_rank, shape.index_head_count * shape.index_dim)
        self.wk = linear(shape.hidden, shape.index_dim)
        self.k_norm = nn.LayerNorm(shape.index_dim, eps=1e-6)
        self.weights_proj = linear(shape.hidden, shape.index_head_count)

    def forward(self, x: Tensor, query: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Scores of every pair [batch, query, key], fp32, not yet causal."""
        shape, rope = self.shape, self.shape.rope
        batch, length, _ = x.shape
        q = self.wq_b(query).view(batch, length, shape.index_head_count, shape.index_dim)
        k = self.k_norm(self.wk(x))
        turned = rotate_halves(q[..., :rope], cos[:, None], sin[:, None])
        q = torch.cat((turned, q[..., rope:]), -1)
        k = torch.cat((rotate_halves(k[..., :rope], cos, sin), k[..., rope:]), -1)
        weight = F.linear(x.float(), self.weights_proj.weight.float())
        weight = weight * (shape.index_head_count**-0.5 * shape.index_dim**-0.5)
        return weighted_relu(q.transpose(1, 2) @ k.transpose(1, 2)[:, None], weight)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        heads, key = shape.head_count, shape.nope + shape.rope
        self.q_a_proj = linear(shape.hidden, shape.query_rank)
        self.q_a_layernorm = RmsNorm(shape.query_rank, shape.norm_eps)
        self.q_b_proj = linear(shape.query_rank, heads * key)
        self.kv_a_proj_with_mqa = linear(shape.hidden, shape.latent + shape.rope)
        self.kv_a_layernorm = RmsNorm(shape.latent, shape.norm_eps)
        self.kv_b_proj = linear(shape.latent, heads * (shape.nope + shape.value))
        self.o_proj = linear(heads * shape.value, shape.hidden)
        self.indexer = Indexer(shape)
        self.scale = softmax_scale(shape)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The query latent, then q, k, v as [batch, head, position, dim]."""
        shape, nope = self.shape, self.shape.nope
        batch, length, _ = x.shape
        latent_q = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(latent_q).view(batch, length, shape.head_count, -1)
        q_rope = rotate_pairs(q[..., nope:], cos[:, None], sin[:, None])
        q = torch.cat((q[..., :nope], q_rope), -1).transpose(1, 2)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([shape.latent, shape.rope], -1)
        both = self.kv_b_proj(self.kv_a_layernorm(latent))
        both = both.view(batch, length, shape.head_count, -1).transpose(1, 2)
        k_rope = rotate_pairs(k_rope, cos, sin)[:, None].expand(-1, shape.head_count, -1, -1)
        return latent_q, q, torch.cat((both[..., :nope], k_rope), -1), both[..., nope:]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mode: Mode, trace: Trace) -> Tensor:
        batch, length, _ = x.shape
        latent_q, q, k, v = self.project(x, cos, sin)
        mask = causal_mask(length, x.device)
        if mode != "dense":
            chosen = self._select(x, latent_q, q, k, cos, sin, mode, trace)
            mask = chosen if mode == "sparse" else mask
        out = attend(q, k, v, mask, scale=self.scale)
        heads = out.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(heads)  # type: ignore[no-any-return]

    def _select(
        self,
        x: Tensor,
        latent_q: Tensor,
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        mode: Mode,
        trace: Trace,
    ) -> Tensor:
        """The additive mask of the selection; on the way, the indexer's loss and its measures.

        The indexer sees detached inputs: it learns to imitate attention and moves nothing else.
        Warm-up imitates all of it, the sparse stage only what was selected.
        """
        length = x.shape[1]
        learns = torch.is_grad_enabled() or mode == "warm"
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        with torch.set_grad_enabled(learns):
            score = self.indexer(x.detach(), latent_q.detach(), cos, sin)
            score = score.masked_fill(~causal, float("-inf"))
            kept = min(self.shape.top_k, length)
            chosen = torch.zeros_like(score, dtype=torch.bool)
            chosen = chosen.scatter_(-1, score.detach().topk(kept, -1)[1], True) & causal
            if learns or trace.measure:
                target = self._mean_attention(q, k, causal)
            if learns:
                within = causal if mode == "warm" else chosen
                trace.losses.append(_imitation_loss(target, score, within))
        if trace.measure and length > kept:
            _measure(trace, target, chosen, kept)
        return torch.zeros_like(score).masked_fill_(~chosen, float("-inf"))[:, None].detach()

    @torch.no_grad()
    def _mean_attention(self, q: Tensor, k: Tensor, causal: Tensor) -> Tensor:
        """Attention averaged over heads, fp32, a chunk of queries at a time."""
        rows = []
        for start in range(0, q.shape[2], QUERY_CHUNK):
            part = slice(start, start + QUERY_CHUNK)
            pair = (q[:, :, part] @ k.transpose(2, 3)).float() * self.scale
            rows.append(pair.masked_fill_(~causal[part], float("-inf")).softmax(-1).mean(1))
        return torch.cat(rows, 1)


@fused
def _imitation_loss(target: Tensor, score: Tensor, within: Tensor) -> Tensor:
    """KL(attention || softmax of the scores), both over the pairs in `within`."""
    aim = target * within
    aim = aim / aim.sum(-1, keepdim=True).clamp_min(1e-9)
    logs = score.masked_fill(~within, float("-inf")).log_softmax(-1).masked_fill(~within, 0.0)
    return (torch.xlogy(aim, aim) - aim * logs).sum(-1).mean()


def _measure(trace: Trace, target: Tensor, chosen: Tensor, kept: int) -> None:
    rows = slice(kept, None)
    trace.captured.append((target * chosen)[:, rows].sum(-1).mean().item())
    trace.best.append(target.topk(kept, -1)[0][:, rows].sum(-1).mean().item())


class Layer(nn.Module):
    def __init__(self, shape: ModelShape, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.mlp: nn.Module = Mlp(shape.hidden, shape.dense_width) if dense else Moe(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mode: Mode, trace: Trace) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mode, trace)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class SharedHead(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)


class MtpLayer(Layer):
    """Row p joins the hidden state of p with the embedding of token p + 1 and drafts p + 2."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, dense=False)
        self.enorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.hnorm = RmsNorm(shape.hidden, shape.norm_eps)
        self.eh_proj = linear(2 * shape.hidden, shape.hidden)
        self.shared_head = SharedHead(shape)

    def draft(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, mode: Mode, trace: Trace
    ) -> Tensor:
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        finished = self(joined, cos, sin, mode, trace)
        return self.shared_head.norm(finished)  # type: ignore[no-any-return]


class Trunk(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        plain = [
            Layer(shape, dense=at < shape.dense_layer_count) for at in range(shape.layer_count)
        ]
        mtp = [MtpLayer(shape) for _ in range(shape.mtp_layer_count)]
        self.layers = nn.ModuleList([*plain, *mtp])
        self.norm = RmsNorm(shape.hidden, shape.norm_eps)


class Network(nn.Module):
    """Hidden states in, hidden states out; the losses own the head, which is the costly part."""

    def __init__(self, shape: ModelShape, *, length_max: int = 4096) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = linear(shape.hidden, shape.vocabulary)
        cos, sin = rope_tables(shape, length_max)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self._start()

    def _start(self) -> None:
        for name, weight in self.named_parameters():
            if weight.dim() < 2 or name.endswith("gate.weight"):
                continue
            spread = 0.02 if "embed" in name else weight.shape[-1] ** -0.5
            residual = any(part in name for part in ("o_proj", "down"))
            nn.init.normal_(weight, 0.0, spread * (0.5 if residual else 1.0))
        nn.init.zeros_(self.lm_head.weight)

    def forward(
        self, tokens: Tensor, *, mode: Mode = "dense", trace: Trace | None = None
    ) -> Tensor:
        """The hidden states after the final norm [batch, position, hidden]."""
        trace = trace if trace is not None else Trace()
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers[: self.shape.layer_count]:
            x = layer(x, cos, sin, mode, trace)
        return self.model.norm(x)  # type: ignore[no-any-return]

    def draft(
        self, hidden: Tensor, following: Tensor, *, mode: Mode, trace: Trace | None = None
    ) -> Tensor:
        """The MTP module's hidden states: `following[:, p]` is the token after `hidden[:, p]`."""
        trace = trace if trace is not None else Trace()
        cos, sin = self.cos[: hidden.shape[1]], self.sin[: hidden.shape[1]]
        layer = self.model.layers[self.shape.layer_count]
        assert isinstance(layer, MtpLayer)
        return layer.draft(hidden, self.model.embed_tokens(following), cos, sin, mode, trace)
