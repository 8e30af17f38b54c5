"""Counts of several processes are added up, whichever process answers."""

from __future__ import annotations

import asyncio
import shutil
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.msgpack import encode

from ess.engine.process.messages import Status
from ess.server.process import lifecycle
from ess.server.process.board import Board
from ess.server.process.fronts import Fronts, Start
from ess.server.process.requests.open_calls import FrontPlace
from ess.server.process.service import Service
from ess.server.process.tally import Shelf, Tally, Waits, together
from tests.support.manual_clock import ManualClock


def counted(number: int) -> Tally:
    tally = Tally(disconnect_count=number, connection_count=10 * number)
    tally.answers["/generate", 200] += number
    tally.answers["/generate", 500] += 1
    tally.refusals[f"reason {number}"] += 2
    tally.finishes["stop"] += number
    tally.whole.add(0.3 * number, 4)
    tally.to_socket.add(0.002)
    return tally


def test_the_sum_of_all_is_the_same_whoever_sums(tmp_path: Path):
    tallies = [counted(number) for number in (1, 2, 3)]
    shelves = [Shelf(tmp_path, count=3, front=front) for front in range(3)]
    for shelf, tally in zip(shelves, tallies, strict=True):
        assert not shelf.has_all()
        shelf.put(tally)
    assert all(shelf.has_all() for shelf in shelves)
    for shelf, own in zip(shelves, tallies, strict=True):
        total = together([own, *shelf.others()])
        assert total.answers == {("/generate", 200): 6, ("/generate", 500): 3}
        assert total.refusals == {"reason 1": 2, "reason 2": 2, "reason 3": 2}
        assert (total.finishes, total.failure_count) == ({"stop": 6}, 3)
        assert (total.disconnect_count, total.connection_count) == (6, 60)
        assert (total.whole.count, round(total.whole.total_s, 6)) == (12, 7.2)
        assert total.to_socket.counts == [3 * count for count in counted(1).to_socket.counts]
    assert encode(tallies[0]) == encode(counted(1)), "a sum changes no process's own counts"


def test_who_takes_a_lost_one_s_place_keeps_its_counts_but_not_its_connections(tmp_path: Path):
    first, lost = Shelf(tmp_path, count=3), Shelf(tmp_path, count=3, front=1)
    lost.put(counted(5))
    lost.close()
    fresh = Shelf(tmp_path, count=3, front=1, life=1)
    fresh.put(counted(1))
    total = together(first.others())
    assert (total.disconnect_count, total.connection_count) == (6, 10)
    assert together(fresh.others()).disconnect_count == 5


def test_a_process_that_is_killed_in_a_drain_is_not_waited_for(tmp_path: Path, monkeypatch):
    """The engine gives up its requests, and its counts are closed."""
    lost: list[int] = []
    start = Start(told=msgspec.Raw(b"{}"), folder=str(tmp_path), listener=0, front=1, count=2)
    Shelf(tmp_path, count=2, front=1).put(Tally(connection_count=2, document_count=3))

    async def ended(*given: object) -> str:
        return "its process was ended by SIGKILL"

    link = SimpleNamespace(front_lost=lost.append)
    fronts = Fronts("none", [start], link, SimpleNamespace(take=ended))
    fronts.drain()
    monkeypatch.setattr(fronts, "_run_front", ended)
    asyncio.run(fronts._keep(start))
    [left] = Shelf(tmp_path, count=2).others()
    assert (lost, left.connection_count, left.document_count) == ([1], 0, 0)
    fronts.end("the server ends")
    asyncio.run(fronts._keep(start))
    assert lost == [1], "the engine that ends too is told"


def test_a_process_replaced_before_it_was_ready_is_not_waited_for(tmp_path: Path):
    first, fresh = Shelf(tmp_path, count=2), Shelf(tmp_path, count=2, front=1, life=1)
    first.put(Tally())
    assert not first.has_all()
    fresh.put(Tally())
    assert first.has_all()


def test_a_drain_waits_for_the_documents_of_another_process(tmp_path: Path):
    """Its count may be older than the engine's word that no request is open."""
    clock = ManualClock()
    engine = SimpleNamespace(state="ready")
    calls = SimpleNamespace(to_socket=Waits())
    link = SimpleNamespace(engine=engine, place=FrontPlace(count=2), calls=calls)
    link.open_count = link.open_elsewhere_count = 0
    fields = signature(Service).parameters.values()
    needless = {each.name: None for each in fields if each.default is each.empty}
    own, other = (Shelf(tmp_path, count=2, front=front) for front in (0, 1))
    given = {"link": link, "board": Board(clock), "clock": clock, "shelf": own}
    service = Service(**(needless | given))
    running = lifecycle.Running(service, *[None] * 3, settings=None, clock=clock)

    def is_done(after_s: float) -> bool:
        clock.advance(after_s)
        service.board.publish(Status())
        return running._is_done()

    for count, state in ((1, "ready"), (2, "lost")):
        engine.state = state
        other.put(Tally(document_count=count))
        assert not is_done(2.0)
        assert service.unanswered_by_all_count == count
        other.put(Tally())
        assert [is_done(0.4), is_done(0.2)] == [False, True]


def test_half_a_file_and_a_foreign_one_are_no_counts(tmp_path: Path):
    shelf, other = Shelf(tmp_path, count=3), Shelf(tmp_path, count=3, front=1)
    assert shelf.others() == []
    other.put(counted(2))
    written = (tmp_path / "1-0.tally").read_bytes()
    for wrong in (b"", written[:-7], b"\xc1"):
        (tmp_path / "1-0.tally").write_bytes(wrong)
        assert shelf.others() == []
    other.put(counted(2))
    assert [*map(encode, shelf.others())] == [encode(counted(2))]


def test_a_disk_that_is_full_for_a_while_does_not_end_the_telling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lifecycle, "TELL_EVERY_S", 0.001)
    (tmp_path / "full").mkdir()
    shelf, other = Shelf(tmp_path / "full", count=2), Shelf(tmp_path / "full", count=2, front=1)

    async def ready() -> None:
        pass

    failed: list[OSError] = []

    def put(tally: Tally) -> None:
        try:
            shelf.put(tally)
        except OSError as error:
            failed.append(error)
            raise

    async def disk_with_room_again() -> None:
        told = SimpleNamespace(shelf=SimpleNamespace(put=put), tally=counted(1))
        told.link = SimpleNamespace(engine=SimpleNamespace(until_ready=ready))
        shutil.rmtree(tmp_path / "full")
        telling = asyncio.ensure_future(lifecycle.tell(told))
        while len(failed) < 2:
            assert not telling.done(), "the task that tells has ended"
            await asyncio.sleep(0)
        (tmp_path / "full").mkdir()
        while not other.others():
            assert not telling.done(), "the task that tells has ended"
            await asyncio.sleep(0)
        telling.cancel()

    asyncio.run(asyncio.wait_for(disk_with_room_again(), 30.0))


def test_an_empty_tally_is_the_neutral_one():
    assert encode(together([])) == encode(Tally())
    assert encode(together([counted(4), Tally()])) == encode(counted(4))
    assert Waits().mean_s == 0.0
