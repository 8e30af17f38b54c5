"""The native planner against its specification, by calls that Hypothesis draws and shrinks."""

from __future__ import annotations

import numpy as np
import pytest

from ess.pool.lru import specification
from ess.pool.lru.eviction import POLICIES
from tests.support.built import needs_native
from tests.support.twins import Twins, ids

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
stateful = pytest.importorskip("hypothesis.stateful")
st = hypothesis.strategies

pytestmark = needs_native


class TwinsMachine(stateful.RuleBasedStateMachine):
    """Hypothesis chooses the calls and shrinks what fails."""

    rows = st.lists(st.integers(-1, 200), min_size=12, max_size=12)
    group = st.integers(0, 1)

    @stateful.initialize(blocks=st.sampled_from([(1, 1), (2, 1)]), evict=st.sampled_from(POLICIES))
    def begin(self, blocks, evict):
        self.twins = Twins(blocks, evict)

    @stateful.rule(passed=st.sampled_from([1, 2, 254, 300]))
    def next_step(self, passed):
        self.twins.step += passed

    @stateful.rule(group=group, queries=st.lists(rows, min_size=1, max_size=6))
    def plan(self, group, queries):
        self.twins.fetch("plan", group, ids(queries))

    @stateful.rule(group=group, first=st.integers(0, 150))
    def plan_wide(self, group, first):
        self.twins.fetch("plan", group, ids([range(first, first + 100)]))

    @stateful.rule(group=group, rows=st.sets(st.integers(0, 200), max_size=9))
    def write(self, group, rows):
        self.twins.write(group, ids(list(rows)))

    @stateful.rule(group=group)
    def settle(self, group):
        self.twins.settle(group)

    @stateful.rule(group=group, rows=st.sets(st.integers(0, 200), max_size=70))
    def fill(self, group, rows):
        self.twins.fetch("fill", group, ids(list(rows)))

    @stateful.rule(
        group=group, rows=st.dictionaries(st.integers(0, 200), st.integers(1, 300), max_size=20)
    )
    def warm(self, group, rows):
        self.twins.fetch("warm", group, ids(list(rows)), ids(sorted(rows.values())))

    @stateful.rule(
        group=group,
        chosen=st.sets(st.integers(0, 199), min_size=1, max_size=9),
        seed=st.integers(0, 9),
    )
    def observe(self, group, chosen, seed):
        if self.twins.evict == "score":
            logits = np.random.default_rng(seed).normal(size=(1, 256)).astype(np.float32)
            given = ids([range(4)]), [0], ids([200]), ids([sorted(chosen)])
            self.twins.score(group, *given, logits)

    @stateful.rule(at=st.integers(0, 9))
    def land(self, at):
        if self.twins.flying:
            self.twins.land(at % len(self.twins.flying))

    @stateful.rule(group=group, page=st.integers(0, 3))
    def drop(self, group, page):
        self.twins.both("drop", group, ids(range(page * 64, page * 64 + 64)))

    @stateful.rule(source=group, which=st.integers(0, 2))
    def move_block(self, source, which):
        self.twins.move_block(source, 1 - source, which)

    @stateful.invariant()
    def sound(self):
        for arena in self.twins.arenas if hasattr(self, "twins") else ():
            specification.check(arena, step=self.twins.step)


TwinsMachine.TestCase.settings = hypothesis.settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
TestTwins = TwinsMachine.TestCase
