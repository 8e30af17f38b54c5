"""Models that can be simulated, as numbers that the layout of the pools does not have.

Dense families have no indexer: every query attends to its whole context, and nothing is offloaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from ess.errors import BadInput
from ess.layout import ModelLayout, RowCodec


class Kind(NamedTuple):
    """A layer: with experts or a dense MLP, with or without an indexer of its own."""

    is_dense: bool
    has_indexer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`dense_dim` is the width of the first layers' MLP, `expert_dim` that of an expert."""

    layout: ModelLayout
    vocabulary: int
    dense_dim: int
    dense_layers: int = 3
    expert_dim: int = 2048
    expert_count: int = 256
    experts_each: int = 8

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def is_sparse(self) -> bool:
        return self.layout.index is not None

    def table(self, *, shares: bool) -> str:
        """The model whose sparse module was measured: GLM-5.2 itself for layers that share a
        selection, GLM-5 for its other layers."""
        if self.layout.hidden_dim == DENSE_DEEPSEEK.hidden_dim:
            return "deepseek-v3.2"
        return "glm-5.2" if shares else "glm-5"

    def projection_weights(self, heads: int) -> int:
        """Weights of the query's two projections and the output's, for this many heads."""
        layout = self.layout
        asked = heads * (layout.nope_dim + layout.row.rope_dim)
        query = layout.query_rank * (layout.hidden_dim + asked)
        return query + heads * layout.value_dim * layout.hidden_dim

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kind of each layer, without MTP layers."""
        return tuple(
            Kind(
                is_dense=layer < self.dense_layers,
                has_indexer=self.is_sparse and self.layout.place_of(layer)[1] == 0,
            )
            for layer in range(self.layout.layer_count)
        )


def _deepseek(layout: ModelLayout) -> Family:
    return Family(layout=layout, vocabulary=129_280, dense_dim=18_432)


def _glm(layout: ModelLayout) -> Family:
    return Family(layout=layout, vocabulary=154_880, dense_dim=12_288)


DENSE_DEEPSEEK: Final = replace(
    ModelLayout.deepseek_v32(), name="deepseek-v3", index=None, row=RowCodec(form="bf16")
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "deepseek-v3.2": _deepseek(ModelLayout.deepseek_v32()),
        "deepseek-v3": _deepseek(DENSE_DEEPSEEK),
        "deepseek-r1": _deepseek(replace(DENSE_DEEPSEEK, name="deepseek-r1")),
        "glm-5": _glm(ModelLayout.glm_5()),
        "glm-5.2": _glm(ModelLayout.glm_52()),
    }
)


def family_of(name: str) -> Family:
    family = FAMILIES.get(name)
    if family is None:
        raise BadInput(f"no operator tables for {name!r}; there are {', '.join(FAMILIES)}")
    return family
