"""Two engine processes and the sockets between them: what their servers see of a handoff."""

from __future__ import annotations

import contextlib
import os
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ess.engine.config import ProcessConfig
from ess.engine.process.messages import (
    Abort,
    Add,
    Fault,
    Flush,
    Flushed,
    Handoff,
    Launch,
    Status,
)
from ess.engine.process.peers import layout_digest, silent_s
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cpu import native
from ess.models.load import EMBEDDED
from tests.pd.processes import (
    SECRET,
    EngineProcess,
    adds,
    engines,
    expected,
    handed_over,
    introduce,
)
from tests.support.built import needs_native
from tests.support.checkpoints import small, tokens
from tests.support.few import few

TEXT = tokens(1200, 512, seed=5)
WISH = Sampling(tokens_max=16, ignore_eos=True)
LENGTHS = (1, 2, 63, 64, 65, 66, 129, 600, 1100)
TRANSPORTS = ("tcp", "shared")
TILES = native.available() and native.has_tiles()
PREFILL, DECODE = {"role": "prefill"}, {"role": "decode"}


def met(prefill: EngineProcess, decode: EngineProcess) -> int:
    theirs, ours = prefill.ready().metadata, decode.ready().metadata
    assert theirs
    assert ours
    return introduce(prefill, decode, theirs, ours)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mtp", "transport"), few([(1, "tcp"), (2, "shared")], all_of=product((1, 2), TRANSPORTS))
)
def test_tokens_of_two_processes_are_those_of_one(tmp_path: Path, mtp: int, transport: str):
    asked = adds([TEXT[:count] for count in LENGTHS], WISH)
    (tmp_path / "alone").mkdir()
    single = expected(tmp_path / "alone", asked, mtp=mtp)
    alike = {"mtp": mtp, "transport": transport}
    with engines(tmp_path, {**PREFILL, **alike}, {**DECODE, **alike}) as [prefill, decode]:
        peer = met(prefill, decode)
        for add in asked:
            handed_over(add, prefill, decode, uid=add.number + 1, peer=peer)
        numbers = [add.number for add in asked]
        decode.ended(*numbers)
        prefill.ended(*numbers)
        assert [decode.tokens(number) for number in numbers] == single
        assert {prefill.reason(number) for number in numbers} == {"sent"}
        assert not any(prefill.tokens(number) for number in numbers)
        decode.until(lambda _: counts(decode) == (len(asked), 0, 0, 0))
        prefill.until(lambda _: counts(prefill) == (0, 0, len(asked), 0))
        told = decode.status.handoff
        assert [peer.is_up for peer in told.peers] == [True]
        assert {line.outcome for line in told.recent} == {"landed"}
        assert told.received_bytes > 0
        assert [prefill.stop(), decode.stop()] == [0, 0]


def counts(engine: EngineProcess) -> tuple[int, int, int, int]:
    told = engine.status.handoff
    assert told is not None
    return told.landed_count, told.missed_count, told.sent_count, told.lapsed_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "transport"),
    few(
        [("refuse", "tcp"), ("recompute", "shared")],
        all_of=product(("recompute", "refuse"), TRANSPORTS),
    ),
)
def test_a_prefill_worker_that_is_killed(tmp_path: Path, policy: str, transport: str):
    """While it holds a prompt that the decode worker waits for."""
    way = {"transport": transport}
    configs = ({**PREFILL, **way}, {**DECODE, **way, "handoff_failure": policy})
    with engines(tmp_path, *configs) as [prefill, decode]:
        peer = met(prefill, decode)
        decode.say(Add(0, TEXT[:600], WISH, handoff=Handoff(1, peer, "take")))
        decode.until(lambda _: arriving(decode) == 1)
        prefill.process.send_signal(signal.SIGKILL)
        decode.ended(0)
        [last] = [piece for piece in decode.said[0] if piece.reason]
        if policy == "refuse":
            assert (last.reason, last.is_ours) == ("refused", True)
            assert "handoff 1" in last.sentence
            assert "is lost" in last.sentence
        else:
            assert last.reason == "length"
            assert len(decode.tokens(0)) == WISH.tokens_max


def arriving(engine: EngineProcess) -> int:
    told = engine.status.handoff
    return 0 if told is None else told.open_arrival_count


@pytest.mark.slow
def test_an_abort_while_rows_are_awaited_frees_both_sides(tmp_path: Path):
    with engines(tmp_path, PREFILL, DECODE) as [prefill, decode]:
        peer = met(prefill, decode)
        decode.say(Add(0, TEXT[:600], WISH, handoff=Handoff(1, peer, "take")))
        decode.until(lambda _: arriving(decode) == 1)
        decode.say(Abort(0))
        decode.say(Flush())
        flushed = decode.until(lambda message: isinstance(message, Flushed))
        assert flushed == Flushed()
        decode.until(lambda message: isinstance(message, Status) and arriving(decode) == 0)


@pytest.mark.slow
def test_workers_that_must_not_meet(tmp_path: Path):
    """Another row format, another secret, and noise."""
    configs = (DECODE, {**PREFILL, "mtp": 2}, {**PREFILL, "secret": "some other secret"})
    with engines(tmp_path, *configs) as [decode, drafting, foreign]:
        decode.ready()
        assert "another model" in decode.meet(drafting.ready().metadata).sentence
        assert "not made with our secret" in decode.meet(foreign.ready().metadata).sentence
        assert decode.meet(b"noise").sentence
        assert decode.meet(b"").sentence


@needs_native
def test_rows_of_another_arithmetic_are_foreign_where_the_last_bit_is_promised(monkeypatch):
    """Else an answer would depend on whether its handoff went well."""
    before = [digest(deterministic=said) for said in (False, True)]
    assert before[0] != before[1]
    monkeypatch.setattr(native, "has_tiles", lambda: not TILES)
    after = [digest(deterministic=said) for said in (False, True)]
    assert after[0] == before[0] == digest(backend="reference")
    assert after[1] != before[1]


def test_a_peer_that_compiles_for_its_device_is_waited_for_as_long_as_its_rows():
    assert silent_s(ProcessConfig()) == silent_s(ProcessConfig(handoff_wait_s=60.0)) == 5.0
    on_device = ProcessConfig(device="cuda", backend="cuda", handoff_wait_s=60.0)
    assert silent_s(on_device) == 60.0


def digest(**settings: Any) -> bytes:
    sizes = dict.fromkeys(("length_max", "slot_bytes", "host_bytes", "index_bytes"), 1)
    launch = Launch(model=str(EMBEDDED), config=ProcessConfig(**settings), **sizes)
    return layout_digest(launch, small().config.layout())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"role": "decode", "secret": ""}, "role is 'decode'"),
        ({"role": "decode", "secret": SECRET[:5]}, "the secret has 5 bytes"),
        ({"role": "decode", "transfer_host": "203.0.113.9"}, "cannot listen on 203.0.113.9"),
    ],
)
def test_what_an_engine_cannot_be_ends_it_with_a_sentence(
    tmp_path: Path, config: dict[str, str], said: str
):
    with engines(tmp_path, config) as [engine]:
        while not isinstance(message := engine.hear(), Fault):
            pass
        assert said in message.sentence


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["prefill", "decode"])
def test_shared_memory_is_gone_with_its_process(tmp_path: Path, killed: str):
    """A worker maps the memory of another one, and lets go of it when that one is killed or stops;
    nothing stays in a file system."""
    shared = {"transport": "shared"}
    with engines(tmp_path, {**PREFILL, **shared}, {**DECODE, **shared}) as [prefill, decode]:
        peer = met(prefill, decode)
        [add] = adds([TEXT[:600]], WISH)
        handed_over(add, prefill, decode, uid=1, peer=peer)
        decode.ended(0)
        prefill.ended(0)
        victim, other = (prefill, decode) if killed == "prefill" else (decode, prefill)
        assert mapped_files(other) > own_files(other)
        victim.process.send_signal(signal.SIGKILL)
        other.until(lambda _: mapped_files(other) == own_files(other))
        assert other.stop() == 0
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("ess-")]


def mapped_files(engine: EngineProcess) -> int:
    """Memory files of ours that the process maps, its own and others'."""
    lines = Path(f"/proc/{engine.process.pid}/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if "memfd:ess-" in line})


def own_files(engine: EngineProcess) -> int:
    folder = Path(f"/proc/{engine.process.pid}/fd")
    links = set()
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.add(os.readlink(entry))
    return len({link for link in links if link.startswith("/memfd:ess-")})
