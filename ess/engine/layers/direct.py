"""Layers of a decode step that run in one native call, where nothing between them needs Python.

That call (csrc/cpu/layer.cpp) repeats the order of `overlap`'s schedules `resident` and `none` for
a whole batch, over the same kernels and the same planner: tokens, slots and counts are the same
bits. These run by the schedules in Python: DA and DBA, halves, ranks that divide heads or experts,
windows, groups of several layers, verified layers, slots that give way by score, attention with
sinks, traces, and times of single stages by another clock.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ess.clock import RealClock
from ess.door.steps.direct import Direct
from ess.engine.layers.batch import Batch, compute_threads
from ess.engine.layers.heads import AllHeads, Heads
from ess.engine.step.tuning import Tuning
from ess.kernels.cpu import native, records
from ess.kernels.cpu.attend import FORMS, QUERY_FORMS, matrix, strides
from ess.kernels.cpu.layer import Layers, Part, Stop
from ess.kernels.cpu.stage import Stage, look_at_turns
from ess.kernels.cpu.step import Ints, Opened, opened
from ess.layout import ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.layers import RotaryPositions, Rotation
from ess.models.model import Model
from ess.overlap.policy import Mode

ROOM_MAX: Final = 4
TIMED: Final = (
    ("index", Part.FRONT),
    ("select", Part.SELECT),
    ("pre_attn", Part.ASK),
    ("attend_all", Part.ATTEND),
)


class DirectLayers:
    """It keeps the memory of the latest batch sizes, the oldest of which gives way."""

    def __init__(self, model: Model, tuning: Tuning, heads: Heads) -> None:
        self._model = model
        self._tuning = tuning
        self._is_whole = isinstance(heads, AllHeads) and tuning.sbo == "off"
        self._rooms: dict[int, CallMemory] = {}
        self._asked: tuple[Any, ...] = ()
        self._count = 0

    def count(self, batch: Batch, layers: Sequence[DecoderLayer]) -> int:
        """How many of these layers, from the first on, run in one call."""
        if not self._is_whole or not batch.ops.has_stages() or batch.course.splits:
            return 0
        timeline = self._tuning.timeline
        if timeline.keeps_spans or not isinstance(timeline.clock, RealClock):
            return 0
        if batch.offload.direct is None:
            return 0
        asked = batch.course.vector, batch.course.verified_layer, layers[0].number, len(layers)
        if asked != self._asked:
            self._asked, self._count = asked, self._counted(batch, layers)
        return self._count

    def _counted(self, batch: Batch, layers: Sequence[DecoderLayer]) -> int:
        vector, verified = batch.course.vector, batch.course.verified_layer
        for count, layer in enumerate(layers):
            number = layer.number
            if vector[number] > Mode.NONE or number == verified:
                return count
            if not _is_alike(batch.layout, layer):
                return count
        return len(layers)

    def run(self, batch: Batch, layers: Sequence[DecoderLayer], hidden: Tensor) -> Tensor:
        room = self._room(batch, layers, *hidden.shape)
        room.hidden.copy_(hidden)
        room.side.ending = None
        self._through(batch, layers, room)
        return room.hidden.clone()

    def decoded(self, batch: Batch, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """All layers and the model's ending in one call: finished hidden states, logits."""
        model = self._model
        hidden = model.embed(tokens)
        room = self._room(batch, model.layers, *hidden.shape)
        room.hidden.copy_(hidden)
        made = room.end_by(model.ending)
        self._through(batch, model.layers, room)
        return made

    def _through(self, batch: Batch, layers: Sequence[DecoderLayer], room: CallMemory) -> None:
        direct, which = batch.offload.direct, range(layers[0].number, layers[-1].number + 1)
        assert direct is not None, "a placement without direct layers"
        room.begin(batch, self._model.rotary)
        resident = [mode == Mode.RESIDENT for mode in batch.course.vector[which.start : which.stop]]
        direct.enter(batch.step, room.layers, which, resident=resident)
        at = room.layers.run(which, room.side, threads=compute_threads(), begins=True)
        while at < which.stop:
            resident[at - which.start] &= self._go_on(batch, direct, room.layers, at)
            at = room.layers.run(range(at, which.stop), room.side, threads=compute_threads())
        direct.leave(batch.step, room.layers, which, claimed_count=room.side.claimed_total)
        self._note(batch, room, which, resident)

    def _go_on(self, batch: Batch, direct: Direct, layers: Layers, layer: int) -> bool:
        """Takes what stopped this layer out of its way; whether it still runs as it was to run."""
        record: Any = layers.records[layer]
        part = Part(record.part - 1).name
        assert record.stop != Stop.REFUSED, f"layer {layer}: an id that is not there, in {part}"
        if record.stop == Stop.ABSENT:
            direct.resolve(layers, layer)
            return False
        direct.settle(batch.step, layers, layer)
        return True

    def _note(self, batch: Batch, room: CallMemory, which: range, resident: list[bool]) -> None:
        batch.step.wrote_each(which)
        if which.stop > batch.layout.layer_count:
            last = batch.layout.group_of(which.stop - 1)
            batch.selected[last] = {range(len(room.hidden)): room.selection}
        count, located_count = len(which), sum(resident)
        if located_count in (0, count):
            self._tuning.ran(
                slice(which.start, which.stop), Mode.RESIDENT if located_count else Mode.NONE
            )
        else:
            for layer, is_resident in zip(which, resident, strict=True):
                self._tuning.ran(layer, Mode.RESIDENT if is_resident else Mode.NONE)
        batch.warmth.counted(room.hits, count - located_count, located_count)
        timeline, side = self._tuning.timeline, room.side
        taken_ns = side.taken[:]
        for stage, part in TIMED:
            timeline.took(stage, count, taken_ns[part])
        if located_count < count:
            timeline.took("plan", count - located_count, side.planned_ns)

    def _room(
        self, batch: Batch, layers: Sequence[DecoderLayer], count: int, dim: int
    ) -> CallMemory:
        direct = batch.offload.direct
        assert direct is not None, "a placement without direct layers"
        room = self._rooms.pop(count, None) or CallMemory(batch, count, dim, tables=direct.tables)
        self._rooms[count] = room
        while len(self._rooms) > ROOM_MAX:
            self._rooms.pop(next(iter(self._rooms)))
        if not room.bound.issuperset(range(layers[0].number, layers[-1].number + 1)):
            for layer in layers:
                if layer.number not in room.bound:
                    room.bind(batch, layer)
                    direct.bind(room.layers, range(layer.number, layer.number + 1))
        return room


def _is_alike(layout: ModelLayout, layer: DecoderLayer) -> bool:
    return (
        len(layout.groups[layout.group_of(layer.number)]) == 1
        and layer.indexer is not None
        and not layer.window
        and not layer.is_divided
        and layer.mla.sinks is None
    )


@dataclass(frozen=True, slots=True, eq=False)
class BoundEnding:
    """An `ending` over this memory: its record, the sides that the record names, and shape and type
    of what it makes. The last two sides are the finished states and the logits."""

    ending: Stage
    record: Any
    sides: Any
    made: list[tuple[tuple[int, ...], torch.dtype]]


class CallMemory:
    """Memory for batches of `query_count` queries, and the records of layers over it. Each layer
    writes over what the layer before has passed between its parts; `hidden` goes through all."""

    def __init__(self, batch: Batch, query_count: int, hidden_dim: int, *, tables: Ints) -> None:
        """`tables` are the page tables of all lines."""
        self._top_k = batch.layout.top_k
        self.layers = Layers(batch.layout.layer_total)
        self.bound: set[int] = set()
        self.hits = np.zeros(query_count, np.int64)
        self.hidden = torch.empty(query_count, hidden_dim)
        cos, sin = torch.empty(2, *batch.rotation.cos.shape)
        self._rotation = Rotation(cos, sin, batch.rotation.positions)
        self.table = torch.empty(query_count, tables.shape[1], dtype=torch.int32)
        self.side: Any = records.StepSide(
            table=self.table.data_ptr(),
            table_width=tables.shape[1],
            table_stride=tables.shape[1],
            hits=native.address(self.hits),
            query_count=query_count,
        )
        self._opening: Any = records.Opening(
            *(native.address(tables), *tables.shape, 0, self.table.data_ptr()),
            *(0, 0, cos.shape[1], 0, cos.data_ptr(), sin.data_ptr(), query_count),
        )
        self._kept: Tensor | None = None
        self._tensors: dict[tuple[Any, ...], Tensor] = {}
        self._step: Any = None
        self._ending: BoundEnding | None = None

    def begin(self, batch: Batch, rotary: RotaryPositions) -> None:
        if self._step is batch.step:
            return
        self._step, step, side, at = batch.step, batch.step, self.side, native.address
        assert step.query_count == len(self.hits), f"{step!r} in a room of {len(self.hits)}"
        side.lines = self._opening.lines = at(step.query_line)
        self._opening.positions = at(step.positions)
        side.lengths, side.row_ids, side.number = at(step.query_stop), at(step.row_ids), step.now
        if rotary.kept is not self._kept:
            self._kept = rotary.kept
            self._opening.turns, self._opening.turn_count = self._kept.data_ptr(), len(self._kept)
        written = opened(self._opening)
        assert written != Opened.ASTRAY, f"{step!r}: a line that is not there"
        if written != Opened.ALL:
            self._rotation.cos.copy_(batch.rotation.cos)
            self._rotation.sin.copy_(batch.rotation.sin)

    def end_by(self, ending: Stage) -> tuple[Tensor, Tensor]:
        """The next call runs this behind its last layer, into new tensors: the caller keeps them
        for as long as it likes."""
        bound = self._ending
        if bound is None or bound.ending is not ending:
            bound = self._ending = self._bind_ending(ending)
        finished, logits = _new(bound.made)
        bound.sides[-2].base, bound.sides[-1].base = finished.data_ptr(), logits.data_ptr()
        self.side.ending = ctypes.addressof(bound.record)
        self.side.ending_sides = ctypes.addressof(bound.sides)
        return finished, logits

    def _bind_ending(self, ending: Stage) -> BoundEnding:
        made = ending.made(self._count)
        return BoundEnding(ending, *ending.bind([self.hidden], _new(made)), made)

    def bind(self, batch: Batch, layer: DecoderLayer) -> None:
        """Writes what stays the same, except what a placement knows."""
        compiled, layout = layer.compiled(batch.layout), batch.layout
        record: Any = self.layers.records[layer.number]
        front, ask, back = compiled.stages()
        fronts = [self._tensor(place, *made) for place, made in enumerate(front.made(self._count))]
        query, rows, queries, weights, keys = fronts
        turns = look_at_turns(self._rotation.cos, self._rotation.sin)
        [asked] = (self._tensor("asked", *made) for made in ask.made(self._count))
        codec = layout.row_of(layer.number)
        shape = self._count, asked.shape[1]
        out = self._tensor("out", (*shape, codec.latent_dim), torch.float32)
        lse = self._tensor("lse", shape, torch.float32)
        selection = self.selection
        located = self._tensor("located", (self._count, layout.top_k), torch.int32)
        self._stages(record, "front", front.bind([self.hidden], fronts, turns=turns))
        self._stages(record, "ask", ask.bind([query], [asked], turns=turns))
        self._stages(record, "back", back.bind([self.hidden, out], [self.hidden]))
        record.append.rows, record.append.keys = rows.data_ptr(), keys.data_ptr()
        record.number, record.top_k = layer.number, layout.top_k
        record.selection, record.located = selection.data_ptr(), located.data_ptr()
        record.index = _index(batch, layer.number, queries, weights)
        record.attend = _attend(batch, layer.number, asked, out, lse)
        self.layers.kept.append(compiled)
        self.bound.add(layer.number)

    @property
    def selection(self) -> Tensor:
        """The selection of the layer that ran last, until another layer runs."""
        return self._tensor("selection", (self._count, self._top_k), torch.int32)

    @property
    def _count(self) -> int:
        return len(self.hidden)

    def _stages(self, record: Any, name: str, bound: tuple[records.Stage, Any]) -> None:
        stage, sides = bound
        self.layers.kept += [stage, sides]
        setattr(record, name, ctypes.addressof(stage))
        setattr(record, f"{name}_sides", ctypes.addressof(sides))

    def _tensor(self, place: object, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of that name, shape and type: layers share it."""
        key = place, shape, dtype
        if key not in self._tensors:
            self._tensors[key] = torch.empty(shape, dtype=dtype)
        return self._tensors[key]


def _new(made: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape, dtype in made]


def _index(batch: Batch, layer: int, queries: Tensor, weights: Tensor) -> records.Index:
    codec, pages = batch.layout.index, batch.offload.memory(layer).key_pages
    assert codec is not None, "an indexer without an index codec"
    return records.Index(
        *(*queries.shape, FORMS[codec.form], QUERY_FORMS[queries.dtype], *strides(queries)),
        *(0, 0, matrix(pages), queries.data_ptr(), weights.data_ptr(), 0, 0),
    )


def _attend(batch: Batch, layer: int, queries: Tensor, out: Tensor, lse: Tensor) -> records.Attend:
    memory, codec = batch.offload.memory(layer), batch.layout.row_of(layer)
    return records.Attend(
        *(*queries.shape[:2], codec.latent_dim, codec.rope_dim),
        *(FORMS[codec.form], QUERY_FORMS[queries.dtype], *strides(queries), 0, 0, codec.plain_dim),
        *(matrix(memory.slots), matrix(memory.host)),
        *(queries.data_ptr(), 0, out.data_ptr(), lse.data_ptr(), batch.scale),
    )
