"""Every error a user of ESS can meet.

    EssError
    |-- BadInput (ValueError)      an argument is wrong; nothing has changed
    |-- BadState (RuntimeError)    the call is right, its moment is not; nothing has changed
    |-- PoolFull                   no room now: names the limiter and the numbers
    `-- Unavailable                this machine or installation lacks what was asked for

Asserts are for us and say that ESS itself is wrong; these are for the caller.
"""

from __future__ import annotations

from typing import TypeVar


class EssError(Exception):
    """Base of all errors that ESS raises on purpose."""


class BadInput(EssError, ValueError):
    """An argument is wrong. The sentence names it and the numbers; nothing has changed."""


class BadState(EssError, RuntimeError):
    """The call came at the wrong moment: a closed sequence, a second commit."""


class Unavailable(EssError, RuntimeError):
    """This machine or installation cannot do what was asked."""


class PoolFull(EssError):
    """A reservation does not fit; nothing was taken. The sentence says what would make room, in the
    words of a library: a server has others, and takes the `shortage` alone.

    limiter          what is short: "slots", "index pages", "host pages", "sequences", "handoffs"
    needed, free     counts of it; slots are counted in each layer group, pages hold 64 tokens
    shortage         the beginning of the sentence: what is short, in numbers
    permanent        it can never fit, not even when everything else has been closed
    retry_after_s    seconds after which to try again, None where it is permanent
    """

    def __init__(
        self,
        *,
        limiter: str,
        needed: int,
        free: int,
        sentence: str,
        shortage: str = "",
        permanent: bool = False,
    ) -> None:
        super().__init__(sentence)
        self.shortage = shortage or sentence
        self.limiter = limiter
        self.needed = needed
        self.free = free
        self.permanent = permanent
        self.retry_after_s = None if permanent else 1.0


def reason_of(error: Exception) -> str:
    """Why a call failed: of an OSError the reason alone, without its number and file; of an error
    without words its kind.

    >>> reason_of(FileNotFoundError(2, "No such file", "x.trace")), reason_of(TimeoutError())
    ('No such file', 'TimeoutError')
    """
    said = error.strerror if isinstance(error, OSError) else None
    return said or str(error) or type(error).__name__


def unreadable(named: str, error: Exception) -> BadInput:
    return BadInput(f"{named} cannot be read: {reason_of(error)}")


def not_installed(package: str, *, extra: str) -> Unavailable:
    return Unavailable(f"{package} is not installed: pip install 'ess[{extra}]'")


Kept = TypeVar("Kept", bound=BaseException)


def without_frames(error: Kept) -> Kept:
    """The error, to be kept: the calls that it came through would keep all that they worked on."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
