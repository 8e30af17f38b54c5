"""A request's life: its states, the legal moves between them, and why it ended.

waiting --> prefilling --> decoding --> finished
 ^ |            ^  |        |   ^
 | |            |  v        v   |
 | |            `- preempted ---'
 | v                 ^
landing, loading ----'

From every state to finished: cancelled, or refused while it waits, lands or loads. A step that was
launched before the host knew of an ending still runs; its sequence is closed when that step is
learned.

A request lands whose prompt's rows come from another worker: into pages of the host, while it needs
nothing of the device. When they are there it goes on as one that was preempted; where they do not
come its prompt is prefilled here: it goes on, or waits anew if it keeps something beside its rows
and nothing of that has come. A request that gives its rows to another worker has ended when
its prompt is there. A request loads while pages of its prompt come from the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, EssError

if TYPE_CHECKING:
    from ess.door import Sequence
    from ess.engine.tokens.bad_words import BadWords
    from ess.engine.tokens.counts import Tally
    from ess.engine.tokens.grammar import Follows
    from ess.engine.tokens.stops import Reader
    from ess.pool.warmup import WindowSet

State = Literal["waiting", "landing", "loading", "prefilling", "decoding", "preempted", "finished"]
FinishReason = Literal["length", "stop", "cancelled", "refused", "failed", "sent"]

PRIORITY_MAX: Final = (1 << 31) - 1
MOVES: Final[frozenset[tuple[State, State]]] = frozenset(
    {
        ("waiting", "landing"),
        ("waiting", "loading"),
        ("waiting", "prefilling"),
        ("waiting", "finished"),
        ("landing", "preempted"),
        ("landing", "waiting"),
        ("landing", "finished"),
        ("loading", "preempted"),
        ("loading", "finished"),
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


@dataclass(frozen=True, slots=True)
class Take:
    """Where a prompt's rows come from: from the worker of the boot epoch `peer`. Rows that are
    `fake` are invented here, to measure decoding by itself."""

    uid: int
    peer: int = 0
    fake: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """`prompt`, `sampling`, `priority`, `leader`, `salt`, `gives`, `takes` and `prior_output`
    come from outside; everything else is the engine's, which is its `owner`. Requests of different
    `salt` share no cached prefix. The output begins with `prior_output`, which another engine has
    made; its rows are made as those of the prompt are. `gives` is the number of the handoff in
    which its prompt's rows leave. It `has_landed` from the moment when all rows have come, with
    their `windows`, until the request is on the device, and `has_loaded` as long when pages have
    come from the disk.

    `is_plain`: its `sampling` leaves logits as they are. `ends` are the ids that end it, `ended_by`
    is the id or the stop string that did. It has failed when its grammar could not be followed to
    the end, for the reason in `matcher.failure`, or when the model's logits were NaN, which `fault`
    says. `refusal` says why it could never have been admitted, or what its grammar lacks.

    `output` is what the host has learned. `flight_count` steps that it has not learned may have
    made up to `ahead_count` tokens more; `draft_count` drafts wait on the device for the next one.
    Of the rows that its `turn_count` turns asked for, `asked_count`, `hit_count` were resident.
    """

    number: int
    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    leader: Request | None = None
    salt: bytes = b""
    gives: int | None = None
    takes: Take | None = None
    prior_output: tuple[int, ...] = ()
    owner: object = None
    output: list[int] = field(default_factory=list)
    state: State = "waiting"
    reason: FinishReason | None = None
    sequence: Sequence | None = None
    cached_count: int = 0
    prefilled_count: int = 0
    has_landed: bool = False
    has_loaded: bool = False
    windows: tuple[list[WindowSet], int] | None = None
    ends: frozenset[int] = frozenset()
    ended_by: int | str | None = None
    reader: Reader | None = None
    matcher: Follows | None = None
    tally: Tally | None = None
    bad_words: BadWords | None = None
    draft_count: int = 0
    flight_count: int = 0
    ahead_count: int = 0
    is_held: bool = False
    refusal: EssError | None = None
    fault: str = ""
    turn_count: int = 0
    hit_count: int = 0
    asked_count: int = 0
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_plain = self.sampling.is_plain
        if not self.prompt:
            raise BadInput(f"request {self.number} has an empty prompt")
        if abs(self.priority) > PRIORITY_MAX:
            raise BadInput(f"priority is {self.priority}, must be -{PRIORITY_MAX}..{PRIORITY_MAX}")

    @property
    def rank(self) -> tuple[int, int]:
        """The lower rank comes first: the lower priority value, then the older request."""
        return self.priority, self.number

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def length_max(self) -> int:
        return len(self.prompt) + self.sampling.tokens_max

    @property
    def reuse_max(self) -> int | None:
        """How much of a cached prompt may stay uncomputed: what is scored is computed."""
        sampling = self.sampling
        return None if sampling.prompt_logprobs is None else sampling.prompt_start

    @property
    def lands(self) -> bool:
        """Whether its rows come from elsewhere. A prompt that is scored is computed here."""
        return self.takes is not None and self.sampling.prompt_logprobs is None

    @property
    def has_come(self) -> bool:
        """Whether its rows have come, from a worker or a disk, and it waits for the device."""
        return self.has_landed or self.has_loaded

    @property
    def left_count(self) -> int:
        """Tokens that may still be made."""
        return self.sampling.tokens_max - len(self.output)

    @property
    def first_leader(self) -> Request:
        """The leader that follows no other; itself where it has none."""
        return self if self.leader is None else self.leader.first_leader

    @property
    def prefill_count(self) -> int:
        """Tokens to prefill: all but the last token of the prompt, or of
        `prior_output`, which decode runs first."""
        return len(self.prompt) + len(self.prior_output) - 1

    @property
    def is_prefilled(self) -> bool:
        return self.prefilled_count == self.prefill_count

    @property
    def has_prompt(self) -> bool:
        """Whether the rows of its prompt are where decoding reads them."""
        is_there = self.state not in ("landing", "loading") and not self.has_come
        return self.is_prefilled and is_there

    def recall(self) -> None:
        """Takes `prior_output`. BadInput where that has ended the answer, or where chances of
        the prompt are asked for, which come before the first token."""
        assert not self.output, f"request {self.number} has made tokens of its own"
        if self.prior_output and self.sampling.prompt_logprobs is not None:
            raise BadInput("prior_output has tokens, and prompt_logprobs were made before them")
        if self.prior_output and len(self.prior_output) < self.sampling.tokens_max:
            self.take(list(self.prior_output))
        if self.reason is not None or len(self.output) < len(self.prior_output):
            raise BadInput(
                f"prior_output has {len(self.prior_output)} tokens, which end the answer"
            )

    def take(self, made: list[int]) -> list[int]:
        """Append new tokens up to the first that ends the request; returns those kept."""
        assert made, f"request {self.number}: a step made no token"
        assert self.reason is None, f"request {self.number} ended ({self.reason}), and takes tokens"
        output, most = self.output, self.sampling.tokens_max
        assert len(output) < most, f"request {self.number} has no token left to make"
        is_followed = self.reader is not None or self.matcher is not None
        for count, token in enumerate(made, start=1):
            output.append(token)
            if is_followed or token in self.ends or len(output) == most:
                self.reason = self._reason_after(token)
            if self.reason is not None:
                self._end_text()
                return made[:count]
        return made

    def break_off(self) -> None:
        """Its next token's logits are NaN, so no token can be drawn from them."""
        if self.reason is None:
            self.reason = "failed"
            self.fault = f"the logits behind {len(self.tokens):,} tokens are no numbers"
            self._end_text()

    @property
    def _may_stop(self) -> bool:
        return len(self.output) > self.sampling.tokens_min

    def _end_text(self) -> None:
        """The end of the text may complete a stop string, of which a request has then ended."""
        if self.reader is None:
            return
        has_answered = self.reason in ("length", "stop")
        stop = self.reader.finish(may_stop=has_answered and self._may_stop)
        if stop is not None:
            self.reason, self.ended_by = "stop", stop

    def _reason_after(self, token: int) -> FinishReason | None:
        if self.matcher is not None and self.matcher.failure:
            return "failed"
        if token in self.ends:
            self.ended_by = token
        elif self.reader is not None:
            self.ended_by = self.reader.read(token, may_stop=self._may_stop)
        if self.ended_by is not None:
            return "stop"
        return "length" if self.left_count == 0 else None

    def check(self) -> None:
        """Checks what must hold between two steps of the engine."""
        name = f"request {self.number} ({self.state})"
        ended, has_rows = self.state == "finished", self.sequence is not None
        assert ended == (self.reason is not None), f"{name} has the reason {self.reason}"
        assert has_rows or self.state in ("waiting", "finished"), f"{name} has no rows"
        assert not has_rows or self.state != "waiting", f"{name} has rows"
        assert not (ended and has_rows) or self.flight_count, f"{name} has rows that no step needs"
        assert 0 <= self.prefilled_count <= self.prefill_count, f"{name}: {self.prefilled_count}"
        assert self.state != "decoding" or self.is_prefilled, f"{name} lacks rows of its prompt"
        assert self.state != "prefilling" or not self.is_prefilled, f"{name} has its whole prompt"
        assert not self.is_held or self.state in ("preempted", "finished"), f"{name} is held"
        assert self.state != "landing" or self.takes is not None, f"{name} takes no rows"
        assert not self.has_come or self.state in ("preempted", "finished"), f"{name} has come"
        assert self.windows is None or self.has_landed, f"{name} has windows without rows"
        assert self.refusal is None or self.reason == "refused", f"{name} goes on when refused"
        assert self.ended_by is None or self.reason == "stop", f"{name} ended by {self.ended_by!r}"
        self._check_counts(name)
        if self.reader is not None:
            self.reader.check()
        if self.tally is not None:
            self.tally.check(self.output)

    def _check_counts(self, name: str) -> None:
        assert self.left_count >= 0, f"{name} made {len(self.output)} tokens"
        assert 0 <= self.flight_count <= self.ahead_count, f"{name}: a step without its tokens"
        assert bool(self.flight_count) == bool(self.ahead_count), f"{name}: tokens without a step"
        assert 0 <= self.hit_count <= self.asked_count, f"{name}: more hits than rows asked for"
        assert self.draft_count >= 0, f"{name}: {self.draft_count} drafts"
        if self.state in ("waiting", "landing", "loading", "prefilling", "preempted"):
            assert self.flight_count == 0, f"{name} is in a step under way"
            assert self.draft_count == 0, f"{name} has drafts"
