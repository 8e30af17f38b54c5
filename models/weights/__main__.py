"""`python -m ess.models.weights --dry-run CONFIG.json [--tp N --ep N]`: the plan of a model."""

from __future__ import annotations

import argparse
import sys

from ess.errors import EssError
from ess.models.weights.expected.dry_run import make_plan, plan_lines, read_config
from ess.units import parse_size


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ess.models.weights", description=__doc__)
    parser.add_argument(
        "--dry-run",
        required=True,
        metavar="CONFIG",
        help="a config.json, or deepseek-v3.2 or glm-5.2",
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--ep", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--no-mtp", action="store_true", help="leave the MTP layer out")
    parser.add_argument("--ctx", default="128k", help="tokens of one context (128k)")
    parser.add_argument("--device", default="139GiB", help="memory of one device (139GiB)")
    chosen = parser.parse_args(arguments)
    try:
        config = read_config(chosen.dry_run)
        plan = make_plan(config, tp=chosen.tp, ep=chosen.ep, mtp=not chosen.no_mtp)
        context, device_bytes = parse_size(chosen.ctx), parse_size(chosen.device)
        print(*plan_lines(plan, context=context, device_bytes=device_bytes), sep="\n")
    except EssError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
