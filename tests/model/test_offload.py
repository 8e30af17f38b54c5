"""The real pools against the dictionary of `world.py`: seeds for volume, Hypothesis to shrink."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import integers, sampled_from

from ess.flashtrans import InlineLane, WorkerLane
from tests.model.world import GROUPED, SINGLE, WEIGHTS, World


def drive(world: World, operation_count: int) -> World:
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(operation_count):
        getattr(world, world.random.choices(names, weights)[0])()
        world.check()
    world.finish()
    return world


@pytest.mark.parametrize("layout", [SINGLE, GROUPED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seed", range(2))
def test_pools_agree_with_the_dictionary(layout, seed):
    drive(World(layout, seed), 250)


@pytest.mark.parametrize("lane", [InlineLane, WorkerLane])
def test_on_the_real_lanes(lane):
    drive(World(GROUPED, 77, lane=lane()), 250)


@pytest.mark.slow
@pytest.mark.long
def test_fifty_thousand_operations():
    worlds = [
        drive(World(layout, 1000 + seed), 500) for seed in range(50) for layout in (SINGLE, GROUPED)
    ]
    stats = [world.offload.stats() for world in worlds]
    assert min(s.hit_count.sum() for s in stats) > 0
    assert sum(s.place_count.sum() for s in stats) > 1000, "rows in place were hardly tested"
    assert sum(s.evicted_count.sum() for s in stats) > 10_000, "evictions were hardly tested"
    assert sum(world.reused_count for world in worlds) > 100, "prefix hits were hardly tested"
    assert sum(world.late_count for world in worlds) > 1000, "late learning was hardly tested"


class OffloadMachine(RuleBasedStateMachine):
    """The same operations, chosen by Hypothesis so that a failure shrinks to a few calls."""

    @initialize(layout=sampled_from([SINGLE, GROUPED]), seed=integers(0, 2**16))
    def start(self, layout, seed):
        self.world = World(layout, seed)

    @rule()
    def open(self):
        self.world.open()

    @precondition(lambda self: self.world.active)
    @rule(name=sampled_from([name for name in WEIGHTS if name not in ("open", "resume")]))
    def act(self, name):
        getattr(self.world, name)()

    @precondition(lambda self: self.world.preempted)
    @rule()
    def resume(self):
        self.world.resume()

    @invariant()
    def audit(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


OffloadMachine.TestCase.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
test_machine = OffloadMachine.TestCase
