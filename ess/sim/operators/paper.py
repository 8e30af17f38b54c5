"""The paper's constants: how long each stage of a layer takes, fitted to a publication.

The measured attention module is the whole decode block of a layer: projections, indexer, top-k,
sparse attention, output. It is split into parts that add up to it:

    index      what the module grows by from a context of 2,048 (the top-k) to the given one: logits
               over all keys, then top-k. It was measured with one query per request;
               `query_repeat` is the share of it that each further query of a request repeats
    pre_attn   q_b projection, absorption, and the elementwise kernels between (launch and bytes)
    attend     queries x FLOP at the published rate of the sparse kernel (FlashMLA, fp8 rows)
    output     absorption back and the output projection
    project    the rest: the common projections, norms, the indexer's own projections

The module's grid is coarse (powers of two) while its GEMMs were measured tile by tile, so the
module without its GEMMs is interpolated and the GEMMs are added at their own grid: so a step of 160
tokens pays for its tile as it does on the machine.

The first layers are dense: their MLP is a roofline, as there is no table.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ess.errors import BadInput
from ess.sim.operators.derive import DERIVATIONS
from ess.sim.operators.families import Family, Kind, family_of
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.silicon.bank import shipped_bank
from ess.sim.operators.silicon.stacks import SGLANG
from ess.sim.operators.stages import Machine, MicroBatch, Stages, Trust
from ess.sim.operators.tables import (
    FOLDER,
    Curve,
    Exchange,
    Keyed,
    Surface,
    curves,
    entries_of,
    exchanges,
    nearest,
    number,
)

FAMILY: Final = family_of("deepseek-v3.2")
SPARSE: Final = Kind(is_dense=False, has_indexer=True)
BAND: Final = (-0.5, 0.5)
MARKS: Final = ("constants fitted to a publication, itself a simulation",)
GPU: Final = "h200"
FITTED_FILE: Final = FOLDER / GPU / "fitted.json"
LAYOUT: Final = FAMILY.layout
LAYERS: Final = LAYOUT.layer_count
HIDDEN_DIM: Final = LAYOUT.hidden_dim
VOCABULARY: Final = 129_280
HEAD_COLUMNS: Final = 65_536
TOP_K: Final = LAYOUT.top_k
DENSE_DIM: Final = 18_432
MODULE_TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
SPLIT_LAUNCHES: Final = 2

LATENT_DIM: Final = LAYOUT.row.latent_dim
ROPE_DIM: Final = LAYOUT.row.rope_dim
SCORE_DIM: Final = LATENT_DIM + ROPE_DIM
HEADS: Final = LAYOUT.head_count

FLOP_PER_QUERY: Final = 2 * HEADS * TOP_K * (SCORE_DIM + LATENT_DIM)
"""Every head scores all dimensions of the selected rows and sums the latent ones."""

ELEMENTWISE_LAUNCHES: Final = 4
ELEMENTWISE_BYTES: Final = 2 * 2 * HEADS * (SCORE_DIM + ROPE_DIM)
"""Between q_b and attention: quantise, rope, assemble the query, store the row."""

MERGE_BYTES: Final = HEADS * LATENT_DIM * (4 + 4 + 2)
"""Two fp32 partials read, one bf16 result written, per query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Keys: `experts` by ranks and balance, `exchange` by nodes, `gemm` by n and k."""

    attention: Surface
    experts: Keyed
    exchange: Mapping[float, Exchange]
    shared: Curve
    gemm: Keyed
    absorb: Keyed

    @classmethod
    def shipped(cls) -> Tables:
        read = {
            table.name: entries_of(FOLDER / GPU / f"{table.name}.csv", table.columns)
            for table in DERIVATIONS
        }
        return cls(
            attention=shipped_bank(GPU, stack=SGLANG).index_growth[FAMILY.name,],
            experts=curves(read["experts"], keys=2),
            exchange=exchanges(read["exchange"]),
            shared=curves(read["shared"], keys=0)[()],
            gemm=curves(read["gemm"], keys=2),
            absorb=curves(read["absorb"], keys=1),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Fitted on published rows without offload only; see ess.sim.fit_constants.

    `compute_scale` applies where published operators may differ from ours: the module without its
    rated parts, and the experts. `balance` names the expert table.
    """

    compute_scale: float
    query_repeat: float
    step_fixed_us: float
    balance: str

    @classmethod
    def shipped(cls) -> FittedConstants:
        constants: Mapping[str, Any] = json.loads(FITTED_FILE.read_text())["constants"]
        return cls(**constants)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperOperators:
    """DeepSeek-V3.2 on H200s; attention and experts over all of them."""

    tables: Tables = field(default_factory=Tables.shipped)
    fitted: FittedConstants = field(default_factory=FittedConstants.shipped)
    machine: Machine = field(default_factory=Machine)
    family: Family = FAMILY

    def stages(self, shape: MicroBatch, kind: Kind = SPARSE) -> Stages:
        _check(shape)
        tokens, dense = shape.query_count, kind.is_dense
        pre_us, output_us = self._pre_attn_us(tokens), self._output_us(tokens)
        attend_us = tokens * FLOP_PER_QUERY / self.machine.sparse_rate
        scale = self.fitted.compute_scale
        project_us = scale * self._module_us(tokens) - pre_us - attend_us - output_us
        nodes = self.machine.groups_linked(shape.parallel.gpu_count)
        way = nearest(self.tables.exchange, nodes)
        return Stages(
            project=max(0.0, project_us),
            index=self._index_us(shape),
            pre_attn=pre_us,
            attend=attend_us,
            output=output_us,
            shared=0.0 if dense else scale * self.tables.shared.at(tokens),
            experts=scale * (self._dense_us(tokens) if dense else self._experts_us(shape)),
            dispatch=0.0 if dense else way.dispatch.at(tokens),
            combine=0.0 if dense else way.combine.at(tokens),
        )

    def head_us(self, tokens: float) -> float:
        """Time of the vocabulary projection; the measured GEMM is about half as wide."""
        share = VOCABULARY / HEAD_COLUMNS
        return share * self.tables.gemm[HEAD_COLUMNS, HIDDEN_DIM].at(tokens)

    def split_us(self, tokens: float) -> float:
        """Extra time of two partials and a merge over one attention."""
        return tokens * MERGE_BYTES / self.machine.hbm_rate

    @property
    def index_split_us(self) -> float:
        """Extra time of launching logits and top-k once more."""
        return SPLIT_LAUNCHES * self.machine.launch_us

    def around_us(self, whole: MicroBatch) -> float:
        """Time of the head over all queries, a draft pass for each further query, and the host.

        A draft pass is one layer and the head over the whole batch, one query each. The engine's
        first pass also has the other queries of the step: the publication does not count them.
        """
        stages = self.stages(replace(whole, queries_each=1))
        hidden_us = min(stages.dispatch, stages.shared)
        exchange_us = stages.dispatch + stages.combine - hidden_us
        draft_us = stages.compute_us + exchange_us + self.head_us(whole.request_count)
        head_us = self.head_us(whole.query_count)
        return (whole.queries_each - 1) * draft_us + head_us + self.fitted.step_fixed_us

    def first_draft(self, whole: MicroBatch) -> Stages | None:
        """None: the publication counts no fetches of drafts."""
        return None

    def trust(self, shape: MicroBatch) -> Trust:
        return Trust(BAND, MARKS)

    def _module_us(self, tokens: float) -> float:
        """Time of the module at a context of top-k: GEMMs at their grid, the rest at its own."""
        coarse = Curve(
            tuple(map(float, MODULE_TOKENS)),
            tuple(self.tables.attention.at(t, TOP_K) - self._gemms_us(t) for t in MODULE_TOKENS),
        )
        return coarse.at(tokens) + self._gemms_us(tokens)

    def _gemms_us(self, tokens: float) -> float:
        gemm = self.tables.gemm
        common = gemm[2048, HIDDEN_DIM].at(tokens) + gemm[8192, 1536].at(tokens)
        return common + self._query_us(tokens) + self._output_us(tokens)

    def _query_us(self, tokens: float) -> float:
        """Time of q_b (24,576 columns, as 16,384 and 8,192) and absorption."""
        gemm = self.tables.gemm
        wide_us = gemm[16_384, 1536].at(tokens) + gemm[8192, 1536].at(tokens)
        return wide_us + self.tables.absorb["pre",].at(tokens)

    def _pre_attn_us(self, tokens: float) -> float:
        launches_us = ELEMENTWISE_LAUNCHES * self.machine.launch_us
        moved_us = tokens * ELEMENTWISE_BYTES / self.machine.hbm_rate
        return self._query_us(tokens) + launches_us + moved_us

    def _output_us(self, tokens: float) -> float:
        gemm_us = self.tables.gemm[HIDDEN_DIM, 16_384].at(tokens)
        return gemm_us + self.tables.absorb["post",].at(tokens)

    def _index_us(self, shape: MicroBatch) -> float:
        n, measured = shape.request_count, self.tables.attention
        grown_us = max(0.0, measured.at(n, shape.context) - measured.at(n, TOP_K))
        return grown_us * (1.0 + (shape.queries_each - 1) * self.fitted.query_repeat)

    def _experts_us(self, shape: MicroBatch) -> float:
        curve = self.tables.experts.get((shape.parallel.gpu_count, self.fitted.balance))
        if curve is None:
            known = sorted({int(number(ranks)) for ranks, _ in self.tables.experts})
            raise BadInput(
                f"no expert table for {shape.parallel.gpu_count} ranks; choose from {known}"
            )
        return curve.at(shape.query_count * shape.parallel.gpu_count)

    def _dense_us(self, tokens: float) -> float:
        weights = 3 * HIDDEN_DIM * DENSE_DIM
        moved_us = self.machine.launch_us + weights / self.machine.hbm_rate
        return max(moved_us, 2 * weights * tokens / (0.8 * self.machine.fp8_rate))


def _check(shape: MicroBatch) -> None:
    if shape.parallel != Parallel.wide(shape.parallel.gpu_count) or shape.prompt_tokens:
        raise BadInput(
            f"{shape.parallel}, {shape.prompt_tokens} prompt tokens: the constants of the paper "
            "know neither heads nor experts in parts, nor prompts in a decode step"
        )
