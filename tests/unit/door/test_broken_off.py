"""An error at any line of a call that takes pages, or begins a step, leaves all as it was; a step
that breaks off at its end is refused."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final
from unittest.mock import Mock

import numpy as np
import pytest

from ess.door import Offload, Sequence, Step
from ess.door.memory.shelf import Shelf
from ess.door.residency import row_copies
from ess.door.sequences.progress import Progress
from ess.errors import BadState
from ess.pool.disk import tier
from tests.disk.test_engine_disk import disk_of
from tests.unit.door.test_door import LAYOUT, make, rows
from tests.unit.door.test_open_on_host import TOKENS, filled, free

TAKING: Final = {"open", "open_on_host", "resume", "take_first", "add", "_enter", "_admit"} | {
    *("_take", "_activate", "_load", "load", "extend", "set_length", "set_text", "set_pages"),
    *("copy_page", "copy_state", "begin", "settle", "_write_now", "hold_for"),
}
COMMITS: Final = ("undo.pop_all()", "owner.open_step = step")
"""Behind these lines everything belongs to the sequence or the step."""
NO_ERROR: Final = ("with ", "try:", "undo.", "return ")
"""How lines begin that take nothing and cannot fail for want of memory or by a device."""


class Broken(BaseException):
    """As Ctrl-C."""


def broken_off(call: Callable[[], object], number: int) -> str:
    """Breaks the call off at a line, counted from 0; the line, or nothing if it has fewer lines
    before it commits."""
    left, at = number, ""

    def line(frame: FrameType, event: str, _arg: object) -> Any:
        nonlocal left, at
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        left = -1 if text in COMMITS else left
        if event != "line" or at or text.startswith(NO_ERROR):
            return line
        if not left:
            at = f"{frame.f_code.co_name}: {text}"
            raise Broken(at)
        left -= 1
        return line

    def traced(frame: FrameType, _event: str, _arg: object) -> Any:
        name, code = frame.f_code.co_filename, frame.f_code.co_name
        return line if code in TAKING and ("/ess/door/" in name or "/pool/index" in name) else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    except Broken:
        assert at, "the call is broken off here alone"
    finally:
        sys.settrace(before)
    return at


def state(offload: Offload) -> tuple[object, ...]:
    offload.drain()
    offload.check()
    pools = offload._pools
    holders = [pool.pages._hold_count.tolist() for pool in (pools.latent, pools.index)]
    promised = [pools.ledger.promised(name) for name in pools.ledger.capacities()]
    lines = pools.tables.lines.tolist(), pools.tables.free_count
    return free(offload), promised, holders, lines, offload.owner.open_step


def check_case(offload: Offload, name: str) -> list[str]:
    """The lines at which a call was broken off: each of them, one after the other."""
    call, lines = CASES[name](offload), list[str]()
    before = state(offload)
    while line := broken_off(call, len(lines)):
        assert state(offload) == before, line
        lines.append(line)
    assert state(offload) != before
    return lines


def waiting(offload: Offload) -> Sequence:
    return filled(offload, TOKENS, on_device=False, length_max=256)


def case_open(offload: Offload) -> Callable[[], object]:
    filled(offload, TOKENS, on_device=True).close()
    return lambda: offload.open(TOKENS)


def case_open_on_host(offload: Offload) -> Callable[[], object]:
    filled(offload, TOKENS, on_device=True).close()
    return lambda: offload.open(TOKENS, on_device=False)


def case_resume(offload: Offload) -> Callable[[], object]:
    sequence = filled(offload, TOKENS, on_device=True)
    sequence.preempt()
    return sequence.resume


def case_grow(offload: Offload) -> Callable[[], object]:
    sequence = filled(offload, TOKENS, on_device=True, promise="some")
    return lambda: offload.begin([sequence], query_counts=[50]).abandon()


def case_begin(offload: Offload) -> Callable[[], object]:
    sequence = filled(offload, TOKENS, on_device=True)
    return lambda: offload.begin([sequence], query_counts=[1])


def case_fork(offload: Offload) -> Callable[[], object]:
    return filled(offload, TOKENS, on_device=True).fork


def case_take_first(offload: Offload) -> Callable[[], object]:
    holding = waiting(offload).holding
    return lambda: holding.take_first(holding.host_pages[:1], 1)


CASES: Final = {
    "open": case_open,
    "open_on_host": case_open_on_host,
    "resume": case_resume,
    "resume the first time": lambda offload: waiting(offload).resume,
    "grow": case_grow,
    "begin": case_begin,
    "fork": case_fork,
    "take_first": case_take_first,
}


@pytest.mark.parametrize("name", CASES)
def test_a_call_that_is_broken_off_changes_nothing(name: str) -> None:
    with make(query_max=64) as offload:
        assert len(check_case(offload, name)) > 5


def test_an_open_whose_reads_do_not_start_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of threads that cannot start one raises, and has the job in its queue."""
    disk, tokens = disk_of(tmp_path, LAYOUT), list(range(200))
    monkeypatch.setattr(tier, "READ_MAX", 1)
    with make(disk=disk) as offload:
        filled(offload, tokens, on_device=True).close()
        offload.drain()
        disk.flush()
        offload._pools.latent.forget()
        before, submit, jobs = state(offload), disk._readers.submit, list[Future[None]]()

        def some(*job: Any) -> Future[None]:
            jobs.append(submit(*job))
            if len(jobs) == 2:
                raise RuntimeError("can't start new thread")
            return jobs[-1]

        none = Mock(side_effect=RuntimeError("can't start new thread"))
        for fails in ((threading.Thread, "start", none), (disk._readers, "submit", some)):
            with monkeypatch.context() as patch:
                patch.setattr(*fails)
                with pytest.raises(RuntimeError, match="new thread"):
                    offload.open(tokens, from_disk=True)
            count = disk.uses.loaded_count
            wait([*jobs, submit(int)])
            assert disk.uses.loaded_count == count, "a page is read into memory that is free"
            assert state(offload) == before
            assert not disk._records.is_held
        sequence = offload.open(tokens, from_disk=True)
        sequence.resume()
        assert sequence.cached_count == 128, "with MTP the last page is left out"


@pytest.mark.parametrize("at", ["open", "resume"])
def test_pages_that_are_on_their_way_from_the_disk_are_given_up(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when all readers are asked."""
    disk, tokens, bring = disk_of(tmp_path, LAYOUT), list(range(200)), Shelf.bring

    def broken(shelf: Shelf, *given: Any) -> None:
        bring(shelf, *given)
        raise Broken

    with make(disk=disk) as offload:
        sequence = filled(offload, tokens, on_device=True)
        call = partial(offload.open, tokens, from_disk=True)
        if at == "open":
            sequence.close()
        else:
            sequence.preempt()
            assert sequence.shelve(9) > 1
            call = sequence.resume
        offload.drain()
        disk.flush()
        offload._pools.latent.forget()
        before, holds = state(offload), dict(disk._records._holds)
        with monkeypatch.context() as patch:
            patch.setattr(Shelf, "bring", broken)
            with pytest.raises(Broken):
                call()
        assert state(offload) == before
        assert not offload._pools.shelf._loads
        assert dict(disk._records._holds) == holds
        again = call() or sequence
        again.wait()
        again.close()


def test_a_lender_that_fails_finds_the_sequence_on_the_device() -> None:
    with make(layout=replace(LAYOUT, state_bytes=8)) as offload:
        sequence = filled(offload, TOKENS, on_device=False)
        sequence.holding.lend(np.zeros(8, np.uint8), Mock(side_effect=OSError))
        with pytest.raises(OSError):
            sequence.resume()
        assert sequence.state == "active"
        sequence.close()
        offload.drain()
        offload.check()


def test_a_step_that_breaks_off_while_it_is_sealed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some of its rows are on their way to the host: it can neither be kept nor given up."""
    monkeypatch.setattr(row_copies, "store_copies", Mock(side_effect=OSError("no lane")))

    def broken(offload: Offload) -> Step:
        with offload.open([1]) as sequence:
            step = offload.begin([sequence], query_counts=[1])
            for layer in range(LAYOUT.layer_count):
                step.append(layer, rows(1))
            with pytest.raises(OSError, match="no lane"):
                step.commit(accepted=[1])
            raise KeyError(step)

    with make() as offload:
        with pytest.raises(KeyError) as error:
            broken(offload)
        [step] = error.value.args
        [sequence] = step.sequences
        for call in (
            *(step.abandon, lambda: step.seal(accepted=[1]), sequence.close, sequence.fill),
            *(offload.rebalance, lambda: offload.begin([sequence], query_counts=[1])),
        ):
            with pytest.raises(BadState, match="broke off at its end: close the offload"):
                call()


def test_a_step_that_breaks_off_while_it_is_learned_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of its sequences has learned what was accepted, the other has not."""
    learned, calls = Progress.learned, list[object]()

    def first(progress: Progress, *given: Any, **more: Any) -> None:
        calls.append(progress)
        if len(calls) > 1:
            raise Broken
        learned(progress, *given, **more)

    with make() as offload:
        sequences = [offload.open([token]) for token in (1, 2)]
        step = offload.begin(sequences, query_counts=[1, 1])
        for layer in range(LAYOUT.layer_count):
            step.append(layer, rows(2))
        step.seal(accepted=[1, 1])
        monkeypatch.setattr(Progress, "learned", first)
        with pytest.raises(Broken):
            step.learn(accepted=[1, 1])
        for call in (
            *(lambda: step.learn(accepted=[1, 1]), sequences[1].close, sequences[1].preempt),
            *(offload.rebalance, lambda: offload.begin(sequences[:1], query_counts=[1])),
        ):
            with pytest.raises(BadState, match="broke off at its end: close the offload"):
                call()
