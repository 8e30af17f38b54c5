"""An error at any line of a call that takes pages, or begins a step, leaves all as it was."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest

from ess.door import Offload, Sequence
from tests.unit.door.test_door import make
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
