"""The ranks that divide the experts of every layer: they exchange tokens and expert outputs.

    tokens' rank                               experts' rank
    depart   destinations; counts      --->    (counts of what comes)
    send     a line per token and rank --->    arrive   lines, and the experts that each asks for
    collect  a line per token, expert  <---    give_back   the outputs of a block of experts

A token's line goes once to each rank that has an expert of it, with the experts' places there; a
line per token and expert comes back, unweighted, and the tokens' rank adds them up as a single rank
does: ascending experts, in float32. So the order of the sum, and with it the result, does not
depend on where an expert is. An expert's output for a token is one line of a product; other lines
affect it only by how the product is cut: it is as exact as a batch of another size.

Why ranks cannot fall out of step. All ranks begin every exchange in the same order: the exchanges
of a step follow from what the ranks agreed on at its head (`engine.ranks.agreement`) and from the
layers, never from a rank's own tokens; a rank without tokens joins every exchange and sends no
tokens. Should a rank fall out of step all the same, the counts reveal it: each carries its sender's
step, the number of the exchange in the step, and the layer. A rank that receives another place ends
the group instead of mistaking the tokens of one layer for those of another.

Sizes are known before data is received: of lines by their counts, of outputs because the receiver
has asked for them. Nothing waits for a count of outputs. On a device the host learns no count in a
step: there `experts.fixed` has the exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from ess.comm.experts.loads import Loads
from ess.comm.experts.placement import Placement, Places
from ess.comm.processes.tensors import as_bytes
from ess.errors import EssError
from ess.kernels.experts import summed

if TYPE_CHECKING:
    from ess.comm.team import PendingParts, Team

_WORDS: Final = 4
_WORD_BYTES: Final = 8

Part: TypeAlias = Literal["batch", "half", "chunk"]
"""What of a step is exchanged: its decode batch as a whole, one half of that, tokens of prompts."""


class OutOfStep(EssError):
    """Two ranks are not at the same place of the same step."""


@dataclass(frozen=True, slots=True)
class Received:
    """What came to a rank's experts: `tokens` [n, width]; and for each pair of a token and an
    expert, the token's line and the expert's place here."""

    tokens: Tensor
    lines: Tensor
    places: Tensor


Sent: TypeAlias = Literal["count_bytes", "out_bytes", "back_bytes"]


@dataclass(slots=True)
class Traffic:
    """Bytes sent to other ranks: counts, lines out, lines back; and how many tokens they were for.
    What a rank sends to itself is not counted, nor what replays of a device's graphs send."""

    exchange_count: int = 0
    token_count: int = 0
    count_bytes: int = 0
    out_bytes: int = 0
    back_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Rooms:
    """The most tokens that any rank brings to an exchange, for each part of this step; for halves,
    to the exchange of the larger half."""

    batch: int = 0
    half: int = 0
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """What an exchange begins with: `tokens` [n, width], for which there is `room`, go to `experts`
    [n, per_token], whose outputs count by `weights`. On a device some tokens may be pads of the
    step, whose `lengths` are 0. `place` is the step, the exchange's number in it, and the layer."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor
    place: tuple[int, int, int]
    room: int
    lengths: Tensor | None

    @property
    def layer(self) -> int:
        return self.place[-1]


class ExpertExchange(Protocol):
    """One exchange: a rank's tokens travel to their experts and back; other ranks' tokens come."""

    def send(self) -> None: ...
    def arrive(self) -> Received:
        """All tokens that go to this rank's experts."""

    def give_back(self, outer: Tensor, order: Tensor, edges: Tensor, block: range) -> None:
        """Sends back what the experts at the places `block` have made: their lines of `outer`,
        between `edges`; `order` says of which pair of Received each line is. Blocks are the same on
        all ranks."""

    def collect(self, dtype: torch.dtype, width: int) -> Tensor:
        """Each token's weighted sum of what all its experts have made, float32 [n, width]."""


class ExpertRanks:
    """Begins the exchanges of a rank, in order, in the thread that runs the step."""

    def __init__(self, team: Team, places: Places | Placement) -> None:
        self.places = Places(places) if isinstance(places, Placement) else places
        self.places.check_ranks(team.size)
        self.team = team
        self.traffic = Traffic()
        self.loads = Loads(self.places.usual.expert_count)
        self.rooms = Rooms()
        self._step = self._number = 0

    def own(self, layer: int) -> tuple[int, ...]:
        """The experts of this rank, by place."""
        return self.places.of(layer).places[self.team.rank]

    def enter(self, step: int, rooms: Rooms) -> None:
        """Every rank is at the head of this step, which has these rooms."""
        self._step, self._number = step, 0
        self.rooms = rooms

    def cuts(self, count: int, part: Part) -> list[range]:
        """How `count` tokens of a part are cut, with an exchange for each piece. Every rank has
        equally many pieces; a batch or a half is one piece."""
        return [range(count)]

    def depart(
        self,
        tokens: Tensor,
        experts: Tensor,
        weights: Tensor,
        *,
        layer: int,
        cut: range,
        lengths: Tensor | None = None,
    ) -> ExpertExchange:
        """Begins an exchange of the tokens of this cut; `ExpertCall` says what each argument is."""
        assert len(tokens) == len(experts), f"{len(tokens)} tokens, {len(experts)} choices"
        place = self._step, self._number, layer
        self._number += 1
        self.traffic.exchange_count += 1
        self.traffic.token_count += len(tokens)
        return self._begun(ExpertCall(tokens, experts, weights, place, len(cut), lengths))

    def _begun(self, call: ExpertCall) -> ExpertExchange:
        self.loads.count(call.layer, call.experts)
        return CountedExchange(self, call)

    def start(
        self, content: Tensor, given: Sequence[int], due: Sequence[int], *, sends: Sent
    ) -> PendingParts:
        self._sent(sends, sum(given) - given[self.team.rank])
        return self.team.start(as_bytes(content), given, due)

    def spread(self, content: Tensor, *, sends: Sent) -> PendingParts:
        self._sent(sends, content.nbytes * (self.team.size - 1))
        return self.team.spread(as_bytes(content))

    def _sent(self, sends: Sent, byte_count: int) -> None:
        setattr(self.traffic, sends, getattr(self.traffic, sends) + byte_count)


class CountedExchange:
    """`ExpertExchange` on a CPU: counts go first."""

    def __init__(self, expert_ranks: ExpertRanks, call: ExpertCall) -> None:
        self._expert_ranks = expert_ranks
        self._tokens = tokens = call.tokens
        self._weights = call.weights
        self._place = call.place
        placement = expert_ranks.places.of(call.layer)
        size, each = expert_ranks.team.size, placement.place_count
        places = placement.at(call.experts, first=expert_ranks.team.rank)
        ranks, self._own_places = places // each, places % each
        goes = torch.zeros((size, len(tokens)), dtype=torch.bool)
        goes[ranks, torch.arange(len(tokens))[:, None]] = True
        self._to, self._who = goes.nonzero(as_tuple=True)
        self._asked = ranks[self._who] == self._to[:, None]
        self._line_counts: list[int] = goes.sum(1).tolist()
        self._pair_ranks, self._pairs = ranks.flatten().sort(stable=True)
        self._returns: list[tuple[PendingParts, Tensor]] = []
        self._counts = self._announce()

    def _announce(self) -> PendingParts:
        """Tells every rank our place in the step, and how many lines it will get."""
        words = torch.tensor([[*self._place, count] for count in self._line_counts])
        sizes = [_WORDS * _WORD_BYTES] * len(words)
        return self._expert_ranks.start(words, sizes, sizes, sends="count_bytes")

    def send(self) -> None:
        """Sends the tokens as bytes: a line, then the places that it asks for, -1 padded."""
        heard = self._counts.wait().view(torch.int64).view(-1, _WORDS).tolist()
        for rank, (*theirs, _) in enumerate(heard):
            if tuple(theirs) != self._place:
                raise OutOfStep(
                    f"rank {rank} {_shown(theirs)}; rank {self._expert_ranks.team.rank}"
                    f" {_shown(self._place)}"
                )
        self._coming_counts = [words[-1] for words in heard]
        asked = torch.where(self._asked, self._own_places[self._who], -1).to(torch.int16)
        lines = torch.cat((_lines(self._tokens[self._who]), _lines(asked)), dim=1)
        width = lines.shape[1]
        given = [count * width for count in self._line_counts]
        due = [count * width for count in self._coming_counts]
        self._line_bytes = width
        self._lines = self._expert_ranks.start(lines, given, due, sends="out_bytes")

    def arrive(self) -> Received:
        """Waits for all tokens that go to this rank's experts."""
        width = self._tokens.shape[1] * self._tokens.element_size()
        came = self._lines.wait().view(sum(self._coming_counts), self._line_bytes)
        tokens = came[:, :width].contiguous().view(self._tokens.dtype)
        asked = came[:, width:].contiguous().view(torch.int16)
        lines, columns = (asked >= 0).nonzero(as_tuple=True)
        edges = torch.tensor([0, *accumulate(self._coming_counts)])
        self._pair_edges = torch.searchsorted(lines, edges)
        self._received_places = asked[lines, columns].long()
        return Received(tokens, lines, self._received_places)

    def give_back(self, outer: Tensor, order: Tensor, edges: Tensor, block: range) -> None:
        first, stop = int(edges[block.start]), int(edges[block.stop])
        made, (ordered, back) = outer[first:stop], order[first:stop].sort()
        ends = torch.searchsorted(ordered, self._pair_edges).tolist()
        content = made[back].contiguous()
        mine = self._own_places.flatten()[self._pairs]
        is_due = (mine >= block.start) & (mine < block.stop)
        size, width = self._expert_ranks.team.size, made.shape[1] * made.element_size()
        due_counts = torch.bincount(self._pair_ranks[is_due], minlength=size).tolist()
        given = [(stop - start) * width for start, stop in pairwise(ends)]
        due = [count * width for count in due_counts]
        coming = self._expert_ranks.start(content, given, due, sends="back_bytes")
        self._returns.append((coming, self._pairs[is_due]))

    def collect(self, dtype: torch.dtype, width: int) -> Tensor:
        """Waits for all outputs for this rank's tokens, and adds them up as a single rank does."""
        count, per_token = self._weights.shape
        placed = torch.empty((count * per_token, width), dtype=torch.float32)
        line_count = 0
        for coming, pairs in self._returns:
            placed[pairs] = coming.wait().view(dtype).view(-1, width).float()
            line_count += len(pairs)
        assert line_count == len(placed), f"{line_count} of {len(placed)} lines came back"
        return summed(placed.view(count, per_token, width), self._weights)


def _shown(place: Sequence[int]) -> str:
    step, number, layer = place
    return f"is at exchange {number} of step {step}, in layer {layer}"


def _lines(values: Tensor) -> Tensor:
    """The values as bytes, line by line."""
    return as_bytes(values.contiguous()).view(len(values), values.shape[1] * values.element_size())
