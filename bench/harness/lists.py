"""Lists and ranges as people write them on a command line: 4k,16k or 1,4,16 or 4k-32k*2."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ess.errors import BadInput
from ess.pool.lru.eviction import POLICIES, PolicyName
from ess.units import parse_size

RANGE: Final = re.compile(r"^([^-]+)-([^-*+]+)(?:([*+])(\d+))?$")
VALUES_MAX: Final = 64
VALUE_MAX: Final = 1 << 40
COUNT_MAX: Final = 1_000_000
MODES: Final = ("layerwise", "none", "da", "dba", "resident")


def sizes(option: str, text: str) -> list[int]:
    """
    >>> sizes("--ctx", "4k,16k-64k*2"), sizes("--batch", "1-7+3")
    ([4096, 16384, 32768, 65536], [1, 4, 7])
    """
    values = [value for part in text.split(",") for value in _values(option, part.strip())]
    if not values or min(values) < 1:
        raise BadInput(f"{option} {text}: every value must be 1 or more")
    if max(values) > VALUE_MAX:
        raise BadInput(f"{option} {text}: no value above {VALUE_MAX:,}")
    if len(values) > VALUES_MAX:
        raise BadInput(f"{option} {text}: {len(values)} values, at most {VALUES_MAX}")
    return list(dict.fromkeys(values))


def size(option: str, text: str) -> int:
    """A single value, by the same rules."""
    values = sizes(option, text)
    if len(values) != 1:
        raise BadInput(f"{option} {text}: one value, not {len(values)}")
    return values[0]


def amount(option: str, value: int) -> int:
    """A number of repetitions; refused where they would never end."""
    if not 1 <= value <= COUNT_MAX:
        raise BadInput(f"{option} {value}: between 1 and {COUNT_MAX:,}")
    return value


def modes(option: str, text: str) -> list[str]:
    return _names(option, text, MODES)


def policies(option: str, text: str) -> list[PolicyName]:
    named = _names(option, text, POLICIES)
    return [policy for policy in POLICIES if policy in named]


def _names(option: str, text: str, choices: Sequence[str]) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in choices:
            raise BadInput(f"{option} {name}: choose from {', '.join(choices)}")
    return list(dict.fromkeys(names))


def shares(option: str, text: str) -> list[float]:
    """Numbers above 0, up to 1."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"{option} {text}: write numbers such as 0.1,0.2") from None
    if not all(0 < value <= 1 for value in values):
        raise BadInput(f"{option} {text}: every value must be above 0 and at most 1")
    return list(dict.fromkeys(values))


def _values(option: str, part: str) -> list[int]:
    match = RANGE.match(part)
    if match is None:
        return [parse_size(part, option)]
    value, last = parse_size(match[1], option), parse_size(match[2], option)
    sign, step = match[3] or "+", int(match[4] or 1)
    if not 1 <= value <= last or step < (2 if sign == "*" else 1):
        raise BadInput(f"{option} {part}: a range that does not grow; write 1-16*2 or 1-7+3")
    values: list[int] = []
    while value <= last and len(values) <= VALUES_MAX:
        values.append(value)
        value = value * step if sign == "*" else value + step
    return values
