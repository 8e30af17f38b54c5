"""The signals of a server, and the timers that end it whatever hangs.

The handlers are there before the server listens and greets. A signal that comes before the server
runs is kept until then, so the server ends as it always does and leaves neither a socket nor a
folder behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import signal
from collections.abc import Callable, Iterator
from typing import Final

from ess.server.process.logs.log_pipe import STDERR

HANG_S: Final = 10.0
HEARD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """What signals do: they are kept, then passed to `act` of `hear`. SIGHUP stays ignored where it
    is ignored (nohup)."""

    def __init__(self) -> None:
        self._kept: list[int] = []
        self._act: Callable[[int], None] = self._keep
        self._before = {number: signal.getsignal(number) for number in HEARD}
        for number, before in self._before.items():
            if number != signal.SIGHUP or before is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: self._act(number))

    def hear(self, act: Callable[[int], None]) -> None:
        """From now on signals are for `act`, first those that were kept. Python calls it between
        any two instructions, also while the event loop is stuck."""
        self._act = act
        for number in self._kept:
            act(number)

    def give_up(self) -> None:
        """The server did not come to run: signals do what they did before."""
        for number, before in self._before.items():
            signal.signal(number, before)

    def _keep(self, number: int) -> None:
        """A start that hangs ends too, once it was told to."""
        self._kept.append(number)
        if number != signal.SIGHUP:
            limit_end(HANG_S)


@contextlib.contextmanager
def taken_signals() -> Iterator[Signals]:
    """At the end of the block the timers stop, as the end was reached. The handlers stay until the
    process has ended, unless the block has failed."""
    signals = Signals()
    try:
        yield signals
    except BaseException:
        signals.give_up()
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_end(within_s: float) -> None:
    """After this time the process prints where it hangs; a second later the system ends it.

    The print reads frames without the interpreter's lock, which the hanging thread may hold. That
    can crash a process that is well, so nothing but an end is watched like this.
    """
    faulthandler.dump_traceback_later(within_s, file=STDERR)
    signal.setitimer(signal.ITIMER_REAL, within_s + 1.0)
