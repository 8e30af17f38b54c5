"""How the GPUs of one deployment share a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput

GATHERING_GPUS: Final = 8
"""Frameworks gather the tokens of at most this many GPUs on all of them; more GPUs send theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Attention divided by heads (TP) and by requests (DP), experts kept whole (EP) and in parts
    (TP), layers in stages (PP). Within a stage the same GPUs do attention and experts.

    `is_sending`: tokens go to the GPUs of their experts (DeepEP), instead of being gathered on all.
    By default stages of more than 8 GPUs send and smaller ones gather, as the frameworks do.

    >>> Parallel.wide(32).gpu_count, Parallel(attention_tp=8, expert_tp=8, pp=2).gpu_count
    (32, 16)
    """

    attention_tp: int = 1
    attention_dp: int = 1
    expert_ep: int = 1
    expert_tp: int = 1
    pp: int = 1
    is_sending: bool | None = None

    def __post_init__(self) -> None:
        if min(self.attention_tp, self.attention_dp, self.expert_ep, self.expert_tp, self.pp) < 1:
            raise BadInput(f"{self}: every size must be 1 or more")
        if self.is_sending and not self.can_send:
            raise BadInput(f"{self}: tokens are sent to whole experts, from groups of their own")
        if self.stage_gpus != self.expert_ep * self.expert_tp:
            raise BadInput(
                f"attention TP {self.attention_tp} x DP {self.attention_dp} are {self.stage_gpus} "
                f"GPUs, experts EP {self.expert_ep} x TP {self.expert_tp} are "
                f"{self.expert_ep * self.expert_tp}: both must be the GPUs of one stage"
            )

    @classmethod
    def wide(cls, gpu_count: int) -> Parallel:
        """Requests and experts over all GPUs, heads and layers undivided."""
        return cls(attention_dp=gpu_count, expert_ep=gpu_count)

    @property
    def name(self) -> str:
        """
        >>> Parallel(attention_tp=8, expert_tp=8).name, Parallel.wide(32).name
        ('TP8 x DP1, TP8', 'TP1 x DP32, EP32')
        """
        experts = [f"EP{self.expert_ep}"] if self.expert_ep > 1 or self.expert_tp == 1 else []
        experts += [f"TP{self.expert_tp}"] if self.expert_tp > 1 else []
        stages = f", PP{self.pp}" if self.pp > 1 else ""
        return f"TP{self.attention_tp} x DP{self.attention_dp}, {' x '.join(experts)}{stages}"

    @property
    def can_send(self) -> bool:
        return self.expert_tp == 1 and self.attention_dp > 1

    @property
    def sends(self) -> bool:
        return self.can_send and (self.is_wide if self.is_sending is None else self.is_sending)

    @property
    def is_wide(self) -> bool:
        """Whether a stage has more GPUs than gather their tokens."""
        return self.stage_gpus > GATHERING_GPUS

    @property
    def stage_gpus(self) -> int:
        return self.attention_tp * self.attention_dp

    @property
    def gpu_count(self) -> int:
        return self.stage_gpus * self.pp

    def __str__(self) -> str:
        return (
            f"attention TP{self.attention_tp} DP{self.attention_dp}, "
            f"experts EP{self.expert_ep} TP{self.expert_tp}, PP{self.pp}"
        )
