"""Routed experts of one layer on one GPU, and the exchange of tokens with them.

    sent        every GPU sends its own tokens to the GPUs of the experts they chose (DeepEP), and
                runs its own experts for all of them
    gathered    all tokens are on every GPU, by TP attention or a gather; each GPU runs its part of
                every expert, or its own experts, and the results are added up

Experts of more than 8 GPUs are spread with redundant copies, as in every published wide deployment,
so loads are nearly even (the tables' power law 0.6); those of fewer are not (1.01).

Exchanges over NVLink were measured on 8 GPUs. In a rack where more share it, more of the bytes
leave their GPU: (n - 1) / n of them, so 1.125 times as many on 64 GPUs as on 8. TensorRT-LLM's
exchange on GB200, which the package has for up to 64 GPUs, takes 1.16 to 1.17 times as long there
at 768 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

from ess.errors import BadInput
from ess.sim.operators.families import Family
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.silicon.bank import Bank
from ess.sim.operators.silicon.chip import Chip
from ess.sim.operators.silicon.choices import choices
from ess.sim.operators.silicon.host import HOP_US, NIC_RATE, PRODUCT_SHARE, STATE_BYTES
from ess.sim.operators.stages import MicroBatch
from ess.sim.operators.tables import Curve, nearest

MEASURED_HIDDEN: Final = 7168
BULK_TOKENS: Final = 1024
NEAR_MEASURED: Final = 8
"""The most GPUs on one NVLink whose exchanges were measured."""

SPREAD: Final = "power_law_0.6"
UNEVEN: Final = "power_law_1.01"


class ExchangeTime(NamedTuple):
    """Microseconds there and back: on the wire, and while kernels of the exchange hold the GPU."""

    dispatch: float
    combine: float
    send: float
    join: float


@dataclass(frozen=True, kw_only=True)
class Experts:
    bank: Bank
    chip: Chip
    family: Family
    parallel: Parallel
    balance: str | None = None

    def us(self, shape: MicroBatch) -> float:
        """Time of the experts; tokens of all groups share all experts of the stage."""
        tokens = shape.stage_tokens
        if self.parallel.sends:
            us = self._wide_us(tokens, is_bulk=_is_bulk(shape))
        else:
            us = self._fused_us(tokens)
        chosen = self.family.experts_each * tokens / self.parallel.stage_gpus
        weights = 3 * self.family.layout.hidden_dim * self.family.expert_dim
        return self.chip.us(us, fp8_flop=2 * weights * chosen)

    def shared_us(self, shape: MicroBatch, alone_us: float) -> float:
        """Time of the shared expert. With sent tokens it is a kernel of its own; with gathered ones
        the routed experts' kernel runs it as one more expert, with its operations."""
        if self.parallel.sends:
            return alone_us
        touched = min(self.family.expert_count, self.family.experts_each * shape.stage_tokens)
        weights = 3 * self.family.layout.hidden_dim * self.family.expert_dim
        each = shape.stage_tokens / self.parallel.stage_gpus
        flop_us = 2 * weights * each / (PRODUCT_SHARE * self.chip.machine.fp8_rate)
        return self.us(shape) / max(1.0, touched) + flop_us

    def way(self, shape: MicroBatch) -> ExchangeTime:
        if self.parallel.sends:
            return self._sent(shape)
        if self.parallel.attention_dp == 1:
            return ExchangeTime(
                0.0, 0.0, 0.0, self.reduced_us(shape.stage_tokens, self.parallel.stage_gpus)
            )
        return self._gathered(shape.stage_tokens)

    def reduced_us(self, tokens: float, gpus: int) -> float:
        """Time to sum the states of all tokens over the GPUs of an NVLink, and over the network."""
        if gpus == 1:
            return 0.0
        moved = tokens * self.family.layout.hidden_dim * STATE_BYTES
        near = min(gpus, NEAR_MEASURED)
        us = self.chip.by_node * self.bank.reduce[(float(_power_above(near)),)].at(moved)
        return us + self._beyond_us(gpus, moved)

    def _beyond_us(self, gpus: int, moved: float) -> float:
        """Time for every node's sum to reach every other; each GPU of a node sends its share."""
        machine = self.chip.machine
        nodes = machine.groups_linked(gpus)
        if nodes == 1:
            return 0.0
        rate, share = NIC_RATE / self.chip.nic_gpus, moved / machine.linked_gpus
        return HOP_US * math.log2(nodes) + 2 * share * (nodes - 1) / nodes / rate

    def _gathered(self, tokens: float) -> ExchangeTime:
        gpus = self.parallel.stage_gpus
        moved = tokens * self.family.layout.hidden_dim * STATE_BYTES
        near = float(_power_above(min(gpus, NEAR_MEASURED)))
        dispatch, combine = (
            self.chip.by_node * self.bank.gather[verb, near].at(moved)
            for verb in ("all_gather", "reduce_scatter")
        )
        beyond_us = self._beyond_us(gpus, moved)
        return ExchangeTime(beyond_us, beyond_us, dispatch, combine)

    def _sent(self, shape: MicroBatch) -> ExchangeTime:
        """Over NVLink all of the exchange is its kernels' work, without waiting on a wire.
        Between nodes kernels work as long; the rest of the time is waiting."""
        tokens = shape.sending_tokens
        tables = self.bank.bulk if _is_bulk(shape) else self.bank.exchange
        nodes = self.chip.machine.groups_linked(self.parallel.stage_gpus)
        wide = self.family.layout.hidden_dim / MEASURED_HIDDEN
        send, join = (wide * curve.at(tokens) for curve in tables[1])
        if nodes == 1:
            near = self.chip.by_node * _leaving(self.parallel.stage_gpus)
            return ExchangeTime(0.0, 0.0, near * send, near * join)
        dispatch, combine = (
            wide * self._linked_us(curve, tokens) for curve in nearest(tables, nodes)
        )
        return ExchangeTime(max(0.0, dispatch - send), max(0.0, combine - join), send, join)

    def _linked_us(self, curve: Curve, tokens: float) -> float:
        """Time of an exchange between nodes. All beyond its least time is spent on bytes of a NIC:
        in the tables they pass at 45 to 53 GB/s, and a NIC has 50."""
        least_us = curve.times[0]
        moved_us = curve.at(tokens) - least_us
        return self.chip.by_link * (least_us + self.chip.nic_gpus * moved_us)

    def _wide_us(self, tokens: float, *, is_bulk: bool) -> float:
        """Linear in the experts per GPU between the measured numbers of GPUs."""
        table = self.bank.wide_experts_prompt if is_bulk else self.bank.wide_experts
        each, count = tokens / self.parallel.expert_ep, self.family.expert_count
        by_experts = sorted(
            (count / ranks, curve.at(each * ranks))
            for (ranks, balance), curve in table.items()
            if balance == self.loads and not isinstance(ranks, str)
        )
        us = Curve(*zip(*by_experts, strict=True)).at(math.ceil(count / self.parallel.expert_ep))
        return us * self.family.layout.hidden_dim / MEASURED_HIDDEN

    @property
    def loads(self) -> str:
        """How tokens fall on the GPUs that have whole experts."""
        return self.balance or (SPREAD if self.parallel.is_wide else UNEVEN)

    def _fused_us(self, tokens: float) -> float:
        parallel, model = self.parallel, _width(self.family)
        key = (model, float(parallel.expert_ep), float(parallel.expert_tp))
        curve = self.bank.fused_experts.get(key)
        if curve is None:
            known = [key[1:] for key in self.bank.fused_experts if key[0] == model]
            measured = "; ".join(f"EP {ep} with TP {tp}" for ep, tp in choices(known))
            raise BadInput(
                f"experts on {parallel.stage_gpus} GPUs (EP {parallel.expert_ep} x TP "
                f"{parallel.expert_tp}) were not measured; measured were {measured}"
            )
        return curve.at(tokens)


def _width(family: Family) -> str:
    return "deepseek" if family.layout.hidden_dim == MEASURED_HIDDEN else "glm"


def _is_bulk(shape: MicroBatch) -> bool:
    """Whether prompts' exchange is used: with prompts, or too many tokens for decode's."""
    return bool(shape.prompt_tokens) or shape.sending_tokens > BULK_TOKENS


def _leaving(gpus: int) -> float:
    """The bytes that leave their GPU, over those on as many GPUs as were measured.

    >>> _leaving(4), _leaving(8), _leaving(64)
    (1.0, 1.0, 1.125)
    """
    return (1 - 1 / max(gpus, NEAR_MEASURED)) / (1 - 1 / NEAR_MEASURED)


def _power_above(count: int) -> int:
    return 1 << (count - 1).bit_length()
