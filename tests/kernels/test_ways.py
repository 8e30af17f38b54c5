"""Which way gathers go: what is timed, what is kept of it, and what becomes of a damaged file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ess.errors import BadInput, Unavailable
from ess.flashtrans import gather_rows, ways
from ess.flashtrans.ways import Choice, chosen, everywhere, read, way_names
from ess.kernels.cpu import native
from tests.support.built import needs_native

pytestmark = needs_native
CLASSES = list(ways.classes())


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own; afterwards the process goes by what it went by before."""
    before = ways.settle()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(ways.VARIABLE, raising=False)
    yield tmp_path
    ways.apply(before)


def settled() -> list[str]:
    table = (ctypes.c_int32 * len(CLASSES))()
    native.function("ess_rows_settled", [ctypes.c_void_p])(table)
    return [way_names()[way] for way in table]


def settle_anew() -> tuple[Choice, ...]:
    """As the first call of another process."""
    return ways.settle.__wrapped__()


def mixed() -> tuple[Choice, ...]:
    names = way_names()
    return tuple(
        Choice(row_bytes=row_bytes, count=count, way=names[i % len(names)], gain=1.5)
        for i, (row_bytes, count) in enumerate(CLASSES)
    )


def test_every_class_goes_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of the table are those of ways.h: each size and count finds its entry."""
    random = np.random.default_rng(0)
    ways.apply(mixed())
    assert settled() == [choice.way for choice in mixed()]
    for row_bytes, count in CLASSES:
        source = random.integers(0, 256, (300, row_bytes), dtype=np.uint8)
        rows = random.integers(-1, 300, min(count, 9000))
        target = np.full((len(rows), row_bytes), 0xFF, np.uint8)
        gather_rows(source=source, source_rows=rows, target=target)
        want = np.where((rows < 0)[:, None], 0xFF, source[rows])
        assert np.array_equal(target, want), (row_bytes, count)


def test_what_was_measured_is_kept_and_read_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(ways, "measured", lambda: calls.append(1) or mixed())
    assert settle_anew() == settle_anew() == mixed()
    assert calls == [1]
    assert settled() == [choice.way for choice in mixed()]
    [kept] = (home / "ess").iterdir()
    assert kept == ways.place()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{", ""),
        ('"plain"', '"no such way"'),
        ('"edition": 3', '"edition": 2'),
        ('"row_bytes": 264', '"row_bytes": 265'),
        ('"row_bytes": 264', '"row_bytes": "264"'),
        ('"machine": "', '"machine": "another '),
        ('"gain": 1.5', '"gain": 1.5, "gain": [1]'),
        ('"choices": [', '"choices": [], "more": ['),
    ],
)
def test_a_damaged_file_is_measured_again(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ways, "measured", mixed)
    settle_anew()
    text = ways.place().read_text()
    assert old in text
    ways.place().write_text(text.replace(old, new))
    assert read(ways.place()) is None
    assert settle_anew() == mixed() == read(ways.place())


def test_bytes_that_are_no_text_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "measured", mixed)
    ways.place().parent.mkdir()
    ways.place().write_bytes(b"\xff\xfe{}" * 100)
    assert settle_anew() == mixed() == read(ways.place())


def test_where_nothing_can_be_kept_it_is_applied_all_the_same(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "ess").write_text("a file, no folder")
    monkeypatch.setattr(ways, "measured", mixed)
    assert settle_anew() == mixed()
    assert settled() == [choice.way for choice in mixed()]


def test_without_memory_to_measure_in_the_unmeasured_ways_hold(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise Unavailable("no 240 MiB of host memory here")

    monkeypatch.setattr(ways, "measured", refuse)
    ways.apply(mixed())
    assert [choice.way for choice in settle_anew()] == settled()
    assert settled() != [choice.way for choice in mixed()]
    assert not ways.place().exists()


def test_where_a_cache_holds_more_than_half_of_the_rows_the_unmeasured_ways_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ways, "cache_sizes", lambda: ["48K", "98305K", ""])
    monkeypatch.setattr(ways, "_choice", lambda *_: pytest.fail("nothing is to be timed"))
    assert settle_anew() == ways.unmeasured()
    assert not ways.place().exists()


def test_the_variable_overrides(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "measured", mixed)
    monkeypatch.setenv(ways.VARIABLE, "plain")
    assert settle_anew() == everywhere("plain")
    assert set(settled()) == {"plain"}
    monkeypatch.setenv(ways.VARIABLE, "fast")
    with pytest.raises(BadInput, match="ESS_ROWS is 'fast', must be one of unmeasured, requests"):
        settle_anew()
    monkeypatch.setenv(ways.VARIABLE, "unmeasured")
    assert settle_anew() == ways.unmeasured()
    assert not ways.place().exists()


def test_a_real_measurement_names_ways_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """In small: what it finds depends on the machine, what it may answer does not."""
    monkeypatch.setattr(ways, "POOL_BYTES", 4 << 20)
    monkeypatch.setattr(ways, "cache_sizes", list)
    monkeypatch.setattr(ways, "TARGET_BYTES", 5 << 20)
    monkeypatch.setattr(ways, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(ways, "ROUNDS", 2)
    choices = ways.measured()
    assert [(choice.row_bytes, choice.count) for choice in choices] == CLASSES
    usual = [choice.way for choice in ways.unmeasured()]
    for choice, before in zip(choices, usual, strict=True):
        assert choice.way in way_names()
        assert choice.gain == 1 if choice.way == before else choice.gain >= ways.CLEARLY
        assert choice.count == ways.COUNTS[-1] or "staged" not in choice.way


def test_a_way_must_win_clearly_and_often() -> None:
    usual = [100] * 8
    assert chosen({0: usual, 1: [99] * 8, 2: [101] * 8}, 0) == (0, 1.0)
    assert chosen({0: usual, 1: [80] * 8, 2: [50] * 8}, 0) == (2, 2.0)
    assert chosen({0: usual, 1: [50] * 6 + [200] * 2}, 0) == (0, 1.0)
    assert chosen({0: usual, 1: [50] * 7 + [9000]}, 0) == (1, 2.0)
    assert chosen({3: usual, 1: [10] * 8}, 3) == (1, 10.0)


@pytest.mark.parametrize(("lucky_calls", "want"), [(24, (0, 1.0)), (10_000, (2, 2.0))])
def test_a_way_that_wins_must_win_again(lucky_calls: int, want: tuple[int, float]) -> None:
    """Three ways of which the last takes half the time, in the first calls or in all of them."""
    calls = []

    def time_ns(way: int) -> int:
        calls.append(way)
        return 50 if way == 2 and len(calls) <= lucky_calls else 100

    assert ways.picked(time_ns, [0, 1, 2], 0) == want
    first = 3 * (1 + ways.ROUNDS)
    assert set(calls[first:]) == {0, 2}
    assert len({tuple(calls[at : at + 3]) for at in range(0, first, 3)}) == 3


def test_the_table_refuses_a_way_that_is_not_there() -> None:
    before = settled()
    settle = native.function("ess_rows_settle", [ctypes.c_void_p], ctypes.c_int32)
    for wrong in (-1, len(way_names())):
        assert settle((ctypes.c_int32 * len(CLASSES))(*([0] * 8), wrong)) == 0
        assert settled() == before
