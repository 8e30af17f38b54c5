"""A second opinion in float64: no latent tricks, no growing state, the whole sequence every time.

Written from the formulas, not from ess.models: keys and values are expanded per head, the top-k is
a mask, experts run token by token. It reads raw config.json names and checkpoint names only.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Unabsorbed:
    def __init__(
        self, raw: dict[str, Any], weights: dict[str, Tensor], *, latent_eps: float | None = None
    ) -> None:
        self.raw = raw
        self.latent_eps = raw["rms_norm_eps"] if latent_eps is None else latent_eps
        self.weights = {name: weight.double() for name, weight in weights.items()}

    def hidden(self, tokens: list[int]) -> Tensor:
        """Finished hidden states of the main model."""
        x = self.weights["model.embed_tokens.weight"][tokens]
        seen = None
        for number in range(self.raw["num_hidden_layers"]):
            x, seen = self.layer(number, x, seen)
        return self.norm(x, "model.norm.weight", self.raw["rms_norm_eps"])

    def logits(self, finished: Tensor) -> Tensor:
        return finished @ self.weights["lm_head.weight"].T

    def drafts(self, tokens: list[int], known: int, count: int) -> list[int]:
        """`count` guesses after `known`, which follows `tokens`; greedy, chained."""
        states, following = self.hidden(tokens), [*tokens[1:], known]
        guesses: list[int] = []
        first = None
        while len(guesses) < count:
            finished, seen = self.mtp(states, following, last=first)
            if first is None and self.raw.get("index_share_for_mtp_iteration"):
                first = seen[-1]
            guesses.append(int(self.logits(finished[-1]).argmax()))
            states = torch.cat((states, finished[-1:]))
            following.append(guesses[-1])
        return guesses

    def mtp(
        self, states: Tensor, following: list[int], *, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """`last` overrides what the last position may see, as a mask over the first positions."""
        number, eps = self.raw["num_hidden_layers"], self.raw["rms_norm_eps"]
        prefix = f"model.layers.{number}."
        embedded = self.weights["model.embed_tokens.weight"][following]
        parts = [
            self.norm(embedded, prefix + "enorm.weight", eps),
            self.norm(states, prefix + "hnorm.weight", eps),
        ]
        x = torch.cat(parts, -1) @ self.weights[prefix + "eh_proj.weight"].T
        x, seen = self.layer(number, x, None, last=last)
        return self.norm(x, prefix + "shared_head.norm.weight", eps), seen

    def layer(
        self, number: int, x: Tensor, seen: Tensor | None, *, last: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        prefix, eps = f"model.layers.{number}.", self.raw["rms_norm_eps"]
        h = self.norm(x, prefix + "input_layernorm.weight", eps)
        query = self.norm(
            self.linear(h, prefix + "self_attn.q_a_proj"),
            prefix + "self_attn.q_a_layernorm.weight",
            self.latent_eps,
        )
        if prefix + "self_attn.indexer.wk.weight" in self.weights:
            seen = self.choose(prefix + "self_attn.indexer.", h, query)
        assert seen is not None
        if last is not None:
            seen = seen.clone()
            seen[-1] = F.pad(last, (0, len(x) - len(last)))
        x = x + self.attention(prefix + "self_attn.", h, query, seen)
        h = self.norm(x, prefix + "post_attention_layernorm.weight", eps)
        return x + self.mlp(prefix + "mlp.", h), seen

    def choose(self, prefix: str, h: Tensor, query: Tensor) -> Tensor:
        heads, dim = self.raw["index_n_heads"], self.raw["index_head_dim"]
        style = "interleaved" if self.raw["model_type"] == "glm_moe_dsa" else "half"
        rope = self.raw["qk_rope_head_dim"]
        q = self.linear(query, prefix + "wq_b").view(-1, heads, dim)
        k = F.layer_norm(
            self.linear(h, prefix + "wk"),
            (dim,),
            self.weights[prefix + "k_norm.weight"],
            self.weights[prefix + "k_norm.bias"],
            1e-6,
        )[:, None]
        q = torch.cat((self.rotate(q[..., :rope], style), q[..., rope:]), -1)
        k = torch.cat((self.rotate(k[..., :rope], style), k[..., rope:]), -1)[:, 0]
        weights = self.linear(h, prefix + "weights_proj") / math.sqrt(heads * dim)
        scores = torch.einsum("th,ths->ts", weights, torch.relu(q @ k.T))
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for position in range(len(h)):
            best = scores[position, : position + 1].topk(min(self.raw["index_topk"], position + 1))
            seen[position, best.indices] = True
        return seen

    def attention(self, prefix: str, h: Tensor, query: Tensor, seen: Tensor) -> Tensor:
        raw, heads = self.raw, self.raw["num_attention_heads"]
        nope, rope = raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
        latent, shared = self.linear(h, prefix + "kv_a_proj_with_mqa").split(
            [raw["kv_lora_rank"], rope], -1
        )
        latent = self.norm(latent, prefix + "kv_a_layernorm.weight", self.latent_eps)
        expanded = self.linear(latent, prefix + "kv_b_proj").view(len(h), heads, -1)
        key = torch.cat(
            (
                expanded[..., :nope],
                self.rotate(shared[:, None], "interleaved").expand(-1, heads, -1),
            ),
            -1,
        )
        q = self.linear(query, prefix + "q_b_proj").view(len(h), heads, nope + rope)
        q = torch.cat((q[..., :nope], self.rotate(q[..., nope:], "interleaved")), -1)
        scores = torch.einsum("thd,shd->hts", q, key) * self.scale()
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, expanded[..., nope:])
        return self.linear(mixed.flatten(1), prefix + "o_proj")

    def mlp(self, prefix: str, h: Tensor) -> Tensor:
        if prefix + "gate.weight" not in self.weights:
            return self.swiglu(prefix, h)
        return torch.stack([self.experts(prefix, token) for token in h])

    def experts(self, prefix: str, token: Tensor) -> Tensor:
        raw = self.raw
        scores = torch.sigmoid(self.linear(token, prefix + "gate"))
        choice = scores + self.weights[prefix + "gate.e_score_correction_bias"]
        groups = choice.view(raw["n_group"], -1)
        if raw["n_group"] > 1:
            strength = groups.topk(2).values.sum(-1)
            out = strength.argsort(descending=True)[raw["topk_group"] :]
            groups = groups.index_fill(0, out, -math.inf)
        chosen = groups.flatten().topk(raw["num_experts_per_tok"]).indices
        share = scores[chosen] / scores[chosen].sum() * raw["routed_scaling_factor"]
        result = self.swiglu(prefix + "shared_experts.", token)
        for expert, weight in zip(chosen.tolist(), share, strict=True):
            result = result + weight * self.swiglu(f"{prefix}experts.{expert}.", token)
        return result

    def swiglu(self, prefix: str, h: Tensor) -> Tensor:
        inner = F.silu(self.linear(h, prefix + "gate_proj")) * self.linear(h, prefix + "up_proj")
        return self.linear(inner, prefix + "down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[name + ".weight"].T

    def norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * self.weights[name]

    def rotate(self, x: Tensor, style: str) -> Tensor:
        """As complex numbers; x [positions, heads, rope]."""
        turns = torch.outer(torch.arange(len(x)).double(), self.frequencies())
        turn = torch.polar(torch.ones_like(turns), turns)[:, None]
        if style == "half":
            a, b = x.chunk(2, -1)
            turned = torch.complex(a.contiguous(), b.contiguous()) * turn
            return torch.cat((turned.real, turned.imag), -1)
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    def frequencies(self) -> Tensor:
        dim = self.raw["qk_rope_head_dim"]
        rope = self.raw.get("rope_parameters") or self.raw["rope_scaling"]
        base = rope.get("rope_theta", self.raw.get("rope_theta"))
        plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
        if "factor" not in rope:
            return torch.tensor(plain).double()
        length = rope["original_max_position_embeddings"]

        def pair(turns: float) -> float:
            return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = math.floor(pair(rope["beta_fast"])), math.ceil(pair(rope["beta_slow"]))
        slow = [min(max((i - max(low, 0)) / (high - max(low, 0)), 0), 1) for i in range(dim // 2)]
        blend = [f / rope["factor"] * s + f * (1 - s) for f, s in zip(plain, slow, strict=True)]
        return torch.tensor(blend).double()

    def scale(self) -> float:
        scale: float = (self.raw["qk_nope_head_dim"] + self.raw["qk_rope_head_dim"]) ** -0.5
        rope = self.raw.get("rope_parameters") or self.raw["rope_scaling"]
        if "factor" in rope:
            scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
        return scale
