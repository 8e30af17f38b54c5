"""How long fetches took per layer, and how much of it was waited for.

A layer's fetch is on the lane from `started_ns` to `finished_ns` of its event: its transfer time.
What the owner's thread spent waiting for that event is exposed, the rest of the transfer is hidden.
A wait may also sit out what the lane had before (a store, another layer's fetch): the time is lost
to the layer all the same, so exposed may exceed transfer, and hidden never goes below zero. A copy
made at submission hides nothing, though nobody ever waits for it.

Followers of a group are fetched with their leader. `ahead_count` says how many of a layer's fetches
had started before the layer itself asked for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ess.clock import Clock
from ess.door.step import Step
from ess.flashtrans.lanes import DoneEvent
from ess.kernels.streams import Event
from ess.layout import ModelLayout

Counts = npt.NDArray[np.int64]
Fetch = tuple[int, int]


@dataclass(slots=True)
class _Seen:
    """One layer's fetch of one part: when the layer asked, how long it has waited."""

    asked_ns: int
    waited_ns: int = 0


@dataclass(slots=True, kw_only=True)
class Timings:
    """Sums per layer since the start; what the open step has seen so far.

    If `keeps_spans`, also each fetch as (layer, started_ns, finished_ns), until somebody clears it.
    """

    layout: ModelLayout
    clock: Clock
    counts: dict[str, Counts] = field(init=False)
    keeps_spans: bool = False
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    _seen: dict[Fetch, _Seen] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = ("transfer_ns", "exposed_ns", "hidden_ns", "fetch_count", "ahead_count")
        self.counts = {name: np.zeros(self.layout.layer_total, np.int64) for name in names}

    def watch(
        self, layer: int, first_query: int, settle: Callable[[Event], None]
    ) -> Callable[[Event], None]:
        """The layer asks now; how to wait for its fetch, with a stopwatch."""
        seen = self._seen.setdefault((layer, first_query), _Seen(self.clock.now_ns()))

        def timed(event: Event) -> None:
            started_ns = self.clock.now_ns()
            settle(event)
            seen.waited_ns += self.clock.now_ns() - started_ns

        return timed

    def landed(self, step: Step) -> None:
        """The step is committed, its fetches are over."""
        for (group, first_query), resolved in step.resolved.items():
            layers = self.layout.groups[group]
            for member, (layer, event) in enumerate(zip(layers, resolved.events, strict=True)):
                seen = self._seen.get((layer, first_query))
                if resolved.plan.is_landed and event is not None:
                    self._count(layer, event, None, is_ahead=member > 0)
                elif event is not None and seen is not None and event.done():
                    waited_ns = None if isinstance(event, DoneEvent) else seen.waited_ns
                    self._count(layer, event, waited_ns, is_ahead=event.started_ns < seen.asked_ns)
        self._seen.clear()

    def _count(self, layer: int, event: Event, waited_ns: int | None, *, is_ahead: bool) -> None:
        """`waited_ns` None: the copy was made while everybody waited."""
        transfer_ns = event.finished_ns - event.started_ns
        assert transfer_ns >= 0, f"a fetch of layer {layer} ended before it started"
        if self.keeps_spans:
            self.spans.append((layer, event.started_ns, event.finished_ns))
        exposed_ns = transfer_ns if waited_ns is None else waited_ns
        counts = self.counts
        counts["transfer_ns"][layer] += transfer_ns
        counts["exposed_ns"][layer] += exposed_ns
        counts["hidden_ns"][layer] += max(0, transfer_ns - exposed_ns)
        counts["fetch_count"][layer] += 1
        counts["ahead_count"][layer] += is_ahead
