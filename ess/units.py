"""Sizes and the few arithmetic helpers that every part shares."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from typing import Final

from ess.errors import BadInput

PAGE_ROWS: Final = 64

_SUFFIX: Final = {
    "": 1,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d{1,24}(?:\.\d{1,24})?)\s*([kmgt]?)(?:i?b)?\s*", re.IGNORECASE | re.ASCII)


def div_ceil(value: int, unit: int) -> int:
    return -(-value // unit)


def align_up(value: int, unit: int) -> int:
    return div_ceil(value, unit) * unit


def parse_size(text: str | int, what: str = "") -> int:
    """Bytes or counts as people write them: 128k, 1.5GiB, 64 MiB, 4096. Powers of 1,024. `what` is
    the flag or setting that a refusal names.
    """
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        name = f"{what}: " if what else ""
        raise BadInput(f"{name}{text!r:.80} is not a size; write 4096, 128k, 64MiB or 1.5GiB")
    count, suffix = Fraction(match[1]), match[2].lower()
    if not suffix and count.denominator > 1:
        name = f"{what} " if what else ""
        raise BadInput(f"{name}{text} is not a whole number")
    return int(count * _SUFFIX[suffix])


def format_bytes(count: int) -> str:
    """The largest binary unit that keeps at least one digit before the point."""
    for suffix, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= unit:
            return f"{count / unit:.2f} {suffix}"
    return f"{count} B"


def exact_bytes(count: int) -> str:
    """As `format_bytes`, where `parse_size` reads the same number in it; else the number itself.

    >>> exact_bytes(3 << 19), exact_bytes((3 << 19) + 1)
    ('1.50 MiB', '1572865')
    """
    text = format_bytes(count)
    return text if parse_size(text) == count else str(count)


def shown(value: object, most: int = 60) -> str:
    """The value as Python writes it, cut to `most` characters. Python writes no number of
    more than 4,300 digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number too long to print"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """
    >>> counted(1, "query", "queries"), counted(2, "query", "queries"), counted(1200, "layer")
    ('1 query', '2 queries', '1,200 layers')
    """
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def listed(choices: Iterable[str | float]) -> str:
    """
    >>> listed(["bf16"]), listed([1.0, 2.0, 4.0])
    ('bf16', '1, 2 or 4')
    """
    *others, last = (choice if isinstance(choice, str) else f"{choice:g}" for choice in choices)
    return f"{', '.join(others)} or {last}" if others else last
