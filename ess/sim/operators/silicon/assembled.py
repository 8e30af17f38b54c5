"""One GPU of a deployment, put together from measured operators and argued costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Final

from ess.errors import BadInput
from ess.sim.operators.families import Family, Kind
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.silicon import host
from ess.sim.operators.silicon.attention import Dense, Sparse
from ess.sim.operators.silicon.bank import Bank
from ess.sim.operators.silicon.chip import Chip, tiled
from ess.sim.operators.silicon.experts import ExchangeTime, Experts
from ess.sim.operators.silicon.prompts import Prompts
from ess.sim.operators.silicon.stacks import SGLANG
from ess.sim.operators.silicon.trust import trust_of
from ess.sim.operators.stages import Machine, MicroBatch, Stages, Trust

TABLED_COLUMNS: Final = 16_384
HEAD_COLUMNS: Final = 65_536
SPLIT_LAUNCHES: Final = 2
MERGE_BYTES: Final = 4 + 4 + 2
PARTS_MAX: Final = 0.9


@dataclass(frozen=True, kw_only=True)
class SiliconOperators:
    """`kv` is the form of a row on the device: fp8 or bf16. `balance` names how tokens fall on
    experts in the tables, if that is known: uniform where a balancer has seen the traffic.
    `step_gap_us` is the host's time between steps: see `host`."""

    bank: Bank
    chip: Chip
    family: Family
    kv: str
    stack: str = SGLANG
    balance: str | None = None
    step_gap_us: float = host.STEP_GAP_US

    @property
    def machine(self) -> Machine:
        return self.chip.machine

    @property
    def index_split_us(self) -> float:
        return SPLIT_LAUNCHES * self.machine.launch_us

    def stages(self, shape: MicroBatch, kind: Kind) -> Stages:
        attention = self._attention(shape, kind)
        experts_us = self._mlp_us(shape) if kind.is_dense else self._experts(shape).us(shape)
        way = self._way(shape, kind)
        return replace(
            attention,
            route=self._route_us(shape, kind),
            shared=0.0 if kind.is_dense else self._shared_us(shape),
            experts=experts_us,
            dispatch=way.dispatch,
            combine=way.combine,
            send=way.send,
            join=way.join,
        )

    def split_us(self, tokens: float) -> float:
        """Extra time of two partials and a merge over one attention."""
        layout = self.family.layout
        per_token = MERGE_BYTES * layout.head_count * layout.row.latent_dim
        return tokens * per_token / self.machine.hbm_rate

    def around_us(self, whole: MicroBatch) -> float:
        """Time of embedding, head, sampling and the host; of a pass of the draft layer for every
        further query; of transfers between the stages of a pipeline."""
        return (
            self.head_us(whole, whole.query_count)
            + self.step_gap_us
            + self._drafts_us(whole)
            + (whole.parallel.pp - 1) * self._hop_us(whole.query_count + whole.prompt_tokens)
        )

    def first_draft(self, whole: MicroBatch) -> Stages | None:
        if whole.queries_each == 1:
            return None
        return self._draft_stages(whole, has_indexer=self.family.is_sparse)

    def head_us(self, shape: MicroBatch, tokens: float) -> float:
        """Time of the vocabulary projection, divided over a group, and of a draw from it."""
        if not tokens:
            return 0.0
        family = self.family
        share = family.vocabulary / shape.parallel.attention_tp
        product = self.bank.products["bf16", HEAD_COLUMNS, family.layout.hidden_dim]
        flop = 2 * share * family.layout.hidden_dim * tokens
        projected_us = self.chip.us(share / HEAD_COLUMNS * product.at(tokens), bf16_flop=flop)
        return projected_us + tokens * share * host.SAMPLED_BYTES / self.machine.hbm_rate

    def trust(self, shape: MicroBatch) -> Trust:
        return trust_of(self.chip, self.family, shape, stack=self.stack)

    def _drafts_us(self, whole: MicroBatch) -> float:
        """Time of the draft passes: the first over all verified tokens, others over one of each
        request. Models whose layers share selections share that of the first pass too."""
        pass_count = whole.queries_each - 1
        if not pass_count:
            return 0.0
        shares = not all(kind.has_indexer for kind in self.family.kinds)
        first_us = self._draft_us(whole, has_indexer=self.family.is_sparse)
        later_us = self._draft_us(replace(whole, queries_each=1), has_indexer=not shares)
        gaps_us = host.draft_gaps_us(self.step_gap_us, pass_count)
        return first_us + (pass_count - 1) * later_us + gaps_us

    def _draft_us(self, whole: MicroBatch, *, has_indexer: bool) -> float:
        """Time of a draft pass: a layer and the head."""
        stages = self._draft_stages(whole, has_indexer=has_indexer)
        hidden_us = min(stages.dispatch, stages.shared)
        exchange_us = stages.dispatch + stages.combine - hidden_us
        head_us = self.head_us(whole, whole.request_count)
        return stages.compute_us + exchange_us + head_us

    def _draft_stages(self, whole: MicroBatch, *, has_indexer: bool) -> Stages:
        kind = Kind(is_dense=False, has_indexer=has_indexer)
        return self.stages(replace(whole, prompt_tokens=0), kind)

    def _hop_us(self, tokens: float) -> float:
        moved = tokens * self.family.layout.hidden_dim * host.STATE_BYTES
        return host.HOP_US + moved / host.NIC_RATE

    @cached_property
    def _parts(self) -> Parts:
        return Parts(self)

    def _experts(self, shape: MicroBatch) -> Experts:
        return self._parts.experts(parallel=shape.parallel)

    def _way(self, shape: MicroBatch, kind: Kind) -> ExchangeTime:
        if not kind.is_dense:
            return self._experts(shape).way(shape)
        group = shape.parallel.attention_tp
        reduced_us = self._experts(shape).reduced_us(shape.sending_tokens * group, group)
        return ExchangeTime(0.0, 0.0, 0.0, reduced_us)

    def _route_us(self, shape: MicroBatch, kind: Kind) -> float:
        """Time of norms and residual sums for a group's tokens, of the gate, of adding up heads."""
        machine, hidden = self.machine, self.family.layout.hidden_dim
        tokens = shape.sending_tokens * shape.parallel.attention_tp
        states = host.NORM_STATES + (0 if kind.is_dense else host.SUM_STATES)
        moved_us = states * tokens * hidden * host.STATE_BYTES / machine.hbm_rate
        joined_us = self._experts(shape).reduced_us(tokens, shape.parallel.attention_tp)
        if kind.is_dense:
            return 2 * machine.launch_us + moved_us + joined_us
        launches = 2 + 1 + host.CHOICE_LAUNCHES
        gate_us = self.bank.products["bf16", self.family.expert_count, hidden].at(tokens)
        return launches * machine.launch_us + moved_us + gate_us + joined_us

    def _shared_us(self, shape: MicroBatch) -> float:
        """Time of both products of a gated MLP, and of the gate between them."""
        hidden, width = self.family.layout.hidden_dim, self.family.expert_dim
        tokens, products = shape.sending_tokens, self.bank.products
        up_us = products["fp8", 2 * width, hidden].at(tokens)
        down_us = products["fp8", hidden, width].at(tokens)
        between_us = self.machine.launch_us + tokens * width * 6 / self.machine.hbm_rate
        flop = 6 * hidden * width * tiled(tokens)
        alone_us = self.chip.us(up_us + down_us, fp8_flop=flop)
        return self._experts(shape).shared_us(shape, alone_us + between_us)

    def _mlp_us(self, shape: MicroBatch) -> float:
        """Time of the first layers' wide MLP, divided over a group, from products of that width."""
        hidden, width = self.family.layout.hidden_dim, self.family.dense_dim
        share = width / TABLED_COLUMNS / shape.parallel.attention_tp
        tokens = shape.sending_tokens * shape.parallel.attention_tp
        up_us = 2 * self.bank.products["fp8", TABLED_COLUMNS, hidden].at(tokens)
        down_us = self.bank.products["fp8", hidden, TABLED_COLUMNS].at(tokens)
        flop = 2 * 3 * hidden * width * tiled(tokens) / shape.parallel.attention_tp
        return self.chip.us(share * (up_us + down_us), fp8_flop=flop)

    def _attention(self, shape: MicroBatch, kind: Kind) -> Stages:
        """The module in the parts that a fetch may hide behind; they add up to it."""
        heads = self._heads(shape.parallel)
        prompt_us = self._parts.prompts(heads=heads).us(shape, kind) if shape.prompt_tokens else 0.0
        if not shape.request_count:
            return _attention_of(prompt_us, 0.0, 0.0, 0.0, 0.0)
        busy = max(1.0, shape.request_count)
        tokens = busy * shape.queries_each
        scan_us = 0.0
        if not self.family.is_sparse:
            module_us = self._parts.dense(heads=heads).us(
                requests=busy, queries_each=shape.queries_each, context=shape.context
            )
        else:
            module_us, scan_us = self._selecting_us(shape, kind, busy, heads)
        module_us = self._scaled_us(module_us, tokens, shape, heads)
        parts = self._named_parts(tokens, shape, heads)
        shrunk = min(1.0, PARTS_MAX * module_us / sum(parts))
        pre, attend, output = (shrunk * part for part in parts)
        rest_us = module_us - pre - attend - output
        return _attention_of(
            rest_us + prompt_us, scan_us * self.chip.by_memory, pre, attend, output
        )

    def _selecting_us(
        self, shape: MicroBatch, kind: Kind, busy: float, heads: int
    ) -> tuple[float, float]:
        """Times of the module at a context of at most the top-k, and of the scan of all keys."""
        model = self.family.table(shares=not kind.has_indexer)
        sparse = self._parts.sparse(heads=heads, model=model)
        top_k = self.family.layout.top_k
        tokens = busy * shape.queries_each
        module_us = sparse.us(tokens=tokens, context=min(shape.context, top_k))
        if not kind.has_indexer:
            return module_us, 0.0
        return module_us, sparse.scan_us(
            requests=busy, queries_each=shape.queries_each, context=shape.context, top_k=top_k
        )

    def _named_parts(
        self, tokens: float, shape: MicroBatch, heads: int
    ) -> tuple[float, float, float]:
        """Times of q's second projection, of attention and of the output, at nominal rates."""
        layout, machine = self.family.layout, self.machine
        row = layout.row.latent_dim + layout.row.rope_dim
        attended = min(shape.context, layout.top_k) if self.family.is_sparse else shape.context
        attend_us = tokens * 2 * heads * attended * (row + layout.row.latent_dim)
        query = layout.query_rank * heads * (layout.nope_dim + layout.row.rope_dim)
        absorbed = heads * layout.row.latent_dim
        pre_us = self._rated_us(tokens, query + absorbed * layout.nope_dim)
        output = absorbed * layout.value_dim + heads * layout.value_dim * layout.hidden_dim
        return pre_us, attend_us / machine.sparse_rate, self._rated_us(tokens, output)

    def _rated_us(self, tokens: float, weights: float) -> float:
        machine = self.machine
        return machine.launch_us + max(
            weights / machine.hbm_rate,
            2 * weights * tokens / (host.PRODUCT_SHARE * machine.fp8_rate),
        )

    def _scaled_us(self, us: float, tokens: float, shape: MicroBatch, heads: int) -> float:
        if not self.chip.is_scaled:
            return us
        layout = self.family.layout
        row = layout.row.latent_dim + layout.row.rope_dim
        attended = min(shape.context, layout.top_k) if self.family.is_sparse else shape.context
        scored = 2 * tokens * heads * attended * (row + layout.row.latent_dim)
        projected = 2 * tiled(tokens) * self.family.projection_weights(heads)
        return self.chip.us(us, fp8_flop=projected, bf16_flop=scored)

    def _heads(self, parallel: Parallel) -> int:
        count, parts = self.family.layout.head_count, parallel.attention_tp
        if count % parts:
            raise BadInput(f"{count} heads cannot be divided over attention TP {parts}")
        return count // parts


def _attention_of(
    project: float, index: float, pre_attn: float, attend: float, output: float
) -> Stages:
    return Stages(
        project=project,
        index=index,
        pre_attn=pre_attn,
        attend=attend,
        output=output,
        shared=0.0,
        experts=0.0,
        dispatch=0.0,
        combine=0.0,
    )


class Parts:
    """Operators by heads and sizes, made once: their tables are extended at the first use."""

    def __init__(self, whole: SiliconOperators) -> None:
        bank, chip, family = whole.bank, whole.chip, whole.family
        given = partial(Experts, bank=bank, chip=chip, family=family, balance=whole.balance)
        self.experts = lru_cache(given)
        self.prompts = lru_cache(partial(Prompts, bank=bank, chip=chip, family=family, kv=whole.kv))
        self.dense = lru_cache(partial(Dense, bank=bank))
        self.sparse = lru_cache(partial(Sparse, bank=bank, kv=whole.kv))
