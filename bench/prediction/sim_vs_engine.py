"""The laboratory against the engine: the same selections must miss exactly the same rows.

An engine decodes and records each layer's selections; the trace is replayed through the planner on
an arena of the same size that was warmed and filled in the same way. The replay knows nothing of
rejected drafts and need not: each leaves a free slot, which the next step's own row of the same
position is the first to claim. The arena must hold a step's whole selection, or rows are read in
place, which the engine does not count as misses.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ess.bench.engine.arms.around import WrappedPlacement
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork, slots_each
from ess.bench.harness.output.agreement import agreement
from ess.bench.harness.prefix import Prefix
from ess.bench.harness.report import Row
from ess.door import Sequence, Step
from ess.door.steps.placement import Array, Kept
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.sim.locality.policies import PlannerArena
from ess.sim.locality.workloads import recorded
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceWriter


class Recording(WrappedPlacement):
    """One request in NONE, whose selections go to `writer` once it is set."""

    writer: TraceWriter | None = None
    windows: npt.NDArray[np.int32]
    start: int

    def warm(self, sequence: Sequence, windows: Array) -> None:
        self.windows, self.start = windows.copy(), sequence.length
        self.slots.warm(sequence, windows)

    def before_resolve(self, step: Step, group: int, queries: range, selection: Array) -> None:
        if self.writer is not None:
            self.writer.write_group(group, selection)

    def seal(self, step: Step, accepted: Kept) -> None:
        if self.writer is not None:
            seen = RequestStep(
                request=0,
                length=int(step.query_start[0]),
                query_count=step.query_count,
                accepted=int(accepted[0]),
            )
            self.writer.commit_step(step.number, [seen])
        self.slots.seal(step, accepted)


def least_slots(layout: ModelLayout, mtp: int) -> int:
    """The most rows that one step may select and write."""
    return mtp * (layout.top_k + 1)


def twin_row(prefix: Prefix, *, ratio: float, mtp: int, steps: int) -> Row:
    shape = DecodeWork(context=prefix.length, batch=1, mtp=mtp, steps=steps)
    if slots_each(shape, ratio) < least_slots(prefix.layout, mtp):
        raise BadInput(f"ratio {ratio:g} of {prefix.length} tokens is less than a step selects")
    recording, way = Recording(), DecodeWay(name="recorded", mode="none", ratio=ratio)
    arm = DecodeArm(prefix, shape, way, placement=recording.over)
    header = TraceHeader(
        layout=prefix.layout.name,
        group_count=prefix.layout.group_count,
        top_k=prefix.layout.top_k,
        mtp=mtp,
        context=shape.length_max,
    )
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "engine.trace"
        with TraceWriter(path, header=header) as recording.writer:
            for _ in range(steps):
                arm.step()
        slots = int(arm.offload.stats().slot_count[0])
        with TraceReader(path) as reader:
            groups = range(header.group_count)
            replayed = [_replay(reader, group, recording, slots) for group in groups]
    arm.close()
    missed = np.array(arm.taken.misses).sum(axis=0)
    return _row(missed, replayed, shape, slots)


def _replay(reader: TraceReader, group: int, recording: Recording, slots: int) -> int:
    """Replays an arena warmed by the windows, then filled with absent rows as the door does."""
    load = dataclasses.replace(recorded(reader, group=group), windows=recording.windows[group])
    arena = PlannerArena(load, slots=slots, top_k=reader.header.top_k)
    arena.warm(load.windows)
    rows = np.arange(recording.start, dtype=np.int32)
    arena.fill(rows[~arena.resident()[: recording.start]])
    return sum(arena.access(step).size for step in load.steps())


def _row(missed: npt.NDArray[np.int64], replayed: list[int], shape: DecodeWork, slots: int) -> Row:
    return agreement(
        name="misses of the engine, replayed by the laboratory",
        unit="rows",
        ours=sum(replayed),
        published=("engine", float(missed.sum())),
        tolerance=0.0,
        config={
            "ctx": shape.context,
            "slots": slots,
            "steps": shape.steps,
            "by_layer": " ".join(
                f"{ours}/{theirs}" for ours, theirs in zip(replayed, missed.tolist(), strict=True)
            ),
        },
    )
