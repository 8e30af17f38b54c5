"""The interface of operators to a decode step: the stages of a layer, and the time around them.

Two sets of constants implement it, which share measured tables alone: `paper` reproduces a
publication, `silicon` consists of measured operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ess import cost
from ess.cost import Hiding
from ess.sim.operators.families import Family, Kind
from ess.sim.operators.parallel import Parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a GPU that are not measured: nominal rates, in bytes or FLOP per
    microsecond, memory, and how many GPUs share an NVLink: those of a node, or of a rack."""

    memory_bytes: int = 151_397_597_184
    hbm_rate: float = 0.8 * 4.8e6
    fp8_rate: float = 1978e6
    sparse_rate: float = 410e6
    launch_us: float = 3.0
    link_rate: float = cost.bytes_per_us(37.0)
    store_rate: float = cost.bytes_per_us(43.0)
    linked_gpus: int = 8

    def groups_linked(self, gpus: int) -> int:
        """The fewest groups that share an NVLink; the network joins them.

        >>> [Machine().groups_linked(gpus) for gpus in (1, 8, 9)]
        [1, 1, 2]
        """
        return math.ceil(gpus / self.linked_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of one layer, as one attention group of `parallel.attention_tp` GPUs sees it.

    `request_count` is a mean over groups and may be below 1: some groups then have no request.
    `prompt_tokens` of `prompt_count` prompts, each behind `prompt_prefix` others, run in the same
    step, in `prompt_groups` of the groups (None: all).
    """

    request_count: float
    queries_each: int
    context: int
    parallel: Parallel = field(default_factory=lambda: Parallel.wide(32))
    prompt_tokens: int = 0
    prompt_prefix: int = 0
    prompt_count: int = 1
    prompt_groups: int | None = None

    @property
    def query_count(self) -> float:
        return self.request_count * self.queries_each

    @property
    def sending_tokens(self) -> float:
        """Tokens of one GPU of a group that has a prompt, if any group has."""
        return (self.query_count + self.prompt_tokens) / self.parallel.attention_tp

    @property
    def stage_tokens(self) -> float:
        """Tokens of all attention groups, which share the experts."""
        groups = self.parallel.attention_dp
        return self.query_count * groups + self.prompt_tokens * (self.prompt_groups or groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Microseconds of one layer of one micro-batch, without offload.

    `route` is everything between attention and experts: norms, the gate, and joining the heads of
    several GPUs. `send` and `join` are the parts of an exchange during which its kernels hold the
    GPU; `dispatch` and `combine` are the rest of it, on the wire.
    """

    project: float
    index: float
    pre_attn: float
    attend: float
    output: float
    shared: float
    experts: float
    dispatch: float
    combine: float
    route: float = 0.0
    send: float = 0.0
    join: float = 0.0

    @property
    def compute_us(self) -> float:
        attention = self.project + self.index + self.pre_attn + self.attend + self.output
        return attention + self.route + self.send + self.shared + self.experts + self.join


class Trust(NamedTuple):
    """How far a prediction may be off, as shares of it, and its sources besides tables."""

    band: tuple[float, float]
    marks: tuple[str, ...]


class Operators(Protocol):
    """One GPU of a deployment of one family."""

    @property
    def machine(self) -> Machine: ...

    @property
    def family(self) -> Family: ...

    @property
    def index_split_us(self) -> float: ...

    def stages(self, shape: MicroBatch, kind: Kind) -> Stages: ...

    def around_us(self, whole: MicroBatch) -> float:
        """Time outside the layers, for the whole batch."""
        ...

    def first_draft(self, whole: MicroBatch) -> Stages | None:
        """The layer of the first draft pass, which `around_us` counts with all rows resident; None
        if nothing is drafted, or if drafts fetch nothing."""
        ...

    def split_us(self, tokens: float) -> float: ...

    def trust(self, shape: MicroBatch) -> Trust: ...


def hiding_of(
    operators: Operators, stages: Stages, *, query_count: float, missing_share: float
) -> Hiding:
    """How long a fetch may take behind these stages, and what splitting them costs."""
    return cost.hiding(
        pre_attn_us=stages.pre_attn,
        attend_us=stages.attend,
        index_us=stages.index,
        split_us=operators.split_us(query_count),
        index_split_us=operators.index_split_us,
        missing_share=missing_share,
    )
