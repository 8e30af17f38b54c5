"""The runner runs a model over an offload: decode batches and prompt chunks.

It owns the weights. Which schedule a layer runs, and whether the batch runs in two halves, is
decided per step by `tuning`. `on_layer` is called between the layers of a decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from ess.door import Offload, Step
from ess.engine.config import EngineConfig
from ess.engine.layers.attention import LayerStep
from ess.engine.layers.batch import Batch, Course, Places, back, ended
from ess.engine.layers.beside import Carried, beside_of
from ess.engine.layers.direct import DirectLayers
from ess.engine.layers.experts import ExpertStep
from ess.engine.layers.heads import AllHeads, Heads
from ess.engine.layers.verifier import Verifier
from ess.engine.ranks.standby import Standby
from ess.engine.step.half import Half, halves, whole
from ess.engine.step.tuning import Tuning
from ess.engine.step.warmth import hit_counter
from ess.engine.tokens.determinism import require_alike
from ess.kernels.backend import ops
from ess.kernels.merge import Partial
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.models.decoder import DecoderLayer
from ess.models.model import Model
from ess.overlap import sbo, tbo
from ess.overlap.da import da
from ess.overlap.dba import dba
from ess.overlap.none import none
from ess.overlap.policy import Mode, Vector
from ess.overlap.resident import resident
from ess.overlap.stages import Run, finish

Schedule = Callable[[Any], Run[Sequence[Partial]]]
SCHEDULES: Final[Mapping[Mode, Schedule]] = MappingProxyType(
    {Mode.RESIDENT: resident, Mode.NONE: none, Mode.DA: da, Mode.DBA: dba}
)


@dataclass(frozen=True, slots=True)
class Forward:
    """Logits (float32) and the finished hidden state of every query of a step."""

    logits: Tensor
    hidden: Tensor


@torch.inference_mode()
def pack_weights(model: Model, layout: ModelLayout, ops: Ops, *, has_endings: bool = True) -> None:
    """Makes the compiled stages now, each with its copy of the weights: the first step would
    wait for them, for seconds where memory comes slowly. Prompts alone need no endings."""
    if not ops.has_stages():
        return
    drafts = [model.mtp.layer] if model.mtp is not None and layout.mtp_layer_count else []
    for layer in (*model.layers, *drafts):
        if not layer.is_divided:
            layer.compiled(layout).stages()
    made = [model.ending] if has_endings and model.is_last else []  # each is made when read
    if model.mtp is not None and drafts:
        made += [model.mtp.join_stage, *([model.draft_ending] if has_endings else [])]


class Runner:
    def __init__(
        self,
        model: Model,
        offload: Offload,
        ops: Ops,
        *,
        tuning: Tuning,
        verifier: Verifier,
        heads: Heads,
        balanced: bool,
    ) -> None:
        """`balanced`: bits may follow from the batch, where that fills a device."""
        self.model = model
        self.offload = offload
        self.ops = ops
        self.verifier = verifier
        self.heads = heads
        self.tuning = tuning
        self.beside = beside_of(model.config, offload)
        self._balanced = balanced
        self._scale = model.config.attention_scale
        self._direct = DirectLayers(model, tuning, heads)
        self.on_layer: Callable[[], None] | None = None
        self._runs = layer_runs(model.layers, offload.layout)
        self.standby = Standby(model, self._runs, tuning.sbo, tuning.timeline)
        self._course: Course | None = None

    def course(self, step: Step, counts: tuple[int, ...], vector: Vector | None = None) -> Course:
        """Called once per step. Without a `vector` the policy chooses the modes. A half that only
        locates its rows does not hold them, and the other half may evict them; so a layer that
        would run RESIDENT runs NONE, whose plan holds its rows."""
        vector, layer_total = vector or self.tuning.vector(step), self.offload.layout.layer_total
        assert len(vector) == layer_total, f"{len(vector)} modes of {layer_total}"
        stopwatch = self.offload.stopwatch
        has_experts = any(can_split for can_split, _ in self._runs)
        splits = not self.tuning.reasons_whole(counts, vector, has_experts=has_experts)
        course = Course(
            counts=counts,
            queries_per_request=queries_per_request(step),
            vector=vector,
            verified_layer=self.verifier.layer_for(step.number, layer_total),
            splits=splits,
            is_timed=stopwatch is not None and stopwatch.is_on,
        )
        return self.settled(course, splits=splits)

    def settled(self, course: Course, *, splits: bool) -> Course:
        """The same course in two halves or whole, as all ranks have agreed."""
        vector = course.vector
        if splits:
            vector = tuple(max(mode, Mode.NONE) for mode in vector)
        if splits != course.splits:
            self.tuning.overrule(splits=splits)
        if vector is not course.vector or splits != course.splits:
            course = replace(course, vector=vector, splits=splits)
        self._course = course
        return course

    def batch(self, step: Step, course: Course | None = None) -> Batch:
        """On a device all tensors of the batch are made before any stream uses them."""
        rotate, on_cpu = self.model.rotation, self.model.device.type == "cpu"
        return Batch(
            offload=self.offload,
            step=step,
            course=course or self.course(step, step.query_counts),
            ops=self.ops,
            rotate=rotate,
            given=None if on_cpu else Places.of(step, rotate),
            scale=self._scale,
            warmth=hit_counter(step.query_stop, self.offload.layout),
            balanced=self._balanced,
            carried=None if self.beside is None else Carried.of_step(self.beside, step),
        )

    def decode(self, batch: Batch, tokens: Tensor) -> Forward:
        assert tokens.shape == (batch.step.query_count,), f"{len(tokens)} tokens for the queries"
        layers = self.model.layers
        if self.on_layer is None and self._direct.count(batch, layers) == len(layers):
            finished, logits = self._direct.decoded(batch, tokens)
            return Forward(logits, finished)
        return self.ended(batch, self.through(batch, self.model.embed(tokens)))

    def ended(self, batch: Batch, hidden: Tensor) -> Forward:
        finished, logits = ended(batch, self.model, hidden)
        return Forward(logits, finished)

    def through(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The hidden state after all main layers."""
        counts = batch.course.counts
        if not batch.course.splits:
            return self.layers(batch, self.model.layers, hidden)
        pair = halves(batch, tbo.first_half(counts) if len(counts) > 1 else 0)
        for can_split, layers in self._runs:
            if can_split:
                hidden = self._in_turn(pair, layers, hidden)
            else:
                hidden = self.layers(batch, layers, hidden)
        return hidden

    def layers(self, batch: Batch, layers: Sequence[DecoderLayer], hidden: Tensor) -> Tensor:
        """Runs these layers one after the other, for the whole batch."""
        while layers:
            count = self._direct.count(batch, layers) if self.on_layer is None else 0
            if count:
                hidden = self._direct.run(batch, layers[:count], hidden)
            else:
                hidden, count = finish(self._stages(whole(batch), layers[0], hidden)), 1
            layers = layers[count:]
        return hidden

    def layer(self, batch: Batch, layer: DecoderLayer, hidden: Tensor) -> Tensor:
        return self.layers(batch, [layer], hidden)

    def _in_turn(
        self, pair: tuple[Half | None, Half], layers: Sequence[DecoderLayer], hidden: Tensor
    ) -> Tensor:
        first, second = (
            self.standby.through(layers)
            if half is None
            else self._through(half, layers, hidden[half.queries.start : half.queries.stop])
            for half in pair
        )
        joined = torch.cat(tbo.interleave(first, second))
        assert len(joined) == len(hidden), f"{len(joined)} states of {len(hidden)}"
        return joined

    def _through(self, half: Half, layers: Sequence[DecoderLayer], hidden: Tensor) -> Run[Tensor]:
        for layer in layers:
            hidden = yield from self._stages(half, layer, hidden, in_stages=True)
            yield
        return hidden

    def _stages(
        self, half: Half, layer: DecoderLayer, hidden: Tensor, *, in_stages: bool = False
    ) -> Run[Tensor]:
        if self.on_layer is not None:
            self.on_layer()
        timeline = self.tuning.timeline
        if not layer.has_rows:
            assert half.batch.carried is not None, "a layer without rows, and no states"
            attended = half.batch.carried.through(layer, hidden)
            yield
        else:
            attended = yield from self._attended(half, layer, hidden, in_stages=in_stages)
        is_plain = self.tuning.sbo == "off" and not in_stages and not layer.is_divided
        if layer.experts is None or is_plain:
            return back(half.batch, layer, hidden, attended)
        output = layer.output(hidden, attended)
        experts = ExpertStep(
            layer,
            output,
            timeline,
            half.queries.start,
            part="half" if in_stages else "batch",
            lengths=half.batch.lengths,
        )
        yield from sbo.schedule(experts, self.tuning.sbo)
        return experts.result()

    def _attended(
        self, half: Half, layer: DecoderLayer, hidden: Tensor, *, in_stages: bool
    ) -> Run[Tensor]:
        course, timeline = half.batch.course, self.tuning.timeline
        mode = course.vector[layer.number]
        waits = mode <= Mode.NONE and not in_stages
        stages = LayerStep(half, layer, hidden, timeline, waits=waits)
        partials = yield from SCHEDULES[mode](stages)
        outs = [layer.mla.attended(partial) for partial in partials]
        assert sum(map(len, outs)) == len(hidden), f"layer {layer.number}: a query has no attention"
        attended = outs[0] if len(outs) == 1 else torch.cat(outs)
        self.tuning.ran(layer.number, stages.ran(mode))
        if course.verified_layer == layer.number:
            self.verifier.check(half.batch, stages, attended)
        return self.heads.joined(half.batch, layer, attended)

    def check(self) -> None:
        if self._course is not None:
            self._check_course(self._course)
        self.tuning.check()

    def _check_course(self, course: Course) -> None:
        layout, vector, verified = self.offload.layout, course.vector, course.verified_layer
        assert len(vector) == layout.layer_total, f"{len(vector)} modes"
        for group in layout.groups:
            modes = {vector[layer] for layer in group}
            assert len(modes) == 1, f"layers {group} share a selection and run as {modes}"
        assert verified is None or 0 <= verified < layout.layer_total, f"layer {verified}"
        assert not course.splits or Mode.RESIDENT not in vector, "a half would not hold its rows"


class Uncompiled(Ops):
    """For a model that has no compiled stages."""

    def has_stages(self) -> bool:
        return False


def made_runner(
    model: Model, offload: Offload, config: EngineConfig, heads: Heads | None = None
) -> Runner:
    """The runner that this configuration asks for."""
    computes = ops(config.backend)
    if not model.has_stages:
        computes = Uncompiled(computes.name, computes.backend)
    if config.deterministic:
        require_alike(computes, config.backend)
    is_there = model.device.type != "cpu"
    tuning = Tuning(
        offload,
        "none" if config.deterministic else config.modes,
        calibration=config.calibration,
        tbo=config.tbo,
        sbo=config.sbo,
        asks_first=is_there,
    )
    if config.nvtx and is_there:
        tuning.timeline.ranges = torch.cuda.nvtx
    return Runner(
        model,
        offload,
        computes,
        tuning=tuning,
        heads=heads or AllHeads(),
        verifier=Verifier(every=config.verify_every, is_fatal=config.verify_fatal),
        balanced=not config.deterministic,
    )


def queries_per_request(step: Step) -> int:
    """The number of queries, if all sequences of the step and its pads have equally many; else
    1."""
    counts = step.query_counts
    is_even = counts.count(counts[0]) == len(counts) and step.query_count % counts[0] == 0
    return counts[0] if is_even else 1


def layer_runs(
    layers: Sequence[DecoderLayer], layout: ModelLayout
) -> list[tuple[bool, list[DecoderLayer]]]:
    """Runs of consecutive layers, and whether two halves may run through each: layers with experts.
    A layer that shares the selection of its group's first layer shares its parts as well, so it
    goes with that layer."""
    runs: list[tuple[bool, list[DecoderLayer]]] = []
    for layer in layers:
        goes_on = bool(runs) and runs[-1][0]
        can_split = layer.experts is not None if _leads(layer, layout) else goes_on
        if not runs or can_split != goes_on:
            runs.append((can_split, []))
        runs[-1][1].append(layer)
    assert sum(len(run) for _, run in runs) == len(layers), "a layer is in no run"
    return runs


def _leads(layer: DecoderLayer, layout: ModelLayout) -> bool:
    """Whether it makes a selection of its own, or needs none."""
    if not layer.has_rows:
        return True
    return layout.groups[layout.group_of(layer.number)][0] == layer.number
