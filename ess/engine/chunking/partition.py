"""Which layers each stage of a pipeline has.

A pipeline is as fast as its slowest stage. So of all ways to cut the model between layer groups
that cut is taken whose dearest stage is cheapest; of equal cuts, the evenest; of cuts that are
still equal, the cut that gives more layers to later stages: the first stage also decides for all
stages, and begins first.

What a token costs is counted in operations; differences of less than a fiftieth of a layer are not
told apart, for operations are only an estimate of time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ess.errors import BadInput
from ess.layout import ModelLayout, check_part
from ess.models.config import ModelConfig

GRAIN: Final = 50
CONTEXT: Final = 32 << 10
LIST_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a token costs, in any unit: in each layer, before the first layer and behind the last.

    `embedding` is a copy and `head` as a rule 0, since a prompt's last token is left to decode;
    `mtp` is the whole module.
    """

    layers: tuple[float, ...]
    embedding: float = 0.0
    head: float = 0.0
    mtp: float = 0.0


def even_costs(layout: ModelLayout) -> Costs:
    """Every layer like every other, an MTP layer too."""
    return Costs(layers=(1.0,) * layout.layer_count, mtp=float(layout.mtp_layer_count))


def counted_costs(config: ModelConfig, *, context: int = CONTEXT) -> Costs:
    """Operations of a prompt's token, for prompts of `context` tokens."""
    c = config
    layers = tuple(_layer_cost(c, layer, context) for layer in range(c.layer_total))
    joins = 2 * c.hidden_dim * 2 * c.hidden_dim + c.hidden_dim
    return Costs(
        layers=layers[: c.layer_count],
        embedding=c.hidden_dim,
        mtp=sum(layers[c.layer_count :]) + c.mtp_layer_count * joins,
    )


def _layer_cost(config: ModelConfig, layer: int, context: int) -> float:
    c, query_dim = config, config.nope_dim + config.rope_dim
    into = c.hidden_dim * (c.query_rank + c.row_dim) + c.query_rank * c.head_count * query_dim
    absorbed = c.head_count * c.latent_dim * (c.nope_dim + c.value_dim)
    attended = c.head_count * min(c.top_k, context) * (c.row_dim + c.latent_dim)
    out = c.head_count * c.value_dim * c.hidden_dim
    width = c.dense_dim
    if c.has_experts(layer):
        width = c.expert_dim * (c.experts_per_token + c.shared_expert_count)
    cost = into + absorbed + attended + out + 3 * c.hidden_dim * width
    if c.has_indexer(layer):
        pairs = c.index_head_count * c.index_dim * context // 2
        keys = c.hidden_dim * (c.index_dim + c.index_head_count)
        cost += pairs + keys + c.query_rank * c.index_head_count * c.index_dim
    return float(2 * cost)


def partition(
    layout: ModelLayout,
    stages: int,
    *,
    given: Sequence[int] | None = None,
    costs: Costs | None = None,
) -> tuple[range, ...]:
    """The main layers of each stage, in order. `given` is how many layers each is to have."""
    if given is not None:
        return _given(layout, stages, given)
    group_count = layout.main_group_count
    if not 1 <= stages <= group_count:
        raise BadInput(
            f"pp_size is {stages}: {layout.name!r} has {group_count} groups of layers that share a"
            f" selection, so there can be 1 to {group_count} stages"
        )
    loads = _loads(layout, even_costs(layout) if costs is None else costs)
    lengths = [len(group) for group in layout.groups[:group_count]]
    counts = _evenest(loads, lengths, stages, _least_limit(loads, stages))
    return _ranges(counts)


def read_partition(text: str) -> tuple[int, ...]:
    """Layers of each stage, as a flag or a variable of the environment gives them.

    >>> read_partition("15,15,15,16")
    (15, 15, 15, 16)
    """
    parts = [part.strip() for part in text.split(",")]
    if len(text) > LIST_CHARS_MAX or not all(part.isascii() and part.isdigit() for part in parts):
        raise BadInput(f"layer partition {text[:LIST_CHARS_MAX]!r}: write layers as 15,15,15,16")
    return tuple(map(int, parts))


def explained(layout: ModelLayout, parts: Sequence[range], costs: Costs | None = None) -> list[str]:
    """A line for each stage: its layers, what else it does, its part of the work; then what that
    leaves of the pipeline's speed."""
    counted = even_costs(layout) if costs is None else costs
    works = [sum(counted.layers[part.start : part.stop]) for part in parts]
    works[0] += counted.embedding
    works[-1] += counted.mtp + counted.head
    total = sum(works)
    lines = [
        f"stage {number}: layers {part.start}..{part.stop - 1} ({len(part)}){extra},"
        f" {work / total:.1%} of the work"
        for number, (part, work, extra) in enumerate(
            zip(parts, works, _extras(layout, len(parts)), strict=True)
        )
    ]
    balance = total / (len(parts) * max(works))
    return [*lines, f"stages wait {1 - balance:.1%} of the time for the slowest"]


def _extras(layout: ModelLayout, stages: int) -> list[str]:
    extras = [""] * stages
    extras[0] += " and the embedding"
    if layout.mtp_layer_count:
        extras[-1] += " and the MTP layer"
    return extras


def _given(layout: ModelLayout, stages: int, given: Sequence[int]) -> tuple[range, ...]:
    what = "layer partition " + ",".join(map(str, given))[:LIST_CHARS_MAX]
    if len(given) != stages:
        raise BadInput(f"{what} has {len(given)} stages, pp_size is {stages}")
    if min(given) < 1:
        raise BadInput(f"{what} gives {min(given)} layers to a stage: each needs at least 1")
    if sum(given) != layout.layer_count:
        raise BadInput(
            f"{what} adds up to {sum(given)} layers, {layout.name!r} has {layout.layer_count}"
        )
    parts = _ranges(given)
    try:
        for part in parts:
            check_part(layout.groups, layout.layer_count, part.start, part.stop)
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from None
    return parts


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    return tuple(itertools.starmap(range, itertools.pairwise([0, *itertools.accumulate(counts)])))


def _loads(layout: ModelLayout, costs: Costs) -> list[int]:
    """The cost of each group, in whole grains; the ends go with the first and the last."""
    if len(costs.layers) != layout.layer_count:
        raise BadInput(f"costs of {len(costs.layers)} layers, the model has {layout.layer_count}")
    grain = max(costs.layers) / GRAIN
    if not grain > 0 or min(costs.layers) < 0:
        raise BadInput(
            f"a layer costs {min(costs.layers):g} to {max(costs.layers):g}: must not be negative"
        )
    groups = layout.groups[: layout.main_group_count]
    loads = [round(sum(costs.layers[layer] for layer in group) / grain) for group in groups]
    loads[0] += round(costs.embedding / grain)
    loads[-1] += round((costs.mtp + costs.head) / grain)
    return loads


def _least_limit(loads: Sequence[int], stages: int) -> int:
    """The least load of a dearest stage."""
    low, high = max(loads), sum(loads)
    while low < high:
        middle = (low + high) // 2
        if _stage_count(loads, middle) <= stages:
            high = middle
        else:
            low = middle + 1
    return low


def _stage_count(loads: Sequence[int], limit: int) -> int:
    """How many stages there must be where none may carry more than `limit`."""
    count, carried = 1, 0
    for load in loads:
        if carried + load > limit:
            count, carried = count + 1, 0
        carried += load
    return count


def _evenest(
    loads: Sequence[int], lengths: Sequence[int], stages: int, limit: int
) -> tuple[int, ...]:
    """Layers of each stage: none above the limit, the least sum of squares, late stages larger.

    best[i] is for groups i.. in as many stages as there were rounds.
    """
    ends = range(len(loads) + 1)
    sums, layers = ([0, *itertools.accumulate(each)] for each in (loads, lengths))
    best: dict[int, tuple[int, tuple[int, ...]]] = {len(loads): (0, ())}
    for _ in range(stages):
        best = {
            begin: min(
                ((sums[end] - sums[begin]) ** 2 + rest, (layers[end] - layers[begin], *counts))
                for end, (rest, counts) in choices
            )
            for begin in ends
            if (
                choices := [
                    (end, known)
                    for end, known in best.items()
                    if end > begin and sums[end] - sums[begin] <= limit
                ]
            )
        }
    assert 0 in best, f"{len(loads)} groups do not fit {stages} stages of {limit}"
    return best[0][1]
