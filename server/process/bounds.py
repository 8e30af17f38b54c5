"""How much may come in: one bound for everything that a client decides.

docs/serving.md has the table; a test compares it with `BOUNDS`. A bound that an operator sets names
its setting, and the value here is the default. Everything is checked before the work it would
cause, and before the key only what is read before the key is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NAME_CHARS_MAX: Final = 256
PROMPTS_MAX: Final = 128
TRAILER_BYTES_MAX: Final = 8 << 10
EXTENSION_BYTES_MAX: Final = 8 << 10
BODY_S: Final = 30.0
BODY_RATE_MIN: Final = 64 << 10
PROBE_CONNECTIONS: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`beyond` says what the client gets; `setting` is empty where nobody sets it."""

    what: str
    most: str
    beyond: str
    setting: str = ""


BOUNDS: Final = (
    Bound(
        what="prompts and answers in one request",
        most=f"{PROMPTS_MAX}",
        beyond="400",
    ),
    Bound(
        what="an id: rid, request_id, session_id, their headers",
        most=f"{NAME_CHARS_MAX} visible ASCII characters",
        beyond="400; a header that is none is ignored",
    ),
)
