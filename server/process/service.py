"""What every route works with: tokenizer, link to the engine, limits and admission."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from ess.clock import Clock
from ess.engine.process.messages import Handoff
from ess.engine.tokens.sampling import Sampling
from ess.engine.tpot_control import TPOT
from ess.models.chat.styles import ChatStyle
from ess.models.text.tokenizer import Tokenizer
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SLOTS, WINDOW_SLOTS
from ess.server.http.responses import Absent, Interrupted, Refused
from ess.server.process.board import SUBSCRIBERS_MAX, Board
from ess.server.process.engines.stages import missing
from ess.server.process.link import EngineLink
from ess.server.process.pair.peers import WHOLE, Split
from ess.server.process.requests.background import Background
from ess.server.process.requests.call import Call
from ess.server.process.requests.kept_responses import KeptResponses
from ess.server.process.tally import Shelf, Tally, together
from ess.server.process.texts import Texts
from ess.transfer.members import Member, members_of

REASON_OF: Final[Mapping[str, str]] = {
    HOST_PAGES: "host_pool_full",
    INDEX_PAGES: "indexer_full",
    SLOTS: "hot_pool_full",
    WINDOW_SLOTS: "hot_pool_full",
    TPOT: "tpot",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`waiting_max` requests may wait beyond the `running_max` that the engine runs.

    `names` are the server's host names, besides localhost and addresses. `tells_usage` ends every
    stream with its usage.
    """

    running_max: int
    waiting_max: int
    length_max: int
    tokens_default: int = 2048
    choices_max: int = 128
    keep_alive_s: float = 15.0
    stall_s: float = 60.0
    probe_s: float = 20.0
    body_max: int = 32 << 20
    names: tuple[str, ...] = ()
    tells_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The checkpoint's recommendation for what a request leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Service:
    names: tuple[str, ...]
    model_type: str
    architecture: str
    tokenizer: Tokenizer
    texts: Texts
    style: ChatStyle
    is_marked: bool
    eos_ids: tuple[int, ...]
    vocabulary: int
    token_capacity: int
    limits: Limits
    defaults: SamplingDefaults
    link: EngineLink
    board: Board
    clock: Clock
    tally: Tally = field(default_factory=Tally)
    described: Mapping[str, Any] = field(default_factory=dict)
    weight_bytes: int = 0
    started_unix: int = field(default_factory=lambda: int(time.time()))
    compat: tuple[str, ...] = ("vllm", "sglang")
    split: Split = WHOLE
    draining: bool = False
    layers: tuple[tuple[int, int], ...] = ()
    shelf: Shelf | None = None
    kept: KeptResponses | None = None
    background: Background = field(default_factory=Background)
    documents: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    long_events: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.tally.to_socket = self.link.calls.to_socket
        self.link.calls.refusals = self.tally.refusals

    @property
    def tally_of_all(self) -> Tally:
        """The counts of all the server's processes; the others' are a moment old."""
        return together([self.tally, *([] if self.shelf is None else self.shelf.others())])

    @property
    def epoch(self) -> int:
        """The engine's boot epoch, by which other workers know it."""
        return self._members[0].epoch

    @property
    def stage_count(self) -> int:
        """The engine's stages: each has some of the layers, and hands their rows over."""
        return len(self._members)

    @property
    def _members(self) -> tuple[Member, ...]:
        assert self.split.seal is not None, "a worker of a pair has a secret"
        assert self.link.engine.ready is not None, "the engine is there"
        return members_of(self.split.seal, self.link.engine.ready.metadata)

    @property
    def missing_stages(self) -> list[str]:
        """The stages that the engine still waits for before it is ready."""
        if self.link.engine.state not in ("starting", "restarting"):
            return []
        return missing(self.layers, self.board.status.stages)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def waiting_count(self) -> int:
        """Requests that the engine does not run yet; the status may be a moment old."""
        return max(0, self.open_count - self.board.status.running_count)

    @property
    def open_count(self) -> int:
        """Open requests of all fronts."""
        return self.link.open_count + self.link.open_elsewhere_count

    @property
    def unanswered_count(self) -> int:
        """Open requests, and those that have ended and whose document this process has to make."""
        return self.open_count + self.tally.document_count

    @property
    def unanswered_by_all_count(self) -> int:
        """The same with the documents of all processes; what others know is a moment old."""
        return self.open_count + self.tally_of_all.document_count

    def check_model(self, model: str | None) -> None:
        """Refuses a model we do not have; a router without its name sends `unknown`, or none."""
        if model and model != "unknown" and model not in self.names:
            raise self.absent(model)

    def absent(self, model: str) -> Absent:
        sentence = f"the model {model!r:.80} is not served here; {self.name!r} is"
        return Absent(sentence, code="model_not_found")

    def begin(
        self,
        request_id: str,
        prompts: Sequence[tuple[list[int], Sampling]],
        *,
        names: Sequence[str] = (),
        priority: int = 0,
        salt: str = "",
        handoffs: Sequence[Handoff] = (),
    ) -> Call:
        """Hands the prompts to the engine, or raises why it cannot. `names` is empty, or has the id
        of each prompt."""
        self.check_state()
        self._check_room(len(prompts))
        return self.link.start(
            request_id, prompts, names=names, priority=priority, salt=salt, handoffs=handoffs
        )

    def watch(self) -> asyncio.Event:
        """An event that board updates set, until `board.leave` is called with it."""
        if self.board.is_full:
            sentence = f"{SUBSCRIBERS_MAX} viewers are watching, and no more are served"
            raise self.refused(sentence, "viewers", 5.0)
        return self.board.enter()

    def check_state(self) -> None:
        """Whether a request can be taken; counts it if not."""
        try:
            self._check_state()
        except Refused as error:
            self.tally.refusals[error.reason] += 1
            raise

    def _check_state(self) -> None:
        self._check_engine()
        if self.draining:
            sentence = "the server is shutting down; send the request to another"
            raise Refused(sentence, reason="draining", retry_after_s=5.0)
        self.check_loaded()

    @property
    def state(self) -> str:
        """The state of the server, in a word."""
        if self.link.engine.state == "lost":
            return "lost"
        if self.draining:
            return "draining"
        is_paused = self.link.engine.state == "ready" and self.link.engine.is_held
        return "paused" if is_paused else self.link.engine.state

    def check_making(self) -> None:
        """Refuses also where requests are taken but no token is made. It is for probes: they are no
        requests, so nothing is counted."""
        self._check_state()
        if self.link.engine.is_held:
            sentence = "generation is paused; /resume or /continue_generation lets it go on"
            raise Refused(sentence, reason="paused", retry_after_s=5.0)

    def check_loaded(self) -> None:
        """Refuses until the engine is loaded; a draining worker still answers other workers."""
        self._check_engine()
        if self.link.engine.state == "starting" or not (self.shelf is None or self.shelf.has_all()):
            sentence = "the model is being loaded; try again soon"
            raise Refused(sentence + self.awaited, reason="starting", retry_after_s=2.0)

    def _check_engine(self) -> None:
        if self.link.engine.state == "lost":
            raise Interrupted(self.link.engine.why_lost)
        if self.link.engine.state == "restarting":
            sentence = f"{self.link.engine.why_lost}; it is being started again{self.awaited}"
            again_s = Interrupted.retry_after_s
            raise Refused(sentence, reason="restarting", retry_after_s=again_s)

    @property
    def awaited(self) -> str:
        """The missing stages, as the end of a sentence."""
        return f"; missing: {', '.join(awaited)}" if (awaited := self.missing_stages) else ""

    def _check_room(self, count: int) -> None:
        room = self.limits.running_max + self.limits.waiting_max
        open_count = self.unanswered_count
        if open_count + count <= room:
            return
        limiter = self.board.status.limiter or ""
        reason = REASON_OF.get(limiter, "queue_full")
        sentence = f"{open_count} requests are open, {count} more would pass the limit of {room}"
        if limiter:
            sentence += f"; those that wait are short of {limiter}"
        again_s = min(30.0, max(1.0, self.tally.whole.mean_s))
        raise self.refused(f"{sentence}; try again in {again_s:.0f} s", reason, again_s)

    def refused(self, sentence: str, reason: str, retry_after_s: float) -> Refused:
        """Counts a refusal and returns its error, which the caller raises."""
        self.tally.refusals[reason] += 1
        return Refused(sentence, reason=reason, retry_after_s=retry_after_s)
