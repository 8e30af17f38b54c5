"""What attacks may cost: memory, exit codes, processes left over; seconds are for the runner."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys

import msgspec
import pytest

from tests.attacks.bystander import Seen
from tests.attacks.catalogue import ATTACKS, STARTS
from tests.attacks.figures import above, aligned, cells, paired, rows_of
from tests.attacks.measure import Figures, Memory, measure, measure_start
from tests.attacks.processes import own_bytes, resident_bytes
from tests.server.harness import until
from tests.support.few import few
from tests.support.process import ROOT

COSTLY = Figures(
    name="trailers",
    got="taken",
    server_bytes=1 << 30,
    all_bytes=1 << 30,
    gap_s=0.3,
    exit_s=2.1,
    code=0,
)


def test_a_gap_may_be_open_at_both_ends_of_the_window():
    seen = Seen(tokens=[0.0, 1.0, 1.1, 1.2, 3.0, 3.1], end=9.0)
    assert seen.gap_s(1.05, 1.15) == pytest.approx(0.1)
    assert seen.gap_s(0.5, 1.15) == pytest.approx(1.0), "it began before the window"
    assert seen.gap_s(1.15, 2.5) == pytest.approx(1.3), "it ends behind the window"
    assert seen.gap_s(3.05, 8.1) == pytest.approx(5.0), "no token came any more"
    assert seen.gap_s(5.0, 6.0) == pytest.approx(2.9), "none within it"


def test_a_probe_counts_where_it_waits():
    seen = Seen(probes=[(0.0, 0.1, 200), (1.0, 4.0, 503), (5.0, 5.1, 200)])
    assert seen.health_s(2.0, 3.0) == pytest.approx(3.0)
    assert (seen.unhealthy(2.0, 3.0), seen.unhealthy(4.5, 6.0)) == (1, 0)


def test_what_is_above_its_goal_is_said():
    assert above(COSTLY) == ["trailers: server", "trailers: all", "trailers: gap"]
    cheap = msgspec.structs.replace(COSTLY, server_bytes=0, all_bytes=0, gap_s=0.1)
    assert above(cheap) == []
    assert above(msgspec.structs.replace(cheap, exit_s=None)) == ["trailers: exit"]
    [server, *_] = rows_of(COSTLY, "tree")
    assert (server.value, server.ratio) == (1 << 30, 24 / 1024)


def test_two_runs_stand_side_by_side():
    cheap = msgspec.structs.replace(COSTLY, got="400", server_bytes=0)
    [row] = paired([COSTLY], [cheap])
    assert row[:4] == ["trailers", "taken / 400", "1,024 / 0", "1,024"]
    assert paired([], [cheap]) == [cells(cheap)]
    assert len({len(line) for line in aligned([row, cells(cheap)]).splitlines()}) == 1


def test_memory_is_that_of_a_whole_family():
    grow = "import os; held = b'x' * (64 << 20); print(flush=True); input()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grow!r}])"
    idle = [sys.executable, "-c", f"input(); {start}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(idle, **pipes) as family:
        with Memory(family.pid) as memory:
            os.write(family.stdin.fileno(), b"\n")
            assert family.stdout.readline() == b"\n"
            until(lambda: memory.all_bytes() >= 64 << 20, "what the child holds")
        assert memory.left() == 2
        memory.end_all()
    until(lambda: memory.left() == 0, "the end of both")


def test_memory_that_a_child_shares_with_its_parent_counts_once():
    libc, stack, shared = ctypes.CDLL(None), ctypes.create_string_buffer(1 << 16), 0x100
    top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
    child = libc.clone(libc.pause, top, shared | signal.SIGCHLD, None)
    try:
        assert resident_bytes(child) > 0
        assert own_bytes(child) == 0
        assert own_bytes(os.getpid()) > 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


WANTED = {
    "one-byte-chunks-8": ("400", 0),
    "text-30mb": ("400", 0),
    "id-4mb": ("400", 0),
    "log-gone-engine": ("engine -9", 1),
    "small-trailers": ("400", 0),
    "texts-32mb": ("400", 0),
    "log-unread": ("SIGTERM", 0),
    "grammar-kill": ("kill -9", -9),
    "left-in-body": ("200 x 499", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", few([*WANTED][4:], all_of=WANTED))
def test_an_attack_costs_what_it_may(name: str):
    attack = ATTACKS[name]
    figures = measure(attack, ROOT)
    assert (figures.got, figures.code) == WANTED[name], figures
    assert (figures.left, figures.tracebacks) == (0, 0), figures
    assert figures.all_bytes <= attack.all_mib << 20, figures
    assert attack.ends or figures.server_bytes <= attack.server_mib << 20, figures


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_an_open_server_does_not_start(name: str):
    assert measure_start(name, STARTS[name], ROOT).got == "refused"
