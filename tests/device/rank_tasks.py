"""What each rank is to do, and what a single process says of it."""

from __future__ import annotations

import functools
from typing import Final

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.support.checkpoints import tokens

Task = tuple[int, int, int] | tuple[int, int, int, dict]
"""The step in which it comes, its prompt's length, how many tokens it is to make, how it draws."""

TASKS: Final[dict[str, tuple[Task, ...]]] = {
    "busy": ((0, 130, 8), (0, 2, 12, {"temperature": 0.9, "seed": 5}), (5, 100, 4)),
    "late": ((3, 64, 8), (5, 1, 5, {"temperature": 1.1, "seed": 2})),
    "picky": ((2, 70, 6, {"presence_penalty": 0.7, "logit_bias": {5: 2.0}}), (4, 3, 5)),
    "idle": (),
    "steady": ((0, 2, 16),),
    "comes and goes": ((4, 1, 2), (9, 2, 2)),
}
"""Of each rank's day. The host changes logits of a picky one, so its steps run eagerly."""


def added(engine: Engine, task: Task) -> Request:
    _, length, count, *more = task
    sampling = Sampling(tokens_max=count, ignore_eos=True, **(more[0] if more else {}))
    return engine.add(tokens(length, engines.VOCABULARY, seed=length), sampling)


@functools.cache
def alone(family: str) -> Engine:
    return engines.engine("cpu", family=family)


@functools.cache
def expected(family: str, name: str) -> list[list[int]]:
    engine = alone(family)
    requests = [added(engine, task) for task in TASKS[name]]
    while not engine.is_idle:
        engine.step()
    return [request.output for request in requests]
