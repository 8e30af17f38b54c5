"""A replay as one page that needs no server: what happened over time, with offload and without."""

from __future__ import annotations

from typing import Any, Final

import ess
from ess.server.commands.planning.htmlfile import whole
from ess.sim.serving.comparison import Served
from ess.sim.serving.goodput import ttft_s
from ess.sim.serving.replay import Replay
from ess.sim.serving.replay_settings import Serving

POINTS_MAX: Final = 2000


def page(served: Served, replays: tuple[Replay, Replay], serving: Serving) -> str:
    """The whole page, self-contained."""
    return whole("sim", title="ESS sim", numbers=numbers_of(served, replays, serving))


def numbers_of(served: Served, replays: tuple[Replay, Replay], serving: Serving) -> dict[str, Any]:
    names = ("with offload", "resident")
    return {
        "about": f"ess {ess.__version__}. Simulated, {served.parallel.name}; a time per token "
        f"may be off by {100 * served.band[0]:+.0f} to {100 * served.band[1]:+.0f} %.",
        "gpus": served.gpu_count,
        "decoding": served.parallel.attention_tp,
        "objective": {"first_s": serving.objective.ttft_s, "token_s": serving.objective.tpot_s},
        "sides": [
            {"name": name, **_side(replayed)} for name, replayed in zip(names, replays, strict=True)
        ],
    }


def _side(replayed: Replay) -> dict[str, Any]:
    """The spans of the rank, and for each request its arrival and time to the first token."""
    served = [life for life in replayed.lives if life.end_s is not None]
    stride = -(-len(served) // POINTS_MAX) or 1
    return {
        "seconds": round(replayed.seconds, 3),
        "spans": [[round(value, 4) for value in span] for span in replayed.rank.lines.spans],
        "firsts": [
            [round(life.arrival.at_s, 3), round(ttft_s(life), 4)] for life in served[::stride]
        ],
    }
