"""How gathers copy rows on this machine: timed once, kept by CPU model.

Caches and prefetchers differ too much for one way to be best everywhere (csrc/cpu/moves/ways.h
lists the ways, docs/log.md has figures). The first copy or lane of a process reads the choices that
an earlier process has kept; if they are missing or damaged, the ways are timed in turn, in about a
quarter of a second. A way other than the unmeasured one is taken only if it wins clearly, twice.
Nothing is timed where a cache holds more than half of the rows that would be copied: rows come from
memory later, and another way is the fastest there. All ways copy the same bytes, so a wrong choice
costs time and nothing else.

ESS_ROWS=unmeasured skips all that; ESS_ROWS=plain, or another way's name, sets that way for every
gather.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.caches import cache_folder
from ess.errors import BadInput, Unavailable
from ess.flashtrans.native_rows import NativeCopy, NativeFault, copier, pack
from ess.flashtrans.views import check
from ess.kernels.cpu import native
from ess.kernels.memory import host_memory
from ess.kernels.streams import RowCopy

EDITION: Final = 3
VARIABLE: Final = "ESS_ROWS"
UNMEASURED: Final = "unmeasured"

# Each size with each count is a class of ways.h; of many rows, a part that takes about this long.
ROW_BYTES: Final = (264, 656, 2304)
COUNTS: Final = (512, 2048, 65_536)
PART_BYTES: Final = 4 << 20
POOL_BYTES: Final = 192 << 20
TARGET_BYTES: Final = 48 << 20
ROUNDS: Final = 7
CLEARLY: Final = 1.06


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A way for one class, and how many times as fast as the unmeasured way it is."""

    row_bytes: int
    count: int
    way: str
    gain: float


@functools.cache
def settle() -> tuple[Choice, ...]:
    """The choices for this process; the first call measures, keeps and applies them."""
    named = asked()
    if named == UNMEASURED or not native.available():
        return unmeasured()
    if named:
        return apply(everywhere(named))
    path = place()
    choices = read(path)
    if choices is None:
        try:
            choices = measured()
        except Unavailable:
            return unmeasured()
        with contextlib.suppress(OSError):
            keep(path, choices)
    return apply(choices)


def check_environment() -> None:
    """BadInput for an ESS_ROWS or an ESS_ISA that is none."""
    native.check_isa()
    asked()


def asked() -> str:
    """What ESS_ROWS says, checked; empty if it says nothing, or nothing is native."""
    named = os.environ.get(VARIABLE, "") if native.available() else ""
    if named and named not in (allowed := (UNMEASURED, *way_names())):
        raise BadInput(f"{VARIABLE} is {named!r:.40}, must be one of {', '.join(allowed)}")
    return named


def apply(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    names = way_names()
    table = (ctypes.c_int32 * len(choices))(*(names.index(choice.way) for choice in choices))
    assert len(choices) == len(ROW_BYTES) * len(COUNTS), f"{len(choices)} classes"
    accepted = native.function("ess_rows_settle", [ctypes.c_void_p], ctypes.c_int32)(table)
    assert accepted, f"no such ways: {choices}"
    return tuple(choices)


def unmeasured() -> tuple[Choice, ...]:
    """The choices where nothing was measured."""
    if not native.available():
        return ()
    native.function("ess_rows_settle", [ctypes.c_void_p], ctypes.c_int32)(None)
    table = (ctypes.c_int32 * (len(ROW_BYTES) * len(COUNTS)))()
    native.function("ess_rows_settled", [ctypes.c_void_p])(table)
    names = way_names()
    return tuple(
        Choice(row_bytes=row_bytes, count=count, way=names[way], gain=1.0)
        for (row_bytes, count), way in zip(classes(), table, strict=True)
    )


def everywhere(name: str) -> tuple[Choice, ...]:
    return tuple(
        Choice(row_bytes=row_bytes, count=count, way=name, gain=1.0)
        for row_bytes, count in classes()
    )


def way_names() -> list[str]:
    """The names in the native table, in its order."""
    name = native.function("ess_rows_way", [ctypes.c_int32], ctypes.c_char_p)
    names: list[str] = []
    while (named := name(len(names))) is not None:
        names.append(named.decode())
    return names


def classes() -> Iterator[tuple[int, int]]:
    yield from ((row_bytes, count) for row_bytes in ROW_BYTES for count in COUNTS)


def place() -> Path:
    digest = hashlib.sha256(machine().encode()).hexdigest()[:16]
    return cache_folder() / f"rows-{digest}.json"


@functools.cache
def machine() -> str:
    """The CPU's maker, model and caches, and the instruction set in use."""
    lines = _text("/proc/cpuinfo").partition("\n\n")[0]
    fields = dict(re.findall(r"^(.+?)\s*: (.*)$", lines, re.MULTILINE))
    names = ("vendor_id", "model name", "cpu family", "model", "stepping")
    return " ".join((*(fields.get(name, "?") for name in names), *cache_sizes(), native.isa()))


def cache_sizes() -> list[str]:
    """As Linux writes them: 491520K."""
    paths = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return [_text(path).strip() for path in sorted(paths)]


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def read(path: Path) -> tuple[Choice, ...] | None:
    """The kept choices; None if there are none that this version can use on this machine."""
    try:
        kept = json.loads(path.read_bytes())
        choices = tuple(Choice(**choice) for choice in kept.pop("choices"))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return choices if kept == _origin() and _complete(choices) else None


def keep(path: Path, choices: tuple[Choice, ...]) -> None:
    kept = {**_origin(), "choices": [asdict(choice) for choice in choices]}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as draft:
        draft.write(json.dumps(kept, indent=2).encode())
    os.replace(draft.name, path)


def _origin() -> dict[str, Any]:
    return {"edition": EDITION, "machine": machine()}


def _complete(choices: tuple[Choice, ...]) -> bool:
    """Whether there is a choice for every class, once and in order, with ways of this build."""
    return (
        [(choice.row_bytes, choice.count) for choice in choices] == list(classes())
        and all(choice.way in way_names() for choice in choices)
        and all(isinstance(choice.gain, int | float) for choice in choices)
    )


def measured() -> tuple[Choice, ...]:
    """Times all classes. Rows come from more memory than caches hold. A few rows always go to the
    same place, as in a step; many go elsewhere in each sample, to lines that no cache holds.
    Unavailable where a cache holds too much of it."""
    sizes = [int(size[:-1]) << 10 for size in cache_sizes() if re.fullmatch(r"\d+K", size)]
    if 2 * max(sizes, default=0) > POOL_BYTES:
        raise Unavailable(f"a cache of {max(sizes):,} bytes holds more than half of {POOL_BYTES:,}")
    memory = host_memory(POOL_BYTES + TARGET_BYTES, touch_threads=1)
    random = np.random.default_rng(0)
    before = [way_names().index(choice.way) for choice in unmeasured()]
    return tuple(
        _choice(memory, row_bytes, count, usual, random)
        for (row_bytes, count), usual in zip(classes(), before, strict=True)
    )


def _choice(
    memory: npt.NDArray[np.uint8], row_bytes: int, count: int, usual: int, random: Any
) -> Choice:
    names, samples = way_names(), Samples(memory, row_bytes, count, random)
    candidates = [i for i, name in enumerate(names) if samples.is_large or "staged" not in name]
    way, gain = picked(samples.time_ns, candidates, usual)
    return Choice(row_bytes=row_bytes, count=count, way=names[way], gain=round(gain, 3))


def picked(time_ns: Callable[[int], int], candidates: list[int], usual: int) -> tuple[int, float]:
    """The fastest of many ways is partly fastest by chance, so it must win once more, against the
    usual way only; the gain is that of the second time."""
    way, gain = chosen(_timed(time_ns, candidates, ROUNDS), usual)
    if way == usual:
        return way, gain
    return chosen(_timed(time_ns, [usual, way], 2 * ROUNDS), usual)


def _timed(
    time_ns: Callable[[int], int], candidates: list[int], rounds: int
) -> dict[int, list[int]]:
    """Times each candidate once a round, in rotating order; drops the first round."""
    times: dict[int, list[int]] = {way: [] for way in candidates}
    for number in range(1 + rounds):
        turn = number % len(candidates)
        for way in (*candidates[turn:], *candidates[:turn]):
            times[way].append(time_ns(way))
    return {way: taken[1:] for way, taken in times.items()}


def chosen(times: dict[int, list[int]], usual: int) -> tuple[int, float]:
    """The way with the greatest gain over the usual one, round by round. It must be clear, and more
    than three rounds in four must agree: other work on the machine disturbs some of them."""
    gains = {
        way: [before / now for before, now in zip(times[usual], taken, strict=True)]
        for way, taken in times.items()
    }
    best = max(gains, key=lambda way: statistics.median(gains[way]))
    gain = statistics.median(gains[best])
    agree = sum(each > 1 for each in gains[best])
    if gain < CLEARLY or 4 * agree <= 3 * len(gains[best]):
        return usual, 1.0
    return best, gain


class Samples:
    """Gathers of one class, each of other rows."""

    def __init__(
        self, memory: npt.NDArray[np.uint8], row_bytes: int, count: int, random: Any
    ) -> None:
        self.is_large = count == COUNTS[-1]
        self._count = PART_BYTES // row_bytes if self.is_large else count
        self._pool, self._target = (
            part[: part.size // row_bytes * row_bytes].reshape(-1, row_bytes)
            for part in (memory[:POOL_BYTES], memory[POOL_BYTES:])
        )
        self._random = random
        self._at = 0

    def time_ns(self, way: int) -> int:
        rows = self._random.integers(0, len(self._pool), self._count, dtype=np.int32)
        target = self._target[self._at : self._at + self._count]
        if self.is_large:
            left = len(self._target) - self._at - self._count
            self._at = self._at + self._count if left >= self._count else 0
        copy: NativeCopy = pack(check(RowCopy(source=self._pool, source_rows=rows, target=target)))
        return _copy_ns(copy, way)


def _copy_ns(copy: NativeCopy, way: int) -> int:
    run, fault, no_stream = copier(), NativeFault(), 1 << 62
    began = time.thread_time_ns()
    refused = run(ctypes.byref(copy), 1, no_stream, way, ctypes.byref(fault))
    taken = time.thread_time_ns() - began
    assert not refused, "a row outside its pool"
    return max(1, taken)
