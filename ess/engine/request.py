"""A request's life: its states, the legal moves between them, and why it ended.

waiting --> prefilling --> decoding --> finished
                ^  |        |   ^
                |  v        v   |
                `- preempted ---'

From every state to finished: cancelled, or refused while it waits. A step that was launched before
the host knew of an ending still runs; its sequence is closed when that step is learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ess.engine.sampling import Sampling
from ess.errors import BadInput

if TYPE_CHECKING:
    from ess.door import Sequence

State = Literal["waiting", "prefilling", "decoding", "preempted", "finished"]
Reason = Literal["length", "stop", "cancelled", "refused"]

MOVES: Final[frozenset[tuple[State, State]]] = frozenset(
    {
        ("waiting", "prefilling"),
        ("waiting", "finished"),
        ("prefilling", "decoding"),
        ("prefilling", "preempted"),
        ("prefilling", "finished"),
        ("decoding", "preempted"),
        ("decoding", "finished"),
        ("preempted", "prefilling"),
        ("preempted", "decoding"),
        ("preempted", "finished"),
    }
)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`prompt` and `sampling` come from outside; everything else is the engine's.

    `output` is what the host has learned. `flight_count` steps that it has not learned may have
    made up to `ahead_count` tokens more; `draft_count` drafts wait on the device for the next one.
    """

    number: int
    prompt: list[int]
    sampling: Sampling
    output: list[int] = field(default_factory=list)
    state: State = "waiting"
    reason: Reason | None = None
    sequence: Sequence | None = None
    prefilled_count: int = 0
    draft_count: int = 0
    flight_count: int = 0
    ahead_count: int = 0
    is_held: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise BadInput(f"request {self.number} has an empty prompt")

    def move(self, state: State) -> None:
        assert (self.state, state) in MOVES, f"request {self.number}: {self.state} -> {state}"
        self.state = state

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def length_max(self) -> int:
        return len(self.prompt) + self.sampling.tokens_max

    @property
    def left_count(self) -> int:
        """Tokens that may still be made."""
        return self.sampling.tokens_max - len(self.output)

    @property
    def is_prefilled(self) -> bool:
        """The last prompt token is left to decode."""
        return self.prefilled_count == len(self.prompt) - 1

    def take(self, made: list[int]) -> list[int]:
        """Append new tokens up to the first that ends the request; returns those kept."""
        for count, token in enumerate(made, start=1):
            self.output.append(token)
            if token in self.sampling.stop_ids and len(self.output) >= self.sampling.tokens_min:
                self.reason = "stop"
            elif self.left_count == 0:
                self.reason = "length"
            if self.reason is not None:
                return made[:count]
        return made
