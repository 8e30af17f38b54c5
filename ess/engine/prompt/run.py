"""Prompt chunks through the model: rows and keys are made, stored as the truth and read back.

Rows are encoded and then attended decoded, also within their own chunk, so that a chunk boundary
or a prefix hit changes no value. The attention of a chunk reads the host's rows layer by layer; no
slot is touched. What the working set needs is the selections of the last queries: the windows.

The chunks of a step run as one pack: what is done token by token, the products and the experts, is
done once for all their tokens; the indexer and the attention run span by span, each over its own
sequence. No span reads what another one of its pack writes.

Chunks run through the compiled stages of a decode step, which treat every token alike however the
prompt is cut, whatever prefix was there and whatever else is in the pack. Where there are none,
torch multiplies many tokens at once, and its rounding depends on how many these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ess.door.device.memory.uploads import sent
from ess.engine.layers.batch import join
from ess.engine.plan import Chunk
from ess.engine.prompt.layer import run_layer
from ess.engine.prompt.pack import Chosen, Computer, Pack, Span
from ess.engine.prompt.share import Share, Whole, Work


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A span's windows int32 [groups, w, k], and its last layer's output, a state per token: in a
    team, per token of the rank's own."""

    pack: Pack
    span: Span
    windows: Tensor
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class Queued:
    """A pack whose last layer is queued: a device may still be making it, and the host may have no
    rows of that layer. What the pack reads is kept until it has landed."""

    hidden: Tensor
    _given: Tensor | None
    _work: Work
    _meets: Share

    @property
    def has_landed(self) -> bool:
        """Whether `land` would return at once."""
        return self._work.mine.rows.has_landed

    def land(self) -> None:
        """Returns when the host has all rows."""
        self._work.mine.rows.land()
        self._meets.done()

    def made(self) -> list[Prefilled]:
        """Lands the pack and returns its spans, windows included. Reading the windows waits for all
        that is queued on the device."""
        windows = self._meets.windows(self._work)
        self.land()
        states = [self.hidden[place] for place in self._work.own]
        made = zip(self._work.spans, windows, states, strict=True)
        return [Prefilled(self._work.mine, *each) for each in made]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """What is called while a part of a model is queued, in this order.

    on_layer    with each layer, when its rows are stored
    begun       when the first layer is queued
    leaves      with the state that the part makes, as soon as its last layer is queued: a device
                may still be making it
    """

    on_layer: Callable[[int], None] | None = None
    begun: Callable[[], None] = lambda: None
    leaves: Callable[[Tensor], None] = lambda state: None


NO_HOOKS: Final = Hooks()


def run_chunks(
    runner: Computer, spans: Sequence[Span], on_layer: Callable[[int], None] | None = None
) -> list[Prefilled]:
    """Runs the spans as one pack. `on_layer` is called with each layer when its rows are stored."""
    return run_part(runner, spans, hooks=Hooks(on_layer=on_layer))[0]


def run_part(
    runner: Computer,
    spans: Sequence[Span],
    *,
    given: Tensor | None = None,
    share: Share | None = None,
    hooks: Hooks = NO_HOOKS,
) -> tuple[list[Prefilled], Tensor]:
    """The same for a part of a model. `given` is the state that the part before it has made; the
    state that this part makes comes back beside the spans."""
    queued = queue_part(runner, spans, given=given, share=share, hooks=hooks)
    return queued.made(), queued.hidden


def queue_part(
    runner: Computer,
    spans: Sequence[Span],
    *,
    given: Tensor | None = None,
    share: Share | None = None,
    hooks: Hooks = NO_HOOKS,
) -> Queued:
    """Queues a part and returns without waiting for the device."""
    assert (given is None) == runner.model.is_first, "only the first part embeds"
    meets, on_layer = Whole() if share is None else share, hooks.on_layer
    work = meets.work(runner, spans)
    mine = work.mine.spans
    hidden = given
    if hidden is None:
        hidden = runner.model.embed(_joined([span.tokens for span in mine], work.mine))
    chosen: Chosen = [None] * len(work.asked.spans)
    for layer in runner.model.layers:
        hidden, chosen = run_layer(meets, work, layer, hidden, chosen)
        if layer is runner.model.layers[0]:
            hooks.begun()
        if on_layer is not None and layer.has_rows:
            work.mine.rows.tell(partial(on_layer, layer.number))
    hooks.leaves(hidden)
    if runner.offload.layout.mtp_layer_count:
        mtp = runner.model.mtp
        assert mtp is not None, "the layout has an MTP layer, the model has none"
        following = _joined([span.following for span in mine], work.mine)
        joined = join(work.mine, mtp, runner.model.embed(following), runner.model.finish(hidden))
        run_layer(meets, work, mtp.layer, joined, [None] * len(work.asked.spans))
        if on_layer is not None:
            work.mine.rows.tell(partial(on_layer, mtp.layer.number))
    return Queued(hidden, given, work, meets)


def span_of(chunk: Chunk) -> Span:
    request, sequence = chunk.request, chunk.request.sequence
    assert sequence is not None, f"request {request.number} has no rows"
    assert request.state == "prefilling", f"request {request.number} is {request.state}"
    assert chunk.start == request.prefilled_count, f"a chunk from {chunk.start} on"
    known = request.tokens
    return Span(
        sequence=sequence,
        start=chunk.start,
        tokens=known[chunk.start : chunk.stop],
        following=known[chunk.start + 1 : chunk.stop + 1],
    )


def _joined(lines: Sequence[Sequence[int]], pack: Pack) -> Tensor:
    tokens = torch.tensor([token for line in lines for token in line], dtype=torch.int64)
    return sent(tokens, pack.device)
