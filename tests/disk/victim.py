"""A process that stores, overwrites, loads and forgets pages until it is killed.

    python -m tests.disk.victim FOLDER SEED PAGES NUMBERS

A sign is written for every page that it gives to its tier.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from tests.disk.bytes_of import content, copies, loaded, tier


def main(folder: str, seed: str, pages: str, numbers: str) -> None:
    drawn = random.Random(int(seed))
    made = tier(Path(folder), pages=int(pages))
    while True:
        for _ in range(drawn.randint(1, 12)):
            text = content(drawn.randrange(int(numbers)))
            made.store(text, copies(text))
            sys.stdout.write(".")
            sys.stdout.flush()
        if drawn.random() < 0.3:
            loaded(made, content(drawn.randrange(int(numbers))))
        if drawn.random() < 0.5:
            made.flush()
        if drawn.random() < 0.01:
            made.forget()


if __name__ == "__main__":
    main(*sys.argv[1:])
