"""An engine process does not outlive the server that started it, not even stopped or stuck.

    python -m ess.engine.process.lifeline MODULE ARGUMENT...     (as `python -m MODULE ARGUMENT...`)

The closed stdin ends an engine between two steps. An engine that is stuck in a step is ended by the
system: on Linux the kernel sends SIGKILL when the parent has ended. A process asks for that before
it imports anything large: importing torch takes seconds, on a busy machine many.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import select
import signal
import sys
from typing import Final

PR_SET_PDEATHSIG: Final = 1
LEAVE: Final = signal.SIGUSR1
"""Ends a process of an engine that no request needs yet (`stay_with_lead`)."""


def words_of(module: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a module that ends with this process from its first import on; its
    stdin is a pipe from here."""
    return (sys.executable, "-m", __name__, module, *arguments)


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_parent() -> None:
    """Ignores signals to end and to read files again: systemd may send them to all processes of a
    unit, and `pkill` to all of a name. The parent heeds them, and needs this process until it has
    ended its own work."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def stay_with_lead() -> None:
    """LEAVE tells a process on another machine than the lead's that its node is to end. Before this
    call LEAVE ends the process, which may wait for a lead that never comes. Behind it the process
    ignores LEAVE: requests may need it until the lead ends, and the node waits for that. The call
    comes before the lead hears that this process has loaded, since the lead takes requests then."""
    signal.signal(LEAVE, signal.SIG_IGN)


def first_line() -> bytes:
    """What the parent writes to our stdin first. Where the parent has ended, this process ends here
    and says nothing: of a parent that ended before `die_with_parent` the system tells it nothing,
    and it would load a model for minutes."""
    leave_signals_to_parent()
    die_with_parent()
    line = sys.stdin.buffer.readline()
    if not line.endswith(b"\n") or is_closed(sys.stdin.fileno()):
        raise SystemExit(0)
    return line


def keep_objects() -> None:
    """Hides all objects that loading has made and left from the garbage collector. Otherwise a full
    collection, which comes within some step, walks through them and those of torch for 0.1 s."""
    gc.collect()
    gc.freeze()


def leave_objects() -> None:
    """Hides all objects from the garbage collector, just before the process ends. Otherwise the end
    of the interpreter walks through them, which takes half a second with those of torch."""
    gc.freeze()


def is_closed(descriptor: int) -> bool:
    """Whether the other end of a pipe, to which nothing is written, has been closed."""
    readable, _, _ = select.select([descriptor], [], [], 0.0)
    return bool(readable) and not os.read(descriptor, 1)


def _is_hung_up(descriptor: int) -> bool:
    """As `is_closed`, of a pipe in which something may be left to read."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


def main(module: str, *arguments: str) -> None:
    """If the parent ended before `die_with_parent` took effect, the system sends no signal; then
    the closed end of stdin shows it."""
    die_with_parent()
    if _is_hung_up(sys.stdin.fileno()):
        return
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
