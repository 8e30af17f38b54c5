"""Decode of a model that attends to entries (DeepSeek-V4): offload against everything resident.

A small model of random weights, all ways in turn, the same tokens. On a CPU both tiers are DRAM, so
this shows the cost of offload: planning, copies and one more partial. Random weights choose entries
at random and draft wrong tokens: the misses and accepted drafts here say nothing about a trained
model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from ess.bench.harness.lists import shares, size
from ess.bench.harness.prefix import check_memory
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.models.weights.expected.shapes import expected_tensors
from ess.units import PAGE_ROWS, div_ceil

SMALL: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "head_dim": 128,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "index_n_heads": 16,
    "index_head_dim": 32,
    "index_topk": 64,
    "sliding_window": 64,
    "compress_ratios": [0, 4, 128, 4, 128, 4],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
}
WARM_UP_STEPS: Final = 3
ROWS: Final = "f32"


@dataclass(frozen=True, slots=True)
class EntriesWay:
    """A way with slots for `share` of all entries."""

    name: str
    share: float
    mode: str


RESIDENT: Final = EntriesWay("resident", 1.0, "resident")
MODES: Final = ("none", "da")


class EntriesArm:
    """An engine that decodes a batch in one way, its steps timed."""

    def __init__(
        self, model: Model, way: EntriesWay, prompts: Sequence[Sequence[int]], steps: int, mtp: int
    ) -> None:
        kept = msgspec.structs.replace(model.config, mtp_layer_count=int(mtp > 1))
        layout = kept.layout(row=ROWS)
        most = mtp * (WARM_UP_STEPS + steps + 1)
        longest = len(prompts[0]) + most
        pages = len(prompts) * layout.pages_of(longest)
        chunks = max(1, round(way.share * pages)) + (way.share == 1)
        self.way, self.layout, self.samples = way, layout, list[float]()
        self.offload = Offload.create(
            layout,
            slot_bytes=chunks * layout.group_count * layout.page_bytes,
            host_bytes=(pages + 1) * layout.host_page_bytes,
            length_max=longest,
            sequence_max=len(prompts),
            slot_floor=max(1, chunks * PAGE_ROWS // len(prompts)),
        )
        config = EngineConfig(modes=way.mode, mtp=mtp, max_running=len(prompts), budget_every=0)
        self.engine = Engine(model, self.offload, config)
        sampling = Sampling(tokens_max=most, ignore_eos=True)
        self.requests: list[Request] = [self.engine.add([*p], sampling) for p in prompts]
        while any(request.state != "decoding" for request in self.requests):
            self.engine.step()
        for _ in range(WARM_UP_STEPS):
            self.engine.step()
        self._before, self._made = self._counts(), self._made_count()
        self.missed_share = 0.0

    def step(self) -> None:
        started_s = time.perf_counter()
        self.engine.step()
        self.samples.append((time.perf_counter() - started_s) * 1e3)

    def close(self) -> None:
        """Its figures stay."""
        missed, asked = np.subtract(self._counts(), self._before)
        self.missed_share = float(missed / asked)
        self.offload.close()

    def kept_drafts(self) -> float:
        """Drafts kept in a step, per request."""
        tokens = self._made_count() - self._made
        return tokens / (len(self.requests) * len(self.samples)) - 1

    def _counts(self) -> tuple[int, int]:
        """Entries that were missing, and all that were requested."""
        stats = self.offload.stats()
        missed = int(stats.miss_count.sum() + stats.place_count.sum())
        return missed, missed + int(stats.hit_count.sum())

    def _made_count(self) -> int:
        return sum(len(request.output) for request in self.requests)


@compute_threads()
def entries_benchmark(
    *,
    ctx: str = "4k",
    batch: str = "4",
    ratio: str = "0.25,0.5",
    mtp: str = "1",
    smoke: bool = False,
) -> list[Row]:
    """Decode of a model that attends to entries: offload against everything resident.

    Parameters
    ----------
    ctx
        Tokens of each prompt.
    batch
        Requests that decode together.
    ratio
        Slots, as shares of all entries.
    mtp
        Tokens of each request that a step verifies.
    """
    context, count, verified = size("--ctx", ctx), size("--batch", batch), size("--mtp", mtp)
    asked, steps = shares("--ratio", ratio), 24
    if smoke:
        context, count, asked, steps = 520, 2, [0.5], 2
    config = read_config(SMALL)
    check_memory(context * count, config.layout(row=ROWS))
    model = build(config, drawn(config).__getitem__)
    noise = torch.Generator().manual_seed(2)
    prompts = torch.randint(config.vocab_size, (count, context), generator=noise).tolist()
    ways = [EntriesWay(f"{mode} {share:g}", share, mode) for share in asked for mode in MODES]
    whole, *others = (EntriesArm(model, way, prompts, steps, verified) for way in (RESIDENT, *ways))
    alone = [EntriesArm(model, RESIDENT, prompts, steps, 1)] if verified > 1 else []
    _take_turns([whole, *others, *alone], steps)
    named = {"batch": count, "context": context, "mtp": verified}
    return [
        _bytes(whole.layout, context),
        *(row for arm in alone for row in _drafts(whole, arm, named)),
        *(row for arm in others for row in (_step(arm, whole, named), _missed(arm, named))),
    ]


def _take_turns(arms: Sequence[EntriesArm], steps: int) -> None:
    for _ in range(steps):
        for arm in arms:
            arm.step()
    made = [[request.output[:steps] for request in arm.requests] for arm in arms]
    assert all(each == made[0] for each in made), "offload or drafts changed a token"
    for arm in arms:
        arm.close()


def _drafts(whole: EntriesArm, alone: EntriesArm, named: Mapping[str, Any]) -> list[Row]:
    kept, config = whole.kept_drafts(), dict(named)
    step = compare(
        name="step with drafts, all resident",
        unit="ms",
        ours=whole.samples,
        baseline=("one token", alone.samples),
        config=config,
    )
    return [step, Row(name="drafts kept in a step", value=kept, unit="tokens", config=config)]


def _step(arm: EntriesArm, whole: EntriesArm, named: Mapping[str, Any]) -> Row:
    return compare(
        name=f"step: {arm.way.name} of the entries in slots",
        unit="ms",
        ours=arm.samples,
        baseline=("all resident", whole.samples),
        config=named,
    )


def _missed(arm: EntriesArm, named: Mapping[str, Any]) -> Row:
    share, config = arm.missed_share, {**named, "mode": arm.way.mode}
    return Row(name=f"missing: {arm.way.name}", value=100 * share, unit="%", config=config)


def _bytes(layout: ModelLayout, context: int) -> Row:
    """The share of what a request keeps (rows, keys, states) that only the host holds."""
    rows = layout.rows_of(context) * layout.token_row_bytes
    keys = div_ceil(layout.rows_of(context) * layout.key_page_bytes, PAGE_ROWS)
    total = rows + keys + layout.request_state_bytes(context)
    return Row(
        name="a request's bytes that may be offloaded",
        value=100 * rows / total,
        unit="%",
        config={"context": context, "rows": rows, "keys": keys, "all": total},
    )


def drawn(config: ModelConfig) -> dict[str, Tensor]:
    noise, weights = torch.Generator().manual_seed(1), {}
    for spec in expected_tensors(config):
        if spec.role == "numbers":
            weights[spec.name] = torch.randint(config.expert_count, spec.shape, generator=noise)
        else:
            centre = 1.0 if spec.name.endswith("norm.weight") else 0.0
            weights[spec.name] = centre + 0.1 * torch.randn(spec.shape, generator=noise)
    return weights
