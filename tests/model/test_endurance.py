"""Ten thousand requests: nothing that a step looks at grows with the number of those that ended."""

from __future__ import annotations

import gc
import resource
import sys
from types import FunctionType, ModuleType

import numpy as np
import pytest
import torch

from ess.engine.tokens.sampling import Sampling
from tests.model.test_engine import engine, expected, prompt, run

OPAQUE = (type, ModuleType, FunctionType, np.ndarray, torch.Tensor, torch.nn.Module, str, int)


def items_held(root) -> int:
    """Items of all containers that can be reached from `root`, whatever the attribute is called."""
    seen, todo, count = set(), [root], 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, OPAQUE):
            continue
        seen.add(id(one))
        count += len(one) if hasattr(one, "__len__") else 0
        todo.extend(gc.get_referents(one))
    return count


def feed(eng, count: int, *, seed: int) -> list[int]:
    """Requests of a token or two, a few cancelled; returns the sizes seen on the way."""
    sizes, made = [], []
    for number in range(count):
        made.append(eng.add(prompt(1 + (number + seed) % 3), Sampling(tokens_max=1 + number % 2)))
        if number % 50 == 7:
            eng.cancel(made[-1])
        if len(made) == 16:
            for _ in eng.run():
                pass
            assert all(request.reason in ("length", "cancelled") for request in made)
            made.clear()
        if number % 500 == 499:
            eng.offload.drain()
            sizes.append(items_held(eng))
    return sizes


def calls_made(eng, count: int) -> int:
    """How many functions, of Python and of C, the same requests call: work, not time."""
    made = 0

    def count_calls(_frame, event: str, _argument) -> None:
        nonlocal made
        made += event in ("call", "c_call")

    sys.setprofile(count_calls)
    try:
        feed(eng, count, seed=0)
    finally:
        sys.setprofile(None)
    return made


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("depth", [0, 1])
def test_ten_thousand_short_requests(depth):
    eng = engine("v32", modes="none", depth=depth, budget_every=0)
    feed(eng, 1000, seed=0)
    first_calls = calls_made(eng, 96)
    gc.collect()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = feed(eng, 9000, seed=1)
    gc.collect()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    half = len(sizes) // 2
    assert max(sizes[half:]) - max(sizes[:half]) <= 16, f"containers grew: {sizes}"
    assert calls_made(eng, 96) <= 1.05 * first_calls
    assert grown_kib < 8 * 1024, f"resident memory grew by {grown_kib} KiB"
    last = eng.add(prompt(90), Sampling(tokens_max=10))
    run(eng)
    assert last.output == expected("v32", 90, 10)
    for account in ("slots", "host pages", "index pages"):
        assert eng.offload._pools.ledger.promised(account) == 0


def test_two_hundred_short_requests_leave_nothing():
    eng = engine("v32", modes="none", depth=1, budget_every=0)
    feed(eng, 40, seed=0)
    calls, sizes = [], []
    for _ in range(2):
        calls.append(calls_made(eng, 80))
        sizes.append(items_held(eng))
    assert sizes[1] <= sizes[0] + 16
    assert calls[1] <= 1.05 * calls[0]
    run(eng)


def test_a_crowd_that_waits_is_not_asked_every_step():
    eng = engine("v32", modes="none", host_pages=6)
    for _ in range(12):
        eng.add(prompt(70), Sampling(tokens_max=20))
    asked = 0
    opened = eng.offload.open

    def counted(*args, **kwargs):
        nonlocal asked
        asked += 1
        return opened(*args, **kwargs)

    eng.offload.open = counted
    run(eng)
    assert asked <= 12 + 12, "one asks once, and once more when another has left"
