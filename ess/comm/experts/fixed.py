"""The exchanges of a device: of sizes that all ranks know beforehand, so that no host waits.

    tokens' rank                              every rank
    depart, send  its tokens' lines, choices  --->  arrive     those of all ranks
                  and weights, to all               give_back  for each line, what the experts here
    collect       a sum per rank, added up    <---             have made of it, weighed and added up

All ranks have agreed how many tokens the largest batch has (`Rooms`); each sends so many lines, and
behind its own tokens are lines that choose no expert. Which pairs of a token and an expert are for
this rank the device finds out: they are sorted by place, and the others lie behind the last
expert's end, where no product looks. So a step has the same exchanges of the same sizes on every
rank, whether a rank replays it, captures it, runs it eagerly or stands by.

A rank adds up what its own experts have made, ascending, in float32; the sum travels in the type of
the products, and the token's rank adds the ranks' sums in the order of ranks, in float32. NCCL only
moves bytes, so its choice of algorithm changes no result.

What is sent is a matrix in the type and width of the tokens: `room` lines of tokens, then lines
whose bytes are the choices and the weights. So tokens are read where they have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ess.comm.experts.expert_ranks import (
    ExpertCall,
    ExpertExchange,
    ExpertRanks,
    Part,
    Received,
)
from ess.comm.experts.loads import DeviceLoads, Fetch
from ess.comm.experts.sizes import WORD_BYTES, WORDS, cuts, line_count
from ess.kernels.experts import places_in
from ess.kernels.received import added

if TYPE_CHECKING:
    from ess.comm.experts.placement import Placement, Places
    from ess.comm.team import Team

NOWHERE: Final = -1


class FixedExpertRanks(ExpertRanks):
    def __init__(
        self, team: Team, places: Places | Placement, device: torch.device, fetch: Fetch
    ) -> None:
        super().__init__(team, places)
        self._counts = DeviceLoads(self.places.usual.expert_count, device, fetch)
        self.loads = self._counts
        self._device = device

    def own(self, layer: int) -> tuple[int, ...]:
        """Also prepares what the layer needs on the device, before any step runs."""
        self._counts.expect(layer)
        self.places.of(layer).table(self._device)
        return super().own(layer)

    def cuts(self, count: int, part: Part) -> list[range]:
        """Pieces are sent even if fewer tokens are left than they hold, or none. Tokens beyond a
        batch's room are pads of the step."""
        if part == "chunk":
            return cuts(self.rooms.chunk)
        return [range(self.rooms.batch if part == "batch" else self.rooms.half)]

    def _begun(self, call: ExpertCall) -> ExpertExchange:
        placement = self.places.of(call.layer)
        places = placement.at(call.experts, first=self.team.rank)
        if call.lengths is not None:
            places = places.where(call.lengths[:, None] > 0, NOWHERE)
        self._counts.count(call.layer, call.experts, places >= 0)
        return FixedExchange(self, call, places, placement.place_count)


class FixedExchange:
    """`places` [n, per_token] are those of all ranks, rank by rank, `place_count` for each."""

    def __init__(
        self, expert_ranks: ExpertRanks, call: ExpertCall, places: Tensor, place_count: int
    ) -> None:
        tokens, room = call.tokens, call.room
        assert room > 0, "an exchange without room"
        self._expert_ranks, self._team = expert_ranks, expert_ranks.team
        self._tokens, self._places, self._weights = tokens, places, call.weights
        self._place_count = place_count
        self._room = room
        width, per_token = tokens.shape[1], places.shape[1]
        line_bytes = width * tokens.element_size()
        assert line_bytes % WORD_BYTES == 0, f"words behind lines of {line_bytes} bytes"
        self._told_bytes = WORDS * WORD_BYTES * room * per_token
        self._line_count = line_count(room, per_token=per_token, line_bytes=line_bytes)

    def send(self) -> None:
        room, given, made = self._room, slice(self._room), self._tokens
        count = min(len(made), room)
        content = made.new_empty(self._line_count, made.shape[1])
        content[:count] = made[given]
        choices, weights = self._told(content.view(torch.uint8).flatten(), 1)
        choices.fill_(NOWHERE)
        choices[0, :count] = self._places[given].int()
        weights[0, :count] = self._weights[given]
        self._coming = self._expert_ranks.spread(content, sends="out_bytes")

    def _told(self, content: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """The choices and the weights in what `ranks` ranks have sent, [ranks, room, per_token]
        each, in place."""
        width = self._tokens.shape[1] * self._tokens.element_size()
        first = self._room * width
        words = content.view(ranks, -1)[:, first : first + self._told_bytes]
        both = words.view(torch.int32).view(ranks, WORDS, self._room, -1)
        return both[:, 0], both[:, 1].view(torch.float32)

    def arrive(self) -> Received:
        came, size = self._coming.wait(), self._team.size
        choices, weights = self._told(came, size)
        first, per_token = self._team.rank * self._place_count, choices.shape[2]
        place = choices.flatten(0, 1).long() - first
        self._is_here = (place >= 0) & (place < self._place_count)
        self._here_weights = weights.flatten(0, 1)
        places = torch.where(self._is_here, place, self._place_count).flatten()
        pairs = torch.arange(len(places), device=came.device) // per_token
        lines = pairs + (pairs // self._room) * (self._line_count - self._room)
        tokens = came.view(self._tokens.dtype).view(-1, self._tokens.shape[1])
        return Received(tokens, lines, places)

    def give_back(self, outer: Tensor, order: Tensor, edges: Tensor, block: range) -> None:
        """A sum needs all its experts, so there is one block."""
        assert len(block) == self._place_count, f"experts {block} of {self._place_count}"
        places = places_in(order).view(self._is_here.shape).where(self._is_here, NOWHERE)
        made = added(outer, places, self._here_weights, outer.dtype)
        sizes = [made.nbytes // self._team.size] * self._team.size
        self._returning = self._expert_ranks.start(made, sizes, sizes, sends="back_bytes")

    def collect(self, dtype: torch.dtype, width: int) -> Tensor:
        came = self._returning.wait().view(dtype).view(-1, width)
        lines = torch.arange(min(len(self._tokens), self._room), device=came.device)
        ranks = torch.arange(self._team.size, device=came.device) * self._room
        places = lines[:, None] + ranks
        total = added(came, places, torch.ones_like(places, dtype=torch.float32), torch.float32)
        return F.pad(total, (0, 0, 0, len(self._tokens) - len(total)))
