"""The disk tier killed at random moments of random writes, and its files damaged: what loads is
what was stored.

    python -m tests.disk.kills --count 200

Each round starts a process that writes, kills it, and reads every page that the folder still has.
Then the files are damaged in one of the ways below and read again. Pages may be lost, and none may
be wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ess.pool.disk.folder import CATALOGUE, SLAB, SUFFIXES
from ess.pool.disk.slab import ALIGN
from tests.disk.bytes_of import PAGE_BYTES, content, fill, loaded, tier
from tests.support.forked import started

PAGES: Final = 24
NUMBERS: Final = 60
SIGNS_MAX: Final = 400
STRIDE: Final = PAGE_BYTES + -PAGE_BYTES % ALIGN


@dataclass(slots=True)
class Told:
    """What the rounds have seen: rounds, pages that came back, pages that damage has cost."""

    rounds: int = 0
    kept: int = 0
    lost: int = 0
    damages: Counter[str] = field(default_factory=Counter)


def kill_one(folder: Path, drawn: random.Random) -> None:
    """A process that writes is killed behind a random number of signs."""
    command = ["-m", "tests.disk.victim", str(folder)]
    numbers = [str(drawn.randrange(1 << 30)), str(PAGES), str(NUMBERS)]
    with started("disk", [*command, *numbers], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        wanted = drawn.randint(1, SIGNS_MAX)
        assert len(child.stdout.read(wanted)) == wanted, "the victim ended by itself"
        child.send_signal(signal.SIGKILL)


def survivors(folder: Path) -> int:
    made = tier(folder, pages=PAGES)
    count = sum(loaded(made, content(number)) for number in range(NUMBERS))
    made.check()
    made.close()
    return count


def cut(folder: Path, drawn: random.Random) -> None:
    """The slab is shorter than its rows say, at any byte."""
    os.truncate(folder / SLAB, drawn.randint(0, (folder / SLAB).stat().st_size))


def flip(folder: Path, drawn: random.Random) -> None:
    """Some bits of the slab are others."""
    with (folder / SLAB).open("r+b") as slab:
        for _ in range(drawn.randint(1, 40)):
            change_byte(slab.fileno(), drawn)


def change_byte(file: int, drawn: random.Random) -> None:
    at = drawn.randrange(max(1, os.fstat(file).st_size))
    before = os.pread(file, 1, at)
    if before:
        os.pwrite(file, bytes([before[0] ^ 1 << drawn.randrange(8)]), at)


def tear(folder: Path, drawn: random.Random) -> None:
    """Records hold the first half of another record, or all of it."""
    with (folder / SLAB).open("r+b") as slab:
        for _ in range(4):
            source, target = drawn.randrange(PAGES), drawn.randrange(PAGES)
            part = os.pread(
                slab.fileno(), drawn.choice([ALIGN, 2 * ALIGN, STRIDE]), source * STRIDE
            )
            os.pwrite(slab.fileno(), part, target * STRIDE)


def lose_writes(folder: Path, drawn: random.Random) -> None:
    """The catalogue is newer than the slab: what was written since never reached the disk."""
    _age(folder, drawn, [SLAB])


def lose_rows(folder: Path, drawn: random.Random) -> None:
    """The slab is newer than the catalogue."""
    _age(folder, drawn, [CATALOGUE + suffix for suffix in SUFFIXES])


def spoil_rows(folder: Path, drawn: random.Random) -> None:
    """Bytes of the catalogue are others."""
    with (folder / CATALOGUE).open("r+b") as catalogue:
        for _ in range(drawn.randint(1, 20)):
            change_byte(catalogue.fileno(), drawn)


def _age(folder: Path, drawn: random.Random, names: list[str]) -> None:
    """These files are as they were before some more pages were written."""
    with tempfile.TemporaryDirectory(dir=folder) as kept:
        for name in names:
            if (folder / name).exists():
                shutil.copy(folder / name, kept)
        made = tier(folder, pages=PAGES)
        first = drawn.randrange(NUMBERS)
        fill(made, range(first, min(NUMBERS, first + PAGES)))
        made.close()
        for name in names:
            (folder / name).unlink(missing_ok=True)
            if (Path(kept) / name).exists():
                shutil.copy(Path(kept) / name, folder)


DAMAGES: Final[list[Callable[[Path, random.Random], None]]] = [
    cut,
    flip,
    tear,
    lose_writes,
    lose_rows,
    spoil_rows,
]


def rounds(folder: Path, *, count: int, seed: int) -> Told:
    """AssertionError at the first wrong page."""
    told, drawn = Told(), random.Random(seed)
    for _ in range(count):
        kill_one(folder, drawn)
        before = survivors(folder)
        damage = drawn.choice(DAMAGES)
        damage(folder, drawn)
        after = survivors(folder)
        told.rounds += 1
        told.kept += before
        told.lost += max(0, before - after)
        told.damages[damage.__name__] += 1
    return told


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = rounds(Path(folder), count=asked.count, seed=asked.seed)
    damages = ", ".join(f"{count} {name}" for name, count in sorted(told.damages.items()))
    print(f"{told.rounds} kills: {told.kept} pages came back, none wrong; {damages}: ", end="")
    print(f"{told.lost} pages lost, none wrong")


if __name__ == "__main__":
    main()
