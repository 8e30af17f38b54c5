"""The messages between the server process and the engine process. Needs no torch.

    front -> engine   Add, Abort, AbortNamed, Flush, Hold, Trace, Meet; the first alone: Lost, Stop
    engine -> front   Ready once, then Progress after every step and Status a few times a second

Each is one msgpack array, its type first. A server has one or several processes, its fronts, all
with the same engine. Front f of n gives its requests the numbers f, f + n, f + 2n and so on; so a
number says whose request it is, and `front` in other messages says who is to get the answer. A
number is never used again, so a late answer can only meet a request that is gone.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

import msgspec

from ess.decoding import UNDECODABLE
from ess.engine.config import ProcessConfig
from ess.engine.requests.request import FinishReason
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.pool.disk.use import DiskUse


class Handoff(msgspec.Struct, frozen=True, array_like=True):
    """The prompt's rows go to another worker (`give`: the request ends as "sent" when its prompt is
    there), or come from `peer`, named by its boot epoch (`take`), or are invented, for measuring
    (`fake`). Both sides know the handoff by `uid`."""

    uid: int
    peer: int = 0
    kind: Literal["give", "take", "fake"] = "give"


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`leader` is the number of an earlier request with this prompt, for the same answer. `name` is
    the id by which the client knows the prompt, `call` that of its HTTP request. Requests of
    different `salt` share no cached prefix. `prior_output` are the first tokens of
    the answer, which another engine has made: this one makes those behind them."""

    number: int
    prompt: list[int]
    sampling: Sampling
    priority: int = 0
    leader: int | None = None
    name: str = ""
    salt: str = ""
    handoff: Handoff | None = None
    prior_output: list[int] = []
    call: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class AbortNamed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the requests of all fronts that have one of these names, or whose call has; None means
    every request."""

    names: frozenset[str] | None
    front: int

    def means(self, name: str, call: str) -> bool:
        return self.names is None or not self.names.isdisjoint((name, call))


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget cached prefixes."""

    front: int = 0


class Hold(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Run no step from now on, or run steps again. Requests stay as they are, and may come and be
    aborted meanwhile. Held answers it. With a date it repeats what a lost engine said: that is not
    answered, and counts unless this engine knows of a later word (`holding`)."""

    is_on: bool
    front: int = 0
    said_at_s: float | None = None


class Trace(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Record from now on what every step does, answered by Tracing; or stop, and send the record as
    Traced."""

    is_on: bool
    front: int = 0


class Meet(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Another worker, whose server is at `address`, and its sealed description of itself."""

    address: str
    metadata: bytes
    front: int = 0


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A front has ended: give up its requests. The next one in its place starts afresh."""

    front: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End the process; requests still in it are given up."""


class Piece(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a step did for one request. `cached_count` comes with the first piece only; `sentence`
    says why it was refused or has failed, and `is_ours` that it may be asked again: the fault is
    not the request's. `prompt_chances` go on where the last ones ended."""

    number: int
    tokens: tuple[int, ...] = ()
    reason: FinishReason | None = None
    cached_count: int | None = None
    chances: tuple[Chance, ...] = ()
    sentence: str = ""
    prompt_chances: tuple[Chance, ...] = ()
    is_ours: bool = False


class PoolUse(msgspec.Struct, frozen=True, array_like=True):
    """The use of a pool, in units of `unit_bytes`."""

    name: str
    used: int
    capacity: int
    unit_bytes: int = 0


class RequestLine(msgspec.Struct, frozen=True, array_like=True):
    """A request as it stands: of the rows that its turns asked for, how many were resident."""

    number: int
    state: str
    prompt_count: int
    prefilled_count: int
    made_count: int
    tokens_max: int
    turn_count: int = 0
    hit_count: int = 0
    asked_count: int = 0
    name: str = ""
    age_s: float = 0.0


class TraceSpan(msgspec.Struct, frozen=True, array_like=True):
    """`start_us` counts from the trace's beginning."""

    lane: str
    name: str
    start_us: float
    took_us: float


class Ready(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """`groups` are the layers that share slots; a row of one layer has `row_bytes`. `metadata` is
    what other workers must know for handoffs with this one; empty if it takes part in none."""

    vocabulary: int
    length_max: int
    load_s: float
    groups: tuple[tuple[int, ...], ...] = ()
    row_bytes: int = 0
    metadata: bytes = b""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A step's pieces, and the monotonic clock when they left: both processes read the same."""

    pieces: tuple[Piece, ...]
    at_s: float = 0.0


class PeerLine(msgspec.Struct, frozen=True, array_like=True):
    """Another worker, by its boot epoch; `heard_s` seconds ago it gave its last sign of life."""

    address: str
    epoch: int
    is_up: bool = True
    heard_s: float = 0.0


class HandoffLine(msgspec.Struct, frozen=True, array_like=True):
    """A handoff that has ended. `marks` are its moments by name, in seconds since its beginning at
    `began_s` of the engine's clock; `sentence` says why it came to nothing, if that is so."""

    uid: int
    kind: Literal["give", "take"]
    outcome: Literal["landed", "missed", "sent", "lapsed"]
    marks: tuple[tuple[str, float], ...] = ()
    sentence: str = ""
    began_s: float = 0.0


class HandoffStatus(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The first two say what is under way; the others count since the engine started. `again_count`
    are the pieces asked for a second time, `failed_count` the failed transfers, each tried
    again while its handoff lives. `recent` are the last handoffs that ended, newest first."""

    open_arrival_count: int = 0
    open_departure_count: int = 0
    landed_count: int = 0
    missed_count: int = 0
    sent_count: int = 0
    lapsed_count: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    again_count: int = 0
    failed_count: int = 0
    refused_count: int = 0
    peers: tuple[PeerLine, ...] = ()
    recent: tuple[HandoffLine, ...] = ()


class StageLine(msgspec.Struct, frozen=True, array_like=True):
    """One stage of a pipelined worker: its main layers, the share of the last seconds in which it
    ran chunks, how many it has run, how long ago it gave a sign of life."""

    rank: int
    layers: tuple[int, int]
    busy_share: float = 0.0
    chunk_count: int = 0
    beat_s: float = 0.0


class GraphLine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Graphs of steps on a device: `held` of at most `most` graphs, and the bytes that they take of
    `byte_max`. Then, since the start: steps that were replayed, steps that were captured, graphs
    that gave way to others, and steps that ran eagerly, by cause."""

    held: int
    most: int
    bytes: int
    byte_max: int
    replayed: int
    captured: int
    dropped: int
    eager: dict[str, int]


class ExpertLine(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Experts that several engines divide, over their last steps: how often one was chosen, and
    what an engine had to do on average of what the busiest had, as a mean over the layers."""

    step_count: int
    chosen_count: int
    balance: float


class Status(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """The engine at one moment: counts since it started; lists are per layer group.

    `modes` says how often each layer ran RESIDENT, NONE, DA and DBA. Per layer too: microseconds of
    fetches, and of those what was waited for. `turn_count` counts every request of every step.
    `preempted_count` requests are set aside now, `preemption_count` times one was.
    `shortage` says in numbers what the limiter means. Of the rows that requests asked for in their
    step i after landing, `landed_asked[i]`, `landed_hits[i]` were resident. `requests` are the
    oldest, as many as are shown. `depth_reasons` say why the next step's `depth` is 0 whatever was
    configured. `open_counts` are the requests of each front that have not ended. `handoff` is None
    in an engine that takes part in no handoffs. `stages` are those of a pipelined worker, whose
    pools and counts above are those of its first stage. `disk` is None without a disk tier,
    `graphs` where no step is a graph, `experts` where they are not divided, or not yet counted.
    `is_held` says that no step is run for now, `held_at_s` since when that has been so or not.
    """

    step_count: int = 0
    turn_count: int = 0
    step_s: float = 0.0
    running_count: int = 0
    waiting_count: int = 0
    preempted_count: int = 0
    preemption_count: int = 0
    made_count: int = 0
    prompt_count: int = 0
    cached_count: int = 0
    limiter: str | None = None
    pools: tuple[PoolUse, ...] = ()
    hits: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    fetched_bytes: tuple[int, ...] = ()
    stored_bytes: tuple[int, ...] = ()
    slots_used: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    modes: tuple[tuple[int, ...], ...] = ()
    transfer_us: tuple[int, ...] = ()
    exposed_us: tuple[int, ...] = ()
    verified_count: int = 0
    mismatch_count: int = 0
    shortage: str = ""
    landed_hits: tuple[int, ...] = ()
    landed_asked: tuple[int, ...] = ()
    requests: tuple[RequestLine, ...] = ()
    depth: int = 0
    depth_reasons: tuple[str, ...] = ()
    open_counts: tuple[int, ...] = ()
    handoff: HandoffStatus | None = None
    stages: tuple[StageLine, ...] = ()
    disk: DiskUse | None = None
    graphs: GraphLine | None = None
    experts: ExpertLine | None = None
    is_held: bool = False
    held_at_s: float = 0.0

    @property
    def fullness(self) -> float:
        """The used share of the fullest pool. Slots do not count: they should be full."""
        return max((pool.used / max(pool.capacity, 1) for pool in self.pools), default=0.0)


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`sentence` says why nothing was forgotten, if nothing was."""

    sentence: str = ""
    front: int = 0


class Held(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers Hold; `at_s` is the date of this word (`holding`)."""

    is_on: bool
    front: int = 0
    at_s: float = 0.0


class Tracing(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """`sentence` says why no trace was begun or none can be given out, if that is so."""

    sentence: str = ""
    front: int = 0


class Traced(msgspec.Struct, frozen=True, array_like=True, tag=True):
    spans: tuple[TraceSpan, ...]
    left_out: int = 0
    front: int = 0


class Met(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answers Meet: the other worker's boot epoch and our own metadata for it; or `sentence` says
    why there can be no handoffs with it."""

    address: str
    epoch: int
    metadata: bytes = b""
    sentence: str = ""
    front: int = 0


class Aborted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How many names AbortNamed has met."""

    count: int
    front: int


class Cut(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A front still runs but reads no messages any more; its requests are given up."""

    lost: int


class Fault(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last word of an engine that cannot go on."""

    sentence: str


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """The place of this process among the `size` processes of a pipelined worker: `rank` is its
    stage times `team` plus its place in the stage's team. All processes get the same values, except
    for the rank.

    `layers` are the main layers of each stage: the first, and the one behind the last. Rank 0 is
    met at `init`, a "tcp://HOST:PORT". Processes of another `generation` are of another start of
    the worker, and are not let in. The memory in Launch is that of all stages together: each takes
    the share of its layers, so that all have equally many pages. `device` is this process's own.
    """

    rank: int
    size: int
    init: str
    layers: tuple[tuple[int, int], ...]
    generation: int = 0
    team: int = 1
    team_kind: Literal["tp", "cp"] = "tp"
    dynamic: bool = False
    smoothing: float = 0.75
    stage_timeout_s: float = 60.0
    device: str = "cpu"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """All that an engine process needs at its start; the sizes are those of its pools. All workers
    between which requests are handed over share the `secret`, which seals their messages. `rank` is
    there for a process of a pipelined worker."""

    model: str
    config: ProcessConfig
    length_max: int
    slot_bytes: int
    host_bytes: int
    index_bytes: int
    secret: str = ""
    rank: Rank | None = None


ToEngine = Add | Abort | AbortNamed | Flush | Hold | Trace | Meet | Lost | Stop
Answered = Flushed | Held | Tracing | Traced | Aborted | Met
FromEngine = Ready | Progress | Status | Answered | Cut | Fault


class Packer:
    """Messages to bytes and back; one encoder and decoder are kept for all."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=as_dict)
        self._to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def pack(self, message: ToEngine | FromEngine) -> bytes:
        return self._encoder.encode(message)

    def for_engine(self, raw: bytes) -> ToEngine:
        try:
            return self._to_engine.decode(raw)
        except UNDECODABLE as error:
            raise BadInput(f"a message to the engine is malformed: {error}") from None

    def for_server(self, raw: bytes) -> FromEngine:
        try:
            return self._from_engine.decode(raw)
        except UNDECODABLE as error:
            raise BadInput(f"a message from the engine is malformed: {error}") from None


def as_dict(value: object) -> object:
    """Encodes the only type in our messages that msgpack does not know."""
    assert isinstance(value, MappingProxyType), f"a message holds a {type(value).__name__}"
    return dict(value)
