"""The stages of one layer's experts in one step: what `overlap.sbo`'s schedules put in order.

On one rank every token is where its experts are, so nothing is sent: `dispatch`, `arrive` and
`combine` hand on what they are given. Where ranks divide the experts (`comm.experts`), `route`
begins to tell the others how many tokens come, `dispatch` sends them, `arrive` waits for those of
the others, `combine` sends back what a block of experts has made, and `collect` waits for it.
"""

from __future__ import annotations

from torch import Tensor

from ess.comm.experts.expert_ranks import ExpertExchange, Part, Received
from ess.errors import BadState
from ess.models.decoder import DecoderLayer
from ess.models.moe import Inner, Routing
from ess.overlap.timeline import Timeline, timed
from ess.units import div_ceil


class ExpertStep:
    """`Experts` for a layer: made with what attention gave, asked by a schedule, then dropped."""

    def __init__(
        self,
        layer: DecoderLayer,
        hidden: Tensor,
        timeline: Timeline,
        first_query: int,
        *,
        part: Part,
        lengths: Tensor | None = None,
    ) -> None:
        """Queries whose `lengths` are 0 are pads, which other ranks need not hear of."""
        assert layer.experts is not None, f"layer {layer.number} is dense"
        self.timeline = timeline
        self.number = layer.number
        self.first_query = first_query
        self._layer = layer
        self._experts = layer.experts
        self._hidden = hidden
        self._input = layer.mlp_input(hidden)
        self._part: Part = part
        self._lengths = lengths
        self._routing: Routing | None = None
        self._exchange: ExpertExchange | None = None
        self._received: Received | None = None
        self._inner: Inner | None = None
        self._made: list[range] = []
        self._sent: list[range] = []
        self._routed: Tensor | None = None
        self._shared: Tensor | None = None

    def blocks(self, count: int) -> list[range]:
        assert count > 0, f"{count} blocks"
        total = self._experts.own_count
        size = div_ceil(total, count)
        return [range(first, min(first + size, total)) for first in range(0, total, size)]

    @timed
    def route(self) -> None:
        self._routing = self._experts.route(self._input)
        self._exchange = self._experts.depart(self._input, self._routing, self._part, self._lengths)

    @timed
    def dispatch(self) -> None:
        if self._routing is None:
            raise BadState("route comes before dispatch")
        if self._exchange is not None:
            self._exchange.send()

    @timed
    def arrive(self) -> None:
        assert self._inner is None, "tokens arrive once"
        assert self._routing is not None, "route comes before arrive"
        if self._exchange is not None:
            self._received = self._exchange.arrive()

    @timed
    def up(self) -> None:
        assert self._routing is not None, "route comes before up"
        assert not self._made, "a block was made before its inputs"
        self._inner = self._experts.up(self._input, self._routing, self._received)

    @timed
    def down(self, block: range) -> None:
        assert self._inner is not None, "up comes before down"
        assert all(block.stop <= made.start or made.stop <= block.start for made in self._made), (
            f"experts {block} are computed twice"
        )
        self._experts.down(self._inner, block)
        self._made.append(block)

    @timed
    def combine(self, block: range) -> None:
        assert self._made, f"experts {block} are sent before they are computed"
        computed = self._made.pop()
        assert computed == block, f"experts {block} are sent before they are done"
        assert self._inner is not None, "up comes before combine"
        self._experts.give_back(self._inner, block, self._exchange)
        self._sent.append(computed)

    @timed
    def collect(self) -> None:
        assert self._inner is not None, "up comes before collect"
        assert self._routing is not None, "route comes before collect"
        assert not self._made, "a block of experts was computed and not sent"
        sent = sum(map(len, self._sent))
        assert sent == self._experts.own_count, "a block of experts was not sent"
        self._routed = self._experts.collect(self._inner, self._routing, self._exchange)

    @timed
    def shared(self) -> None:
        self._shared = self._experts.shared(self._input) if self._experts.has_shared else None

    def result(self) -> Tensor:
        """The layer's output."""
        assert self._routed is not None, "the schedule has not collected"
        if not self._experts.has_shared:
            return self._layer.add_mlp(self._hidden, self._routed)
        assert self._shared is not None, "the schedule has left out the shared experts"
        return self._layer.add_mlp(self._hidden, self._routed + self._shared)
