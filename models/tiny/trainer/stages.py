"""What is trained when: four kinds of stages, their shares of the time, and their losses.

The trunk's learning rate is constant for the first part and then falls in a straight line to zero
at the end of the sparse stage, so a run of any length ends cooked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from ess.models.tiny.trainer.losses import cross_entropy, soft_cross_entropy
from ess.models.tiny.trainer.network import Network, Trace

Kind = Literal["lm", "warm", "sparse", "mtp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`share` is the part of the whole run's time; a step is `parts` passes of `rows` sequences."""

    name: str
    kind: Kind
    trains: Literal["trunk", "indexer", "all", "mtp"]
    share: float
    length: int
    rows: int
    parts: int
    muon_rate: float = 0.02
    adam_rate: float = 2e-3


STAGES: Final = (
    Stage(name="short", kind="lm", trains="trunk", share=0.40, length=256, rows=4, parts=4),
    Stage(name="long", kind="lm", trains="trunk", share=0.34, length=512, rows=4, parts=4),
    Stage(name="warm-up", kind="warm", trains="indexer", share=0.04, length=1024, rows=1, parts=2),
    Stage(name="sparse", kind="sparse", trains="all", share=0.12, length=1024, rows=2, parts=4),
    Stage(name="mtp", kind="mtp", trains="mtp", share=0.10, length=512, rows=4, parts=2),
)
DECAY_START: Final = 0.35
RAMP_STEPS: Final = 30


def rate_factor(stages: tuple[Stage, ...], at: int, progress: float, step: int) -> float:
    """The learning rate of stage `at` as a share of its full rate; `progress` runs 0..1 in it."""
    stage = stages[at]
    ramp = min(1.0, (step + 1) / RAMP_STEPS)
    if stage.kind in ("warm", "mtp"):
        return ramp * (1.0 - progress)
    trunk = [each.share if each.kind in ("lm", "sparse") else 0.0 for each in stages]
    run = (sum(trunk[:at]) + progress * stage.share) / sum(trunk)
    return (ramp if at == 0 else 1.0) * min(1.0, (1.0 - run) / (1.0 - DECAY_START))


def stage_loss(network: Network, stage: Stage, tokens: Tensor) -> tuple[Tensor, float]:
    """What to differentiate, and the number to report (nats per token, or KL of the indexer)."""
    trace = Trace()
    if stage.kind == "warm":
        with torch.no_grad():
            network(tokens[:, :-1], mode="warm", trace=trace)
        loss = torch.stack(trace.losses).sum()
        return loss, loss.item() / len(trace.losses)
    if stage.kind == "mtp":
        return _draft_loss(network, tokens, trace)
    hidden = network(tokens[:, :-1], mode="dense" if stage.kind == "lm" else "sparse", trace=trace)
    loss = cross_entropy(hidden, network.lm_head.weight, tokens[:, 1:])
    return loss + sum(trace.losses), loss.item()


def _draft_loss(network: Network, tokens: Tensor, trace: Trace) -> tuple[Tensor, float]:
    """The draft imitates the distribution the trunk will have one token later.

    Acceptance is agreement with the trunk, not with the text, so the trunk's own prediction is
    the better teacher; it is frozen and costs one forward pass. The module's indexer warms up
    beside it, and attends densely meanwhile.
    """
    with torch.no_grad():
        hidden = network(tokens[:, :-1], mode="sparse")
    drafted = network.draft(hidden[:, :-1], tokens[:, 1:-1], mode="warm", trace=trace)
    head = network.lm_head.weight.detach()
    loss = soft_cross_entropy(drafted, head, hidden[:, 1:])
    return loss + sum(trace.losses), loss.item()
