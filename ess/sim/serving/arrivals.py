"""Arrivals of requests from public traces: Mooncake JSONL and Azure CSV, as lengths and times.

Both readers stream, count times from the first request, and refuse a file by naming the line.
"""

from __future__ import annotations

import csv
import datetime
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput, unreadable

AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_BLOCK_TOKENS: Final = 512
PROMPT_MAX: Final = 1 << 21
OUTPUT_MAX: Final = 1 << 20
OUTPUTS_MAX: Final = 1 << 27
"""The most tokens of one prompt and of one output, and output tokens of all requests of a replay.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request. `prefix_blocks` name its 512-token blocks: equal names are equal prefixes."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    prefix_blocks: tuple[int, ...] = ()


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_arrivals(path: str | os.PathLike[str]) -> list[Arrival]:
    """Reads either form, told by its first byte, in order of time, which begins at 0."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            first = file.read(1)
            file.seek(0)
            arrivals = list((read_mooncake if first == "{" else read_azure)(file))
    except (BadInput, UnicodeDecodeError) as error:
        raise BadInput(f"{os.fspath(path)}, {error}") from None
    except OSError as error:
        raise unreadable(f"the trace {os.fspath(path)}", error) from None
    if not arrivals:
        raise BadInput(f"{os.fspath(path)} holds no request")
    start = min(arrival.at_s for arrival in arrivals)
    moved = [_moved(arrival, start) for arrival in arrivals]
    return sorted(moved, key=lambda arrival: arrival.at_s)


def read_mooncake(lines: Iterable[str]) -> Iterator[Arrival]:
    """Reads JSON lines: `timestamp` (ms), `input_length`, `output_length`, `hash_ids`."""
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = decoder.decode(line)
        except UNDECODABLE as error:
            raise BadInput(f"line {number}: {error}") from None
        _check(number, record.timestamp, record.input_length, record.output_length)
        yield Arrival(
            at_s=record.timestamp / 1e3,
            prompt_tokens=record.input_length,
            output_tokens=record.output_length,
            prefix_blocks=record.hash_ids,
        )


def read_azure(lines: Iterable[str]) -> Iterator[Arrival]:
    """Reads CSV with the columns TIMESTAMP (UTC unless it says otherwise) and two token counts."""
    reader = csv.DictReader(lines, strict=True)
    try:
        missing = [name for name in AZURE_COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise BadInput(
                f"line 1: no column {', '.join(missing)}; Azure traces have these, and lines of "
                "Mooncake traces begin with {"
            )
        for record in reader:
            yield _azure_arrival(reader.line_num, record)
    except csv.Error as error:
        raise BadInput(f"line {reader.line_num}: {error}") from None


def _azure_arrival(number: int, record: dict[str, Any]) -> Arrival:
    when, *counts = (record[name] for name in AZURE_COLUMNS)
    try:
        at_s = _seconds(when)
        prompt, output = map(int, counts)
    except (TypeError, ValueError):
        raise BadInput(
            f"line {number}: {record} has no time or no two whole numbers where they belong"
        ) from None
    _check(number, at_s, prompt, output)
    return Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output)


def _seconds(when: str) -> float:
    """Seconds of a time; Azure writes seven digits after the second, `datetime` reads six."""
    head, dot, fraction = when.strip().partition(".")
    digits = len(fraction) - len(fraction.lstrip("0123456789"))
    stamp = datetime.datetime.fromisoformat(
        head + dot + fraction[: min(digits, 6)] + fraction[digits:]
    )
    zoned = stamp if stamp.tzinfo else stamp.replace(tzinfo=datetime.UTC)
    return zoned.timestamp()


def _check(number: int, at_s: float, prompt: int, output: int) -> None:
    if not math.isfinite(at_s):
        raise BadInput(f"line {number}: the time {at_s} is not finite")
    if not (0 < prompt <= PROMPT_MAX and 0 <= output <= OUTPUT_MAX):
        raise BadInput(
            f"line {number}: {prompt:,} prompt and {output:,} output tokens; there can be 1 to "
            f"{PROMPT_MAX:,} and 0 to {OUTPUT_MAX:,}"
        )


def _moved(arrival: Arrival, start: float) -> Arrival:
    """A request asks for one token at least."""
    output = max(1, arrival.output_tokens)
    return replace(arrival, at_s=arrival.at_s - start, output_tokens=output)
