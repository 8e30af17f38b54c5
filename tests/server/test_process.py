"""The engine's loop, sans sockets: what it obeys, what it says, on a real engine."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.layers import spans
from ess.engine.process.messages import (
    Abort,
    Aborted,
    AbortNamed,
    Add,
    Flush,
    Flushed,
    FromEngine,
    Handoff,
    HandoffLine,
    HandoffStatus,
    Lost,
    Meet,
    Met,
    Packer,
    PeerLine,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
    ToEngine,
    Trace,
    Traced,
    TraceSpan,
    Tracing,
)
from ess.engine.process.status import in_words
from ess.engine.process.worker import EngineLoop
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.grammar import Grammar
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState, PoolFull
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SEQUENCES, SLOTS, WINDOW_SLOTS
from ess.server.commands.start.settings import FIELDS
from tests.support.checkpoints import small, tokens
from tests.support.greedy import greedy
from tests.support.manual_clock import ManualClock


def build(
    mtp: int,
    host_pages: int = 40,
    modes: str = "layerwise",
    slot_pages: int = 8,
    depth: int = 0,
) -> Engine:
    layout = small().config.layout(row="f32", index="f32")
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * slot_pages,
        host_bytes=host_pages * layout.host_page_bytes,
        length_max=1024,
        slot_floor=24,
        sequence_max=3,
    )
    config = EngineConfig(mtp=mtp, chunk_tokens=64, modes=modes, depth=depth)
    return Engine(small(), offload, config)


FULL = Sampling(
    tokens_max=9,
    tokens_min=2,
    temperature=0.5,
    top_p=0.9,
    top_k=4,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    logit_bias={7: -1.0},
    stop_ids=frozenset({3, 4}),
    seed=-11,
    logprobs=2,
    prompt_logprobs=1,
    prompt_start=3,
    grammar=Grammar("regex", "a"),
)


class Script:
    """A wire whose messages are written beforehand: at turn n comes `arriving[n]`."""

    def __init__(self, **arriving: list[ToEngine]) -> None:
        self.arriving = {int(turn[1:]): messages for turn, messages in arriving.items()}
        self.turn = 0
        self.given: list[FromEngine] = []
        self.front_count = 1

    def take(self, *, timeout_s: float) -> list[ToEngine]:
        self.turn += 1
        return self.arriving.get(self.turn, [])

    def give(self, message: FromEngine) -> None:
        self.given.append(message)

    def pieces(self, number: int) -> list[Piece]:
        return [
            piece
            for message in self.given
            if isinstance(message, Progress)
            for piece in message.pieces
            if piece.number == number
        ]

    def made(self, number: int) -> list[int]:
        return [token for piece in self.pieces(number) for token in piece.tokens]


def run(
    wire: Script, turns: int, *, mtp: int = 1, host_pages: int = 40, modes: str = "layerwise"
) -> EngineLoop:
    clock = ManualClock()
    loop = EngineLoop(build(mtp, host_pages, modes), wire, clock)
    for _ in range(turns):
        loop.turn()
        clock.advance(0.06)
    return loop


def prompt(length: int) -> list[int]:
    return tokens(length, 512, seed=length)


@pytest.mark.parametrize("mtp", [1, 3])
def test_tokens_come_in_pieces_and_are_the_model_s(mtp: int):
    first, second = prompt(90), prompt(130)
    ends = frozenset(greedy(small(), second, 3)[2:])
    wire = Script(
        t1=[Add(5, first, Sampling(tokens_max=8))],
        t4=[Add(6, second, Sampling(tokens_max=6, stop_ids=ends))],
    )
    loop = run(wire, 40, mtp=mtp, modes="none")
    assert wire.made(5) == greedy(small(), first, 8)
    stopped = greedy(small(), second, 3)
    assert wire.made(6) == stopped[: stopped.index(stopped[2]) + 1]
    assert [piece.reason for piece in wire.pieces(5)][-1] == "length"
    assert [piece.reason for piece in wire.pieces(6)][-1] == "stop"
    assert [piece.cached_count for piece in wire.pieces(5) if piece.tokens][1:] == [None] * len(
        [piece for piece in wire.pieces(5) if piece.tokens][1:]
    )
    assert wire.pieces(5)[0].cached_count == 0
    status = loop.status()
    assert (status.made_count, status.prompt_count) == (8 + len(wire.made(6)), 220)
    assert (status.running_count, status.waiting_count) == (0, 0)
    assert sum(status.landed_hits) > 0
    loop.close()


def test_an_abort_frees_everything_and_an_unknown_one_is_nothing():
    wire = Script(t1=[Add(1, prompt(90), Sampling(tokens_max=500))], t9=[Abort(1), Abort(77)])
    loop = run(wire, 12)
    assert len(wire.made(1)) < 20
    assert loop.status().running_count == 0
    assert set(loop.status().slots_used) == {0}
    loop.close()


def test_a_wrong_wish_is_refused_with_its_sentence_and_nothing_runs():
    wire = Script(
        t1=[
            Add(1, [9999], Sampling(tokens_max=4)),
            Add(2, prompt(4), Sampling(stop_ids=frozenset({512}))),
            Add(3, prompt(1000), Sampling(tokens_max=400)),
        ]
    )
    loop = run(wire, 2)
    for number, says in ((1, "prompt ids"), (2, "stop_token_ids id 512"), (3, "at most 1024")):
        [piece] = wire.pieces(number)
        assert piece.reason == "refused"
        assert says in piece.sentence
    assert loop.status().step_count == 0
    loop.close()


def test_what_never_fits_is_refused_and_what_must_wait_is_counted():
    wire = Script(
        t1=[
            Add(1, prompt(600), Sampling(tokens_max=4)),
            *(Add(n, prompt(64 + n), Sampling(tokens_max=90)) for n in (2, 3, 4, 5)),
        ]
    )
    loop = run(wire, 6, host_pages=8)
    [piece] = wire.pieces(1)
    assert piece.reason == "refused"
    assert "needs 10 index pages" in piece.sentence
    assert "more than the pool's" in piece.sentence
    assert piece.sentence.endswith("; raise index_bytes, or host_bytes where that is auto")
    status = loop.status()
    assert status.waiting_count >= 1
    assert status.limiter in ("host pages", "sequences")
    assert status.shortage.endswith(("free; raise host_bytes", "active; raise max_running"))
    assert status.fullness > 0.2
    for _ in range(300):
        loop.turn()
    assert [len(wire.made(n)) for n in (2, 3, 4, 5)] == [90] * 4
    assert loop.status().limiter is None
    loop.close()


def test_a_shortage_is_told_in_a_server_s_settings():
    """For every pool that can be short; any other sentence stays as it is."""
    for limiter in (SLOTS, WINDOW_SLOTS, INDEX_PAGES, HOST_PAGES, SEQUENCES):
        sentence, shortage = "needs 5; lower slot_floor, or close a sequence", "needs 5"
        full = PoolFull(limiter=limiter, needed=5, free=0, sentence=sentence, shortage=shortage)
        said = in_words(full)
        assert said.startswith("needs 5; raise ")
        assert {word.strip(",") for word in said.split() if "_" in word} <= FIELDS.keys()
    for other in (
        PoolFull(limiter="tpot", needed=1, free=0, sentence="2 fit into 5 ms"),
        BadInput("2 fit into 5 ms"),
    ):
        assert in_words(other) == "2 fit into 5 ms"


def test_the_status_says_why_a_step_waits_for_the_one_before():
    clock = ManualClock()
    penalised = Sampling(tokens_max=9, presence_penalty=0.5)
    wire = Script(t1=[Add(1, prompt(20), Sampling(tokens_max=9)), Add(2, prompt(9), penalised)])
    loop = EngineLoop(build(1, depth=1), wire, clock)
    assert (loop.status().depth, loop.status().depth_reasons) == (1, ())
    for _ in range(4):
        loop.turn()
    assert loop.status().depth == 0
    assert loop.status().depth_reasons == ("request 1: penalties count the output",)
    for _ in range(20):
        loop.turn()
    assert wire.made(1) == greedy(small(), prompt(20), 9)
    assert (len(wire.made(2)), loop.status().depth) == (9, 1)
    loop.close()


def test_each_of_those_refused_at_once_hears_its_own_reason():
    wire = Script(t1=[Add(n, prompt(n), Sampling(tokens_max=4)) for n in (600, 700)])
    loop = run(wire, 3, host_pages=8)
    for number, pages in ((600, 10), (700, 11)):
        [piece] = wire.pieces(number)
        assert f"needs {pages} index pages" in piece.sentence
    loop.close()


def test_a_flush_waits_for_nobody_and_forgets():
    asked = prompt(200)
    wire = Script(
        t1=[Add(1, asked, Sampling(tokens_max=30))],
        t3=[Flush()],
        t60=[Add(2, asked, Sampling(tokens_max=2))],
        t80=[Flush()],
        t81=[Add(3, asked, Sampling(tokens_max=2))],
    )
    loop = run(wire, 100)
    flushed = [message for message in wire.given if isinstance(message, Flushed)]
    assert [message.sentence for message in flushed] == ["1 requests are running or waiting", ""]
    assert wire.pieces(2)[0].cached_count >= 64
    assert wire.pieces(3)[0].cached_count == 0
    assert wire.made(2) == wire.made(3) == wire.made(1)[:2]
    loop.close()


def test_a_flush_is_not_refused_because_a_device_has_failed(monkeypatch: pytest.MonkeyPatch):
    loop = run(Script(t2=[Flush()]), 1)
    monkeypatch.setattr(loop._engine.offload, "drain", Mock(side_effect=BadState("status 700")))
    with pytest.raises(BadState, match="700"):
        loop.turn()


@pytest.mark.parametrize("slot_pages", [2, 8])
@pytest.mark.parametrize("modes", ["none", "resident", "da", "dba", "layerwise"])
def test_what_requests_found_resident_by_step_since_they_landed(modes: str, slot_pages: int):
    """Every query asks each of two groups for 24 rows. What it could not attend at once was fetched
    for it, read in place, or in its first step still on its way from the landing."""
    wire = Script(
        t1=[Add(1, prompt(90), Sampling(tokens_max=9))],
        t4=[Add(2, prompt(130), Sampling(tokens_max=40))],
    )
    clock = ManualClock()
    loop = EngineLoop(build(1, modes=modes, slot_pages=slot_pages), wire, clock)
    for _ in range(30):
        loop.turn()
    status = loop.status()
    first, second = len(wire.made(1)), len(wire.made(2))
    assert first == 9 < second < 32
    per_step = [48 * ((step < first) + (step < second)) for step in range(32)]
    assert list(status.landed_asked) == per_step
    late = sum(status.landed_asked) - sum(status.landed_hits)
    late -= sum(status.misses) + sum(status.places)
    assert 0 <= late <= status.landed_asked[0] - status.landed_hits[0]
    assert (sum(status.misses) + sum(status.places) > 0) == (slot_pages == 2)
    assert sum(status.hits) == sum(status.landed_hits), "also of rows that were only located"
    [line] = status.requests
    assert (line.number, line.state, line.prompt_count) == (2, "decoding", 130)
    assert (line.made_count, line.turn_count, line.asked_count) == (second, second, 48 * second)
    assert 0 < line.hit_count <= line.asked_count
    loop.close()


def test_a_trace_has_every_stage_of_every_step_between_its_ends():
    wire = Script(
        t1=[Add(1, prompt(90), Sampling(tokens_max=60))],
        t5=[Trace(True)],
        t12=[Trace(False)],
        t15=[Trace(True), Trace(False)],
    )
    loop = run(wire, 16, modes="none")
    traced, empty = (message for message in wire.given if isinstance(message, Traced))
    assert empty == Traced(())
    steps = [span.name for span in traced.spans if span.lane == "steps"]
    assert steps == [f"step {number}, 1 requests" for number in range(5, 12)]
    stages = [span.name for span in traced.spans if span.lane == "stages"]
    for stage in ("index", "select", "plan", "wait", "pre_attn", "attend_all"):
        assert [stages.count(f"{stage} L{layer}") for layer in (0, 1)] == [7, 7]
    assert traced.left_out == 0
    loop.close()


def test_a_trace_that_is_never_stopped_has_an_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(spans, "SPANS_MAX", 20)
    wire = Script(t1=[Trace(True), Add(1, prompt(20), Sampling(tokens_max=60))], t12=[Trace(False)])
    loop = run(wire, 13)
    [traced] = (message for message in wire.given if isinstance(message, Traced))
    assert len(traced.spans) == 20
    assert traced.left_out > 20
    loop.close()


def test_one_trace_at_a_time_whoever_asks():
    wire = Script(t1=[Trace(False, 1)], t2=[Trace(True, 0), Trace(True, 1)], t3=[Trace(False, 1)])
    loop = run(wire, 4)
    said = [m for m in wire.given if isinstance(m, (Tracing, Traced))]
    assert [(type(m), m.front) for m in said] == [
        (Tracing, 1),
        (Tracing, 0),
        (Tracing, 1),
        (Traced, 1),
    ]
    assert [bool(m.sentence) for m in said if isinstance(m, Tracing)] == [True, False, True]
    loop.close()


def test_requests_are_aborted_by_the_name_that_clients_know_whichever_front_has_them():
    long = Sampling(tokens_max=60)
    named = {1: "mine", 2: "theirs", 3: "mine", 4: "mine_0"}
    wire = Script(
        t1=[
            Add(n, prompt(20 + n), long, name=name, call="mine" if n == 4 else name)
            for n, name in named.items()
        ],
        t6=[AbortNamed(frozenset({"mine", "nobody's"}), 1)],
        t8=[AbortNamed(None, 0), AbortNamed(None, 0)],
    )
    wire.front_count = 2
    loop = run(wire, 9)
    assert [m for m in wire.given if isinstance(m, Aborted)] == [
        Aborted(2, 1),
        Aborted(1, 0),
        Aborted(0, 0),
    ]
    ends = {n: [p.reason for p in wire.pieces(n) if p.reason] for n in named}
    assert ends == {number: ["cancelled"] for number in named}
    assert len(wire.made(2)) > len(wire.made(1))
    assert loop._engine.is_idle
    loop.close()


def test_a_front_that_is_lost_takes_its_requests_along_and_no_others():
    long = Sampling(tokens_max=60)
    wire = Script(t1=[Add(number, prompt(20 + number), long) for number in (3, 4, 5)], t6=[Lost(1)])
    wire.front_count = 2
    loop = run(wire, 9)
    assert loop.status().open_counts == (1, 0)
    assert [bool(wire.pieces(number)) for number in (3, 4, 5)] == [True, True, True]
    assert [piece.reason for number in (3, 5) for piece in wire.pieces(number)] == [None] * len(
        [*wire.pieces(3), *wire.pieces(5)]
    )
    loop.close()


@pytest.mark.parametrize(("advance_s", "count"), [(0.3, 10), (0.1, 4)])
def test_a_status_comes_a_few_times_a_second_also_when_idle(advance_s: float, count: int):
    wire = Script(t10=[Stop()])
    clock = ManualClock()
    loop = EngineLoop(build(1), wire, clock)
    while not loop.is_stopped:
        loop.turn()
        clock.advance(advance_s)
    assert len([message for message in wire.given if isinstance(message, Status)]) == count
    loop.close()


@pytest.mark.parametrize(
    "message",
    [
        Add(1 << 40, [1, 2], FULL),
        Add(2, [1], Sampling()),
        Add(3, [1], Sampling(), handoff=Handoff((1 << 63) - 1, peer=5, kind="take")),
        Meet("http://127.0.0.1:8001", b"\x00\xff", 1),
        Abort(3),
        AbortNamed(frozenset({"a", "b"}), 1),
        AbortNamed(None, 0),
        Flush(2),
        Trace(True, 1),
        Lost(1),
        Stop(),
    ],
)
def test_messages_survive_the_wire(message: ToEngine):
    packer = Packer()
    assert packer.for_engine(packer.pack(message)) == message


READY = {"vocabulary": 1, "length_max": 2, "load_s": 0.5, "metadata": b"\x00\xff"}


def test_answers_survive_the_wire_and_noise_is_refused():
    packer = Packer()
    piece = Piece(1, (2, 3), "stop", 4, (Chance(-0.5, 1, ((2, -0.5),)),), "why")
    traced = Traced((TraceSpan("steps", "step 1", 0.5, 2.0),), 3)
    met = Met("http://127.0.0.1:8001", (1 << 63) - 1, b"\x00\xff", "why", 1)
    line = HandoffLine(7, "take", "missed", (("reserved", 0.5),), "why")
    handoff = HandoffStatus(landed_count=1, peers=(PeerLine("x", 8),), recent=(line,))
    told = Status(hits=(1, 2), handoff=handoff)
    for message in (Progress((piece,)), told, Flushed("x"), traced, met, Ready(**READY)):
        assert packer.for_server(packer.pack(message)) == message
    for noise in (b"", b"\xc1", b"\x91\xa3Add", packer.pack(Stop())[:-1], b"\x92\xa4Nope\x01"):
        with pytest.raises(BadInput, match="malformed"):
            packer.for_engine(noise)


def test_choices_of_one_answer_have_one_prefill():
    """The second choice is sent with its leader's number; a choice whose leader has ended comes
    alone."""
    wire = Script(
        t1=[Add(1, prompt(100), Sampling(tokens_max=5))],
        t2=[Add(2, prompt(100), Sampling(tokens_max=5), leader=1)],
        t20=[Add(3, prompt(90), Sampling(tokens_max=5), leader=1)],
    )
    loop = run(wire, 40, modes="none")
    assert wire.made(1) == wire.made(2) == greedy(small(), prompt(100), 5)
    assert wire.made(3) == greedy(small(), prompt(90), 5)
    assert [wire.pieces(n)[0].cached_count for n in (1, 2, 3)] == [0, 64, 0]
    assert loop.status().cached_count == 64


def test_a_prompt_s_chances_leave_with_its_chunks():
    """Three chunks of 64: the pieces' chances go on where the last ones ended."""
    asked = Sampling(tokens_max=2, prompt_logprobs=2)
    wire = Script(t1=[Add(1, prompt(150), asked), Add(2, prompt(70), Sampling(tokens_max=2))])
    run(wire, 12, modes="none")
    counts = [len(piece.prompt_chances) for piece in wire.pieces(1)]
    assert [count for count in counts if count] == [64, 64, 21]
    assert not any(piece.prompt_chances for piece in wire.pieces(2))
    first = wire.pieces(1)[0].prompt_chances[0]
    assert isinstance(first, Chance)
    assert len(first.top) == 2
    packer = Packer()
    for message in wire.given:
        assert packer.for_server(packer.pack(message)) == message


def test_prompts_of_one_step_leave_with_their_own_chances():
    asked = Sampling(tokens_max=2, prompt_logprobs=0)
    adds = [Add(number, prompt(number), asked) for number in (20, 30)]
    together, apart = Script(t1=[Trace(True), *adds], t9=[Trace(False)]), Script()
    run(together, 9, modes="none")
    for add in adds:
        apart.arriving = {apart.turn + 1: [add]}
        run(apart, 9, modes="none")
        [first, *_] = together.pieces(add.number)
        assert len(first.prompt_chances) == add.number - 1
        wanted = [chance.logprob for chance in apart.pieces(add.number)[0].prompt_chances]
        logprobs = [chance.logprob for chance in first.prompt_chances]
        assert logprobs == pytest.approx(wanted, abs=1e-4)
    [traced] = (message for message in together.given if isinstance(message, Traced))
    names = [span.name for span in traced.spans if span.lane == "steps"]
    assert names[0] == "step 1, 0 requests, 48 prompt tokens of 2 requests"


@pytest.mark.parametrize("kind", ["give", "take", "fake"])
def test_an_engine_without_peers_refuses_handoffs_with_a_sentence(kind: str):
    add = Add(0, [1, 2, 3], Sampling(), handoff=Handoff(5, 6, kind))
    wire = Script(t1=[add, Meet("x", b"y")])
    loop = run(wire, 1)
    [piece] = wire.pieces(0)
    assert piece.reason == "refused"
    assert ("fake_prefill is off" if kind == "fake" else "no handoffs") in piece.sentence
    [met] = [message for message in wire.given if isinstance(message, Met)]
    assert (met.address, met.epoch, met.metadata) == ("x", 0, b"")
    assert "no handoffs" in met.sentence
    loop.close()
