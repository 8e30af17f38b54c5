"""The matrices that resolutions are handed out in: made once, reused part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ess.door.pools import Pools
from ess.pool.index import IndexPool
from ess.pool.lru.arena import Lookup, Split

Seven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One part's selection as row ids and the planner's answer, good for every layer of a group."""

    lookup: Lookup
    split: Split
    views: Views


class Views:
    """Tensors over the first rows of a split's arrays, made when their number changes."""

    def __init__(self, split: Split) -> None:
        self._split = split
        self._count = 0
        self._tensors: Seven | None = None

    def top(self, query_count: int) -> Seven:
        """hit, miss, place, slots and the counts of the first three."""
        if self._tensors is None or self._count != query_count:
            one = self._split
            arrays = (one.hit, one.miss, one.place, one.slots)
            counts = (one.hit_count, one.miss_count, one.place_count)
            tops = (torch.from_numpy(array[:query_count]) for array in (*arrays, *counts))
            self._tensors, self._count = cast(Seven, tuple(tops)), query_count
        return self._tensors


@dataclass(frozen=True, slots=True)
class LayerView:
    """The memory of one layer as tensors: slots, host rows and index keys lie where they lie."""

    slots: torch.Tensor
    host: torch.Tensor
    key_pages: torch.Tensor


def layer_view(pools: Pools, layer: int) -> LayerView:
    group, keys = pools.layout.group_of(layer), pools.index.keys.pages
    return LayerView(
        slots=torch.from_numpy(pools.sparse.member_slab(pools.layout.groups[group].index(layer))),
        host=torch.from_numpy(pools.latent.rows[layer]),
        key_pages=torch.from_numpy(keys[group] if len(keys) else keys.reshape(0, 0)),
    )


def make_part(pools: Pools, query_max: int) -> Part:
    top_k = pools.layout.top_k
    split = Split.create(query_count=query_max, top_k=top_k)
    lookup = Lookup(
        lines=pools.tables.lines,
        host_page_of=pools.index.host_page_of,
        stored=pools.latent.stored,
        rows=np.empty((query_max, top_k), np.int32),
        host_rows=np.empty(query_max * top_k, np.int32),
        host=pools.latent.rows,
        slab=pools.sparse.slab,
        times=np.zeros(pools.layout.group_layers_max + 1, np.int64),
    )
    return Part(lookup, split, Views(split))


def name_host_rows(split: Split, query_count: int, index: IndexPool) -> None:
    """Rows served in place leave the planner as row ids; the caller reads them by host row."""
    place = split.place[:query_count]
    placed = place >= 0
    place[placed] = index.host_rows(place[placed])
    slots = split.slots[:query_count]
    coded = slots < -1
    slots[coded] = -2 - index.host_rows(-2 - slots[coded])
