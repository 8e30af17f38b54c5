"""What live counters and clocks decide in a served engine, decided here by a seed at every turn."""

from __future__ import annotations

import dataclasses
import random
from typing import Final

from ess.door import Step
from ess.engine.engine import Engine
from ess.overlap.policy import Mode, Vector

LEARN: Final = 0.1
STAY: Final = 0.5


class Drift:
    """The modes of the layers, the tokens that a step verifies, how many requests run and how long
    a chunk is; now and then all steps under way are learned, as in front of a pause."""

    def __init__(self, engine: Engine, *, seed: int, cuts_chunks: bool) -> None:
        self._engine = engine
        self._draw = random.Random(seed)
        self._cuts_chunks = cuts_chunks
        self._most = engine.pace
        self._vector: Vector = ()
        self._wanted = engine.tuning._wanted
        engine.tuning._wanted = self._modes

    def turn(self) -> None:
        most, draw = self._most, self._draw
        self._engine._flights.pace = dataclasses.replace(
            self._engine.pace,
            depth=draw.randint(1, most.verified_max),
            batch_max=draw.randint(1, most.batch_max),
            chunk_max=draw.randint(1, most.chunk_max) if self._cuts_chunks else most.chunk_max,
        )
        if draw.random() < LEARN:
            self._engine.learn()

    def _modes(self, step: Step) -> Vector:
        """Layers that share a selection share a mode."""
        self._wanted(step)
        if not self._vector or self._draw.random() > STAY:
            layout = self._engine.offload.layout
            of_group = self._draw.choices([*Mode], k=len(layout.groups))
            layers = range(layout.layer_total)
            self._vector = tuple(of_group[layout.group_of(layer)] for layer in layers)
        return self._vector
