"""The server's end of the wire: late, foreign and unreadable answers, and whom they reach."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import zmq
import zmq.asyncio

from ess.engine.process.messages import (
    Abort,
    Aborted,
    AbortNamed,
    Add,
    Cut,
    Fault,
    Flush,
    Flushed,
    Hold,
    Lost,
    Packer,
    Piece,
    Progress,
    Ready,
    Status,
    Stop,
)
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, Unavailable
from ess.server.process.board import Board
from ess.server.process.link import EngineLink
from ess.server.process.requests.call import Call
from ess.server.process.requests.journal import NO_RECOVERY, Recovery
from ess.server.process.requests.open_calls import ALONE, FrontPlace
from tests.support.manual_clock import ManualClock

READY = Ready(vocabulary=10, length_max=10, load_s=0.0)
Peer = zmq.asyncio.Socket


def linked(
    folder: Path,
    act: Callable[[EngineLink, Peer], Awaitable[None]],
    place: FrontPlace = ALONE,
    recovery: Recovery = NO_RECOVERY,
) -> None:
    """`act` has the link and the engine's bare socket."""

    async def run() -> None:
        context, clock = zmq.asyncio.Context(), ManualClock()
        endpoint = f"ipc://{folder}/engine"
        board = Board(clock)
        link = EngineLink(
            context, endpoint, board=board, clock=clock, place=place, recovery=recovery
        )
        peer = context.socket(zmq.DEALER)
        peer.connect(endpoint)
        try:
            async with asyncio.timeout(60):
                await act(link, peer)
            link.check()
        finally:
            peer.close(linger=0)
            link.close()
            context.destroy(linger=0)

    asyncio.run(run())


async def told(peer: Peer) -> object:
    return Packer().for_engine(await peer.recv())


def test_pieces_reach_their_call_and_no_other(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        await peer.send(Packer().pack(READY))
        await link.engine.became_ready.wait()
        one = link.start("a", [([1], Sampling()), ([2], Sampling())])
        two = link.start("b", [([3], Sampling())])
        assert [(await told(peer)).number for _ in range(3)] == [0, 1, 2]
        pieces = (Piece(2, (7,)), Piece(1, (8,), "stop"), Piece(0, (9,)), Piece(99, (5,)))
        await peer.send(Packer().pack(Progress(pieces, 1.5)))
        assert [piece.number for piece in await one.take()] == [1, 0]
        assert (await two.take())[0].tokens == (7,)
        assert (one.pending, link.open_count) == ({0}, 2)
        link.abort(one)
        assert (await told(peer)) == Abort(0)
        assert (await one.take())[0].reason == "cancelled"
        link.abort(one)
        await peer.send(Packer().pack(Progress((Piece(0, (4,)), Piece(1, (4,))))))
        await peer.send(Packer().pack(Progress((Piece(2, (6,), "length"),))))
        assert (await two.take())[0].tokens == (6,)
        assert link.open_count == 0
        three = link.start("c", [([3], Sampling())])
        assert (await told(peer)).number == 3, "a number is used once"
        assert three.pending == {3}
        hearing.cancel()

    linked(tmp_path, act)


def test_a_reader_gets_what_it_wants_and_the_one_who_waits_the_rest_in_order(tmp_path: Path):
    """It runs in the link's own turn; its failure is that of its caller, and the link goes on."""
    wanted, read = [True, True, False], []

    call: Call

    def reader(pieces: list[Piece]) -> bool:
        if pieces[0].tokens == (13,):
            call.nudge()
            raise ZeroDivisionError
        if not wanted.pop(0):
            return False
        read.extend(piece.tokens for piece in pieces)
        return True

    async def act(link: EngineLink, peer: Peer) -> None:
        async def say(token: int, reason: str | None = None) -> None:
            pieces = (Piece(0, (token,), reason), Piece(1, (-token,)))
            await peer.send(Packer().pack(Progress(pieces, 1.0)))

        hearing = asyncio.ensure_future(link.run())
        await peer.send(Packer().pack(READY))
        await link.engine.became_ready.wait()
        nonlocal call
        call = link.start("a", [([1], Sampling()), ([2], Sampling())])
        taking = asyncio.ensure_future(call.take(reader))
        await asyncio.sleep(0)
        for token in (5, 6, 7):
            await say(token)
        assert [piece.tokens for piece in await taking] == [(7,), (-7,)]
        assert read == [(5,), (-5,), (6,), (-6,)], "choices of a step come together"
        assert link.calls.to_socket.count == 6

        taking = asyncio.ensure_future(call.take(reader))
        await asyncio.sleep(0)
        await say(8, "length")
        assert [piece.tokens for piece in await taking] == [(8,), (-8,)], "an end wakes"

        taking = asyncio.ensure_future(call.take(reader))
        await asyncio.sleep(0)
        await peer.send(Packer().pack(Progress((Piece(1, (13,)),))))
        with pytest.raises(ZeroDivisionError):
            await taking
        other = link.start("b", [([3], Sampling())])
        await peer.send(Packer().pack(Progress((Piece(2, (14,)),))))
        assert [piece.tokens for piece in await other.take()] == [(14,)]
        assert not hearing.done()
        hearing.cancel()

    linked(tmp_path, act)


def test_a_fault_ends_every_call_after_what_it_had(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        with pytest.raises(Unavailable, match="starting"):
            await link.flush()
        packer = Packer()
        await peer.send(packer.pack(READY))
        await link.engine.became_ready.wait()
        call = link.start("a", [([1], Sampling())])
        flush = asyncio.ensure_future(link.flush())
        await peer.send(packer.pack(Progress((Piece(0, (7,)),))))
        counted: list[int] = []
        link.on_fault = lambda sentence: counted.append(link.open_count)
        await peer.send(packer.pack(Fault("it broke")))
        with pytest.raises(Unavailable, match="it broke"):
            await flush
        assert (counted, link.open_count) == ([1], 0), "the line in the log has the number"
        assert (await call.take())[0].tokens == (7,)
        with pytest.raises(Unavailable, match="it broke"):
            await call.take()
        with pytest.raises(Unavailable, match="it broke"):
            link.start("b", [([1], Sampling())])
        assert (link.engine.state, link.engine.why_lost) == (
            "restarting",
            "the engine is gone: it broke",
        )
        link.lose("too often")
        link.lose("again")
        assert (link.engine.state, link.engine.why_lost) == ("lost", "too often")
        hearing.cancel()

    linked(tmp_path, act)


def test_another_engine_is_heard_elsewhere_and_gets_the_hold_and_the_records(tmp_path: Path):
    """The first is not heard any more, though it says that it is ready. Numbers go on."""

    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        packer = Packer()
        await peer.send(packer.pack(READY))
        assert await link.engine.until_ready() == READY
        call = link.start("a", [([1], Sampling())])
        assert not link.engine.has_answered
        await peer.send(packer.pack(Status(is_held=True, held_at_s=3.0, step_count=5)))
        await peer.send(packer.pack(Progress((Piece(0, (7,)),))))
        await call.take()
        assert link.engine.has_answered
        assert link._board.status.step_count == 5
        link.interrupt("it broke")
        assert not link.engine.became_ready.is_set()
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await peer.send(packer.pack(READY))
        link.renew(f"ipc://{tmp_path}/next")
        hearing = asyncio.ensure_future(link.run())
        context = zmq.asyncio.Context()
        after = context.socket(zmq.DEALER)
        after.connect(f"ipc://{tmp_path}/next")
        assert link.engine.state == "restarting"
        assert not link.engine.has_answered
        await after.send(packer.pack(READY))
        assert await link.engine.until_ready() == READY
        assert (link.going_on_count, link.resumed_count, link.open_count) == (1, 1, 1)
        assert link._waiting is not None
        assert link._waiting.cancelled(), "else the calls end after a minute"
        call = link.start("b", [([1], Sampling())])
        assert [*call.numbers] == [1]
        again = Add(0, [1], Sampling(), name="a", prior_output=[7], call="a")
        assert [await told(after) for _ in range(2)] == [Hold(True, 0, 3.0), again]
        assert (await told(after)).number == 1
        assert link.engine.restart_count == 1
        hearing.cancel()
        context.destroy(linger=0)

    linked(tmp_path, act, recovery=Recovery(bytes_max=1000, wait_s=60.0))


def test_where_no_socket_can_be_made_the_last_one_stays(tmp_path: Path, monkeypatch):
    """Messages of the server's end go to a socket, and libzmq crashes where that is closed."""

    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        await peer.send(Packer().pack(READY))
        assert await link.engine.until_ready() == READY
        link.interrupt("it broke")
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        with monkeypatch.context() as patch:
            full = zmq.ZMQError(errno.EMFILE)
            patch.setattr(zmq.asyncio.Context, "socket", Mock(side_effect=full))
            with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
                link.renew(f"ipc://{tmp_path}/next")
        with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
            link.renew(f"ipc://{tmp_path}/nowhere/next")
        assert (link.engine.state, link.engine.restart_count) == ("restarting", 0)
        link.stop()
        assert await told(peer) == Stop()
        link.renew(f"ipc://{tmp_path}/next")

    linked(tmp_path, act)


def test_an_asker_who_left_does_not_take_the_next_answer(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        packer = Packer()
        await peer.send(packer.pack(READY))
        await link.engine.became_ready.wait()
        first, second = (asyncio.ensure_future(link.flush()) for _ in range(2))
        assert [await told(peer) for _ in range(2)] == [Flush(), Flush()]
        first.cancel()
        await peer.send(packer.pack(Flushed("one")))
        await peer.send(packer.pack(Flushed("two")))
        assert await second == "two"
        hearing.cancel()

    linked(tmp_path, act)


def test_what_cannot_be_read_ends_the_hearing(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        await peer.send(b"\xc1 noise")
        with pytest.raises(BadInput, match="from the engine is malformed"):
            await link.run()

    linked(tmp_path, act)


def test_without_an_engine_nothing_is_queued(tmp_path: Path):
    async def run() -> None:
        context, clock = zmq.asyncio.Context(), ManualClock()
        endpoint = f"ipc://{tmp_path}/engine"
        link = EngineLink(context, endpoint, board=Board(clock), clock=clock)
        with pytest.raises(Unavailable, match="does not listen"):
            link.start("a", [([1], Sampling()), ([2], Sampling())])
        assert link.open_count == 0
        link.stop()
        link.close()
        context.destroy(linger=0)

    asyncio.run(run())


def test_an_add_is_packed_with_all_that_was_asked():
    packer = Packer()
    add = Add(1, [5, 6], Sampling(seed=3, logit_bias={4: 1.0}))
    assert packer.for_engine(packer.pack(add)) == add


def test_fronts_number_their_requests_apart_and_ask_the_engine_about_each_other_s(tmp_path: Path):
    async def act(link: EngineLink, peer: Peer) -> None:
        hearing = asyncio.ensure_future(link.run())
        packer = Packer()
        await peer.send(packer.pack(READY))
        await link.engine.became_ready.wait()
        call = link.start("mine", [([1], Sampling()), ([2], Sampling())])
        assert [(await told(peer)).number for _ in range(2)] == [1, 4]
        await peer.send(packer.pack(Progress((Piece(4, (7,)),))))
        [piece] = await call.take()
        assert call.numbers.index(piece.number) == 1
        aborting = asyncio.ensure_future(link.abort_ids({"mine", "theirs"}))
        asked = [await told(peer) for _ in range(3)]
        assert asked == [Abort(1), Abort(4), AbortNamed(frozenset({"mine", "theirs"}), 1)]
        await peer.send(packer.pack(Aborted(1, 1)))
        assert await aborting == 2
        hearing.cancel()

    linked(tmp_path, act, FrontPlace(front=1, count=3))


def test_the_next_life_of_a_front_uses_no_number_again():
    firsts = [
        FrontPlace(front=front, count=3, life=life).first_number
        for life in (0, 1)
        for front in range(3)
    ]
    assert len(set(firsts)) == 6
    assert [first % 3 for first in firsts] == [0, 1, 2] * 2
    assert min(firsts[3:]) - max(firsts[:3]) > 1 << 32


def test_who_is_cut_off_is_told_to_whom_it_concerns(tmp_path: Path):
    async def run() -> None:
        context, clock, cut = zmq.asyncio.Context(), ManualClock(), []
        endpoint = f"ipc://{tmp_path}/engine"
        link = EngineLink(context, endpoint, board=Board(clock), clock=clock)
        link.on_cut = cut.append
        peer = context.socket(zmq.DEALER)
        peer.connect(endpoint)
        hearing = asyncio.ensure_future(link.run())
        for message in (Cut(2), READY):
            await peer.send(Packer().pack(message))
        await link.engine.became_ready.wait()
        link.front_lost(2)
        assert (cut, await told(peer)) == ([2], Lost(2))
        hearing.cancel()
        peer.close(linger=0)
        link.close()
        context.destroy(linger=0)

    asyncio.run(run())
