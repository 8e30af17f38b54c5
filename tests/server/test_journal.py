"""Requests outlive their engine: what the next engine gets, and what a client gets only once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from ess.engine.process.messages import Abort, Add, Handoff, Packer, Piece, Progress, Ready
from ess.engine.tokens.chance import Chance
from ess.engine.tokens.sampling import Sampling
from ess.server.http.responses import Interrupted
from ess.server.process.board import Board
from ess.server.process.link import EngineLink
from ess.server.process.requests.call import Call
from ess.server.process.requests.journal import LOSSES_MAX, Journal, Recovery
from tests.support.manual_clock import ManualClock

READY = Ready(vocabulary=10, length_max=10, load_s=0.0)
GONE = "the engine is gone"
PACKER = Packer()


class Engines:
    """A link, and the bare socket of the engine that it hears now."""

    def __init__(self, folder: Path, recovery: Recovery) -> None:
        self._folder = folder
        self._context, clock = zmq.asyncio.Context(), ManualClock()
        self._number = 0
        self.link = EngineLink(
            self._context, self._endpoint, board=Board(clock), clock=clock, recovery=recovery
        )
        self.peer: zmq.asyncio.Socket

    @property
    def _endpoint(self) -> str:
        return f"ipc://{self._folder}/engine-{self._number}"

    async def begin(self) -> None:
        """An engine is there, and says so."""
        self._hearing = asyncio.ensure_future(self.link.run())
        self.peer = self._context.socket(zmq.DEALER)
        self.peer.connect(self._endpoint)
        await self.peer.send(PACKER.pack(READY))
        await self.link.engine.became_ready.wait()

    async def lose(self) -> None:
        """It is gone; what it has not said will never be heard."""
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        self.link.interrupt(GONE)
        self.peer.close(linger=0)
        self._number += 1
        self.link.renew(self._endpoint)

    async def told(self) -> object:
        return PACKER.for_engine(await self.peer.recv())

    async def say(self, *pieces: Piece) -> None:
        await self.peer.send(PACKER.pack(Progress(pieces)))

    async def close(self) -> None:
        self._hearing.cancel()
        await asyncio.gather(self._hearing, return_exceptions=True)
        self.peer.close(linger=0)
        self.link.close()
        self._context.destroy(linger=0)


def recovering(
    folder: Path, act: Callable[[Engines], Awaitable[None]], *, bytes_max: int = 1 << 20,
    wait_s: float = 60.0
) -> None:  # fmt: skip
    async def run() -> None:
        engines = Engines(folder, Recovery(bytes_max=bytes_max, wait_s=wait_s))
        await engines.begin()
        try:
            async with asyncio.timeout(20):
                await act(engines)
        finally:
            await engines.close()

    asyncio.run(run())


async def tokens_of(call: Call, count: int) -> list[Piece]:
    pieces: list[Piece] = []
    while sum(len(piece.tokens) for piece in pieces) < count:
        pieces += await call.take()
    return pieces


def test_the_next_engine_is_told_what_was_said_and_nothing_comes_twice(tmp_path: Path):
    async def act(engines: Engines) -> None:
        prompt = [1, 2, 3]
        asked = Sampling(prompt_logprobs=0, logit_bias={4: 1.5})
        call = engines.link.start("a", [(prompt, asked), (prompt, asked)], priority=2, salt="s")
        first, second = [await engines.told(), await engines.told()]
        assert (first.leader, second.leader) == (None, 0)
        scored = (Chance(-1.0, 1), Chance(-2.0, 1))
        await engines.say(
            Piece(0, (7,), cached_count=2, chances=(Chance(-0.5, 1),), prompt_chances=scored)
        )
        await engines.say(Piece(0, (8, 9)))
        assert len(await tokens_of(call, 3)) <= 2
        await engines.lose()
        await engines.begin()
        again = [await engines.told(), await engines.told()]
        assert [(add.number, add.prior_output, add.leader) for add in again] == [
            (0, [7, 8, 9], None),
            (1, [], 0),
        ]
        assert again[0].sampling.prompt_logprobs is None
        assert again[1] == second, "nothing had come of it"
        await engines.say(
            Piece(0, (5,), "length", cached_count=1),
            Piece(1, (6,), "length", cached_count=1, prompt_chances=scored),
        )
        zero, one = await tokens_of(call, 2)
        assert (zero.cached_count, one.cached_count) == (None, 1)
        assert (engines.link.open_count, engines.link.resumed_count) == (0, 2)

    recovering(tmp_path, act)


def test_chances_of_a_prompt_go_on_where_they_ended(tmp_path: Path):
    async def act(engines: Engines) -> None:
        asked = Sampling(prompt_logprobs=1, prompt_start=1)
        call = engines.link.start("a", [([1, 2, 3, 4, 5], asked)])
        await engines.told()
        await engines.say(Piece(0, cached_count=0, prompt_chances=(Chance(-1.0, 1),)))
        await call.take()
        await engines.lose()
        await engines.begin()
        sampling = (await engines.told()).sampling
        assert (sampling.prompt_logprobs, sampling.prompt_start) == (1, 2)

    recovering(tmp_path, act)


def test_what_is_aborted_while_there_is_no_engine_does_not_go_on(tmp_path: Path):
    async def act(engines: Engines) -> None:
        gone = engines.link.start("a", [([1], Sampling())])
        engines.link.start("b", [([2], Sampling())])
        await engines.lose()
        engines.link.abort(gone)
        assert (await gone.take())[0].reason == "cancelled"
        await engines.begin()
        assert (await engines.told()).number == 1
        assert engines.link.resumed_count == 1

    recovering(tmp_path, act)


def test_what_there_is_no_room_for_ends_with_the_engine(tmp_path: Path):
    async def act(engines: Engines) -> None:
        long = engines.link.start("a", [([1], Sampling()), ([9] * 5000, Sampling())])
        short = engines.link.start("b", [([1], Sampling())])
        await engines.lose()
        with pytest.raises(Interrupted, match=GONE):
            await long.take()
        await engines.begin()
        assert (await engines.told()).number == 2
        await engines.say(Piece(2, (7,) * 400))
        await tokens_of(short, 400)
        await engines.say(Piece(2, (7,) * 2000))
        await tokens_of(short, 2000)
        await engines.lose()
        with pytest.raises(Interrupted, match=GONE):
            await short.take()
        assert engines.link.open_count == 0

    recovering(tmp_path, act, bytes_max=4000)


def test_a_request_that_ends_engine_after_engine_is_given_up(tmp_path: Path):
    async def act(engines: Engines) -> None:
        bad = engines.link.start("a", [([1], Sampling())])
        good = engines.link.start("b", [([2], Sampling())])
        for _ in range(LOSSES_MAX):
            await engines.lose()
            await engines.begin()
            await engines.say(Piece(1, (7,)))
            await tokens_of(good, 1)
        await engines.lose()
        with pytest.raises(Interrupted, match=GONE):
            await bad.take()
        await engines.begin()
        assert (await engines.told()).number == 1

    recovering(tmp_path, act)


def test_requests_wait_so_long_and_no_longer(tmp_path: Path):
    async def act(engines: Engines) -> None:
        call = engines.link.start("a", [([1], Sampling())])
        await engines.lose()
        with pytest.raises(Interrupted, match=r"no other was ready within 0\.05 s"):
            await call.take()
        assert engines.link.open_count == 0

    recovering(tmp_path, act, wait_s=0.05)


@pytest.mark.parametrize("kind", ["give", "fake"])
def test_rows_that_leave_or_are_invented_do_not_go_on(kind: str):
    journal = Journal(1 << 20, PACKER)
    taken = Add(1, [1], Sampling(), handoff=Handoff(5, 7, "take"))
    for add in (Add(0, [1], Sampling(), handoff=Handoff(5, 7, kind)), taken):
        journal.open(add, PACKER.pack(add))
    assert [add.number for add in journal.again()] == [1]
    assert next(journal.again()).handoff is None, "this engine makes the rows itself"
    journal.check()
    journal.hear(Piece(1, (3, 4)))
    journal.check()
    journal.close(1)
    journal.close(0)
    journal.check()
    assert journal.size == 0


def test_without_recovery_nothing_goes_on(tmp_path: Path):
    async def act(engines: Engines) -> None:
        call = engines.link.start("a", [([1], Sampling())])
        await engines.lose()
        with pytest.raises(Interrupted, match=GONE):
            await call.take()
        await engines.begin()
        later = engines.link.start("b", [([1], Sampling())])
        assert (await engines.told()).number == 1
        engines.link.abort(later)
        assert await engines.told() == Abort(1)

    recovering(tmp_path, act, bytes_max=0)
