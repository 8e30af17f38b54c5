"""The real pools against the dictionary of `world.py`, by seeds for volume."""

from __future__ import annotations

import pytest

from tests.model.world import GROUPED, SINGLE, WEIGHTS, World


def drive(world: World, operation_count: int) -> None:
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(operation_count):
        getattr(world, world.random.choices(names, weights)[0])()
        world.check()
    world.finish()


@pytest.mark.parametrize("layout", [SINGLE, GROUPED], ids=lambda layout: layout.name)
@pytest.mark.parametrize("seed", range(3))
def test_pools_agree_with_the_dictionary(layout, seed):
    drive(World(layout, seed), 150)
