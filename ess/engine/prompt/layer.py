"""One layer of the model over a pack: rows and keys are stored, then the pack's queries attend.

Where a team runs the pack, each rank makes the rows of its own tokens (`work.mine`) and attends for
the queries of `work.asked`; `share` has the calls by which ranks meet. On a rank alone both are the
whole pack, and the calls do nothing.

No span reads what another one of its pack writes: the indexer and the attention run span by span.

The stages are those of a decode step, compiled where they can be: they treat every token alike,
however the prompt is cut, whatever prefix was there and whatever else is in the pack.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ess.engine.layers.batch import back, queries
from ess.engine.layers.front import front
from ess.engine.prompt.pack import Chosen, Pack, window_of
from ess.engine.prompt.reading import attend_chosen, top_k
from ess.engine.prompt.share import Share, Work, joined
from ess.kernels.merge import Partial
from ess.kernels.room import new_partial
from ess.models.decoder import DecoderLayer
from ess.models.indexer import last_positions


def run_layer(
    share: Share, work: Work, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    if not layer.has_rows:
        return _through_states(work.mine, layer, hidden), given
    query, chosen = _stored(share, work, layer, hidden, given)
    return back(work.mine, layer, hidden, _attend(share, work, layer, query, chosen)), chosen


def _stored(
    share: Share, work: Work, layer: DecoderLayer, hidden: Tensor, given: Chosen
) -> tuple[Tensor, Chosen]:
    """Stores rows and keys. Returns the queries, and the rows that they select."""
    mine = work.mine
    mine.rows.enter(layer.number)
    made = front(mine, layer, hidden)
    if made.keys is not None:
        mine.rows.put_keys(layer.number, [made.keys[place] for place in mine.places])
    mine.rows.put(layer.number, [made.rows[place] for place in mine.places])
    share.stored(work, layer.number)
    if made.queries is not None and made.weights is not None:
        return made.query, _select(share, work, layer, made.queries, made.weights)
    return made.query, _last(work, layer) if layer.window else given


def _through_states(pack: Pack, layer: DecoderLayer, hidden: Tensor) -> Tensor:
    outputs = []
    for _, span, place in pack.each():
        assert span.carried is not None, "a layer without rows, and no state"
        outputs.append(span.carried.through(layer, hidden[place]))
    return back(pack, layer, hidden, torch.cat(outputs))


def _select(
    share: Share, work: Work, layer: DecoderLayer, asked: Tensor, weights: Tensor
) -> Chosen:
    pack, group = work.asked, work.asked.layout.group_of(layer.number)
    none = torch.empty((0, pack.layout.top_k), dtype=torch.int32, device=pack.device)
    picked = [
        top_k(work.mine, at, span, layer.number, asked[place], weights[place])
        for at, span, place in work.mine.each()
    ]
    together = share.gathered(joined(picked, none))
    chosen = [together[place] for place in pack.places]
    for at, span, _ in pack.each():
        span.windows[group] = window_of(span, chosen[at])
    return chosen


def _last(work: Work, layer: DecoderLayer) -> Chosen:
    pack, chosen, top_k = work.asked, list[Tensor | None](), work.asked.layout.top_k
    for _, span, _ in pack.each():
        lengths = torch.arange(span.start, span.stop, device=pack.device) + 1
        last = last_positions(lengths, layer.window, top_k)
        span.windows[pack.layout.group_of(layer.number)] = window_of(span, last)
        chosen.append(last)
    return chosen


def _attend(share: Share, work: Work, layer: DecoderLayer, query: Tensor, chosen: Chosen) -> Tensor:
    """Attends for the queries of all spans, into one array."""
    pack = work.asked
    asked = queries(pack, layer, share.gathered(query))
    into = new_partial(asked, pack.layout.row_of(layer.number).latent_dim)
    for at, _, place in pack.each():
        selection, part = chosen[at], Partial(into.out[place], into.lse[place])
        assert selection is not None, f"layer {layer.number} shares a selection that was not made"
        attend_chosen(pack, layer.number, at, asked[place], selection, part)
    return share.exchanged(work, layer, layer.mla.attended(into))
