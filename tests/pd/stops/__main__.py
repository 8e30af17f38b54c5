"""Every n-th point of every kind of run; exits with 1 if one of them fails."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter

from tests.pd.stops.actors import TRANSPORTS
from tests.pd.stops.pair import POLICIES, STOPS, play


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pd.stops")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    asked = parser.parse_args()
    kinds = asked.transport or TRANSPORTS
    failures = 0
    for transport, policy, side, stop, take_first in itertools.product(
        kinds, POLICIES, (0, 1), STOPS, (False, True)
    ):
        run_count, ends = 0, Counter[str]()
        for at in itertools.count(asked.first, asked.every):
            try:
                told = play(transport, policy, side=side, stop=stop, at=at, take_first=take_first)
            except Exception as error:
                failures += 1
                print(f"  point {at}: {error!r}", flush=True)
                continue
            if told is None:
                break
            run_count, ends = run_count + 1, ends + told
        kind = f"{transport}, {policy}, {('prefill', 'decode')[side]} {stop}, take {take_first}"
        print(f"{kind}: {run_count} points before {at}: {dict(ends)}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
