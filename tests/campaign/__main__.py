"""See the package. Exits with 1 where a seed fails, having printed it and its shortest plan."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from tests.campaign.families import FAMILIES
from tests.campaign.plan import Plan, drawn, of_v4
from tests.campaign.shrink import shrunk
from tests.campaign.world import Outcome, play

PROGRESS_EVERY = 100


@dataclass(frozen=True)
class Played:
    plan: Plan
    outcome: Outcome | None
    wrong: str


def played(plan: Plan) -> Played:
    torch.set_num_threads(1)
    try:
        return Played(plan, play(plan), "")
    except Exception as wrong:  # a campaign reports any failure and goes on
        return Played(plan, None, f"{type(wrong).__name__}: {wrong}")


def seed_played(family: str, seed: int) -> Played:
    plan = drawn(seed)
    return played(of_v4(plan) if family == "deepseek_v4" else plan)


def run(seeds: range, jobs: int, family: str) -> list[Played]:
    played = []
    with ProcessPoolExecutor(jobs) as pool:
        for result in pool.map(partial(seed_played, family), seeds, chunksize=4):
            played.append(result)
            if result.wrong:
                print(f"seed {result.plan.seed}: {result.wrong}", flush=True)
            if len(played) % PROGRESS_EVERY == 0:
                print(f"{len(played)} of {len(seeds)} seeds ...", file=sys.stderr, flush=True)
    return played


def report(played: list[Played]) -> None:
    outcomes = [each.outcome for each in played if each.outcome is not None]
    for title in ("faults", "ends", "seen"):
        counts = sum((getattr(outcome, title) for outcome in outcomes), Counter())
        print(title)
        for name, count in counts.most_common():
            print(f"  {name:<28}{count:>9,}")
    failed = [each for each in played if each.wrong]
    print(f"{len(played):,} seeds, {len(failed)} failed")


def explain(failed: Played) -> None:
    """The shortest plan that fails as this one does, to be kept and played again."""
    kind = failed.wrong.partition(":")[0]
    least = shrunk(failed.plan, lambda plan: played(plan).wrong.startswith(kind))
    path = Path(f"campaign-{failed.plan.seed}.json")
    path.write_bytes(msgspec.json.format(msgspec.json.encode(least)))
    print(f"seed {failed.plan.seed}: {len(least.asks)} requests and {len(least.hits)} faults fail:")
    print(f"  {played(least).wrong}")
    print(f"  python -m tests.campaign --plan {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    # One more than cores: a seed with a disk waits for it.
    parser.add_argument("--jobs", type=int, default=(os.cpu_count() or 1) + 1)
    parser.add_argument("--family", choices=FAMILIES, default="small")
    parser.add_argument("--plan", type=Path, help="play this file alone, with its traceback")
    asked = parser.parse_args()
    if asked.plan is not None:
        print(play(msgspec.json.decode(asked.plan.read_bytes(), type=Plan)))
        return
    began_s = time.monotonic()
    played = run(range(asked.first, asked.first + asked.seeds), asked.jobs, asked.family)
    report(played)
    print(f"{time.monotonic() - began_s:.0f} s with {asked.jobs} processes")
    failed = [each for each in played if each.wrong]
    for each in failed[:3]:
        explain(each)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
