"""See the package. Exits with 1 where a seed fails, having printed it and its shortest life."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import msgspec

from tests.campaign.lives.plan import FAMILIES, Life, drawn
from tests.campaign.lives.shrink import shrunk
from tests.campaign.lives.world import live

PROGRESS_EVERY = 25


def wrong_with(life: Life) -> str:
    try:
        live(life)
    except Exception as wrong:  # a campaign reports any failure and goes on
        return f"{type(wrong).__name__}: {wrong}"
    return ""


def explain(life: Life, wrong: str) -> None:
    kind = wrong.partition(":")[0]
    least = shrunk(life, lambda less: wrong_with(less).startswith(kind))
    path = Path(f"life-{life.seed}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(least)))
    print(f"seed {life.seed}: {len(least.asks)} requests fail: {wrong_with(least)}")
    print(f"  python -m tests.campaign.lives --life {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--life", type=Path, help="live this file alone, with its traceback")
    asked = parser.parse_args()
    if asked.life is not None:
        print(live(msgspec.json.decode(asked.life.read_bytes(), type=Life)))
        return
    began_s, seen, failed = time.monotonic(), Counter[str](), 0
    for count, seed in enumerate(range(asked.first, asked.first + asked.seeds)):
        if count % PROGRESS_EVERY == PROGRESS_EVERY - 1:
            print(f"{count} of {asked.seeds} seeds ...", file=sys.stderr, flush=True)
        life = drawn(seed, tuple(asked.family or FAMILIES))
        try:
            seen += live(life).seen
        except Exception as wrong:  # a campaign reports any failure and goes on
            failed += 1
            traceback.print_exc(limit=-3)
            print(f"seed {seed}, {life.family}: {type(wrong).__name__}: {wrong}", flush=True)
            if failed <= 5:
                explain(life, f"{type(wrong).__name__}: {wrong}")
    print(*(f"{name} {count:,}" for name, count in seen.most_common()), sep=", ")
    print(f"{asked.seeds:,} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
