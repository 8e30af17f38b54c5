"""A model's tensors, bytes and memory from its configuration alone, no weights needed.

Weights are counted as the release stores them: fp8 blocks with f32 scales and f32 norms if the
configuration announces fp8, bf16 throughout if not; the gate's correction is f32 in both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ess.errors import BadInput, reason_of
from ess.layout import ModelLayout
from ess.models.compressed import memory as entries
from ess.models.compressed.gain import Machine, gain
from ess.models.compressed.memory import Needs
from ess.models.config import ModelConfig
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.shapes import Spec, expected_tensors, scale_shape
from ess.models.weights.expected.split import Split
from ess.models.weights.files.folder import JSON_BYTES_MAX
from ess.models.weights.files.strict_json import parse_object
from ess.models.weights.stored import stores_fp8
from ess.pool.capacity import needs, page_count, request_bytes
from ess.units import PAGE_ROWS, align_up, div_ceil, format_bytes

PUBLISHED: Final = (
    *("deepseek-v3.2", "glm-5.2", "a.x-k2-light", "hy4-preview", "mistral-large-4"),
    *("dots3-note", "deepseek-v4-flash", "glm-5.3-flash"),
)
_BF16_BYTES: Final = 2
_F32_BYTES: Final = 4
_NUMBER_BYTES: Final = 8
FP4_BLOCK: Final = 32  # values of four bits that share a scale of a byte


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Tensors (scales included), values and bytes; `bf16_bytes` after dequantisation."""

    tensors: int = 0
    values: int = 0
    bytes: int = 0
    bf16_bytes: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            tensors=self.tensors + other.tensors,
            values=self.values + other.values,
            bytes=self.bytes + other.bytes,
            bf16_bytes=self.bf16_bytes + other.bf16_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPlan:
    """What a checkpoint holds, what one rank holds of it, and how rows and keys are laid out."""

    config: ModelConfig
    split: Split
    whole: Count
    rank: Count

    @property
    def layout(self) -> ModelLayout:
        return self.config.layout()


def read_config(path: str) -> dict[str, Any]:
    """A config.json by its path, or a published config by its name ("deepseek-v3.2", ...)."""
    if path in PUBLISHED:
        text = (files("ess.models") / "configs" / f"{path}.json").read_text()
        return dict(json.loads(text))
    try:
        with Path(path).open("rb") as file:
            raw = file.read(JSON_BYTES_MAX)
    except (OSError, ValueError) as error:
        known = ", ".join(PUBLISHED)
        raise BadInput(
            f"{path} cannot be read ({reason_of(error)}); published by name: {known}"
        ) from None
    return parse_object(raw, what=path)


def make_plan(
    raw: Mapping[str, Any], *, tp: int = 1, ep: int = 1, mtp: bool = True
) -> CheckpointPlan:
    config, fp8 = parse_config(raw), stores_fp8(raw)
    if not mtp:
        config = config.without_mtp()
    split = Split(tp=tp, ep=ep)
    split.check(config)
    specs = [spec for spec in expected_tensors(config) if math.prod(spec.shape)]
    held = [spec for spec in specs if split.holds(spec, expert_count=config.expert_count)]
    return CheckpointPlan(
        config=config,
        split=split,
        whole=sum((_count(config, spec, Split(), fp8=fp8) for spec in specs), Count()),
        rank=sum((_count(config, spec, split, fp8=fp8) for spec in held), Count()),
    )


def _count(config: ModelConfig, spec: Spec, split: Split, *, fp8: bool) -> Count:
    blocked = fp8 and spec.role == "linear"
    window = split.window(spec, blocked=blocked)
    shape = spec.shape if window is None else window.shape(spec.shape)
    values = math.prod(shape)
    own = config.compressed
    if own is not None and own.expert_dtype == "fp4" and spec.expert is not None:
        scales = div_ceil(values, FP4_BLOCK)
        return Count(
            tensors=2,
            values=values + scales,
            bytes=div_ceil(values, 2) + scales,
            bf16_bytes=values * _BF16_BYTES,
        )
    if blocked:
        scales = math.prod(scale_shape(shape))
        return Count(
            tensors=2,
            values=values + scales,
            bytes=values + scales * _F32_BYTES,
            bf16_bytes=values * _BF16_BYTES,
        )
    is_f32 = spec.role == "correction" or (spec.role == "norm" and fp8)
    count = values * (_F32_BYTES if is_f32 else _BF16_BYTES)
    if spec.role == "numbers":
        count = values * _NUMBER_BYTES
    return Count(tensors=1, values=values, bytes=count, bf16_bytes=count)


def plan_lines(plan: CheckpointPlan, *, context: int, device_bytes: int) -> list[str]:
    """The plan for people."""
    if context < 1 or device_bytes < 1:
        raise BadInput(f"a context of {context} tokens on {device_bytes} bytes is not a plan")
    lines = _memory_lines if plan.config.compressed is None else _entry_lines
    return [*_weight_lines(plan), *lines(plan, context=context, device_bytes=device_bytes)]


def _weight_lines(plan: CheckpointPlan) -> list[str]:
    config, split = plan.config, plan.split
    indexed = sum(map(config.has_indexer, range(config.layer_total)))
    return [
        f"model      {config.family}, {config.layer_count} layers + {config.mtp_layer_count}"
        f" MTP, {indexed} indexers, {config.expert_count} routed experts",
        f"tensors    {plan.whole.tensors:,}",
        f"values     {plan.whole.values:,}",
        f"bytes      {plan.whole.bytes:,} ({format_bytes(plan.whole.bytes)})",
        f"per rank   tp {split.tp}, ep {split.ep}: {plan.rank.tensors:,} tensors,"
        f" {plan.rank.bytes:,} bytes ({format_bytes(plan.rank.bytes)})"
        f" as stored, {format_bytes(plan.rank.bf16_bytes)} as bf16",
    ]


def _rows(layout: ModelLayout) -> str:
    """How many rows of each size."""
    sizes = layout.layer_bytes(range(layout.layer_total))
    counts = [(sizes.count(size), size) for size in layout.row_sizes[::-1]]
    return ", ".join(f"{count} rows of {size}" for count, size in counts)


def request_needs(config: ModelConfig, *, tokens: int) -> Needs:
    """Host and device bytes of one request, at the slot floor and with everything resident."""
    if config.compressed is not None:
        return entries.needs(config, tokens=tokens)
    layout, state = config.layout(), config.states.byte_count
    floor_bytes, resident_bytes = (
        request_bytes(layout, needs(tokens, slots=count, window_floor=layout.window_floor))
        for count in (min(tokens, layout.slot_floor), align_up(tokens, PAGE_ROWS))
    )
    return Needs(
        host=page_count(tokens) * layout.host_page_bytes,
        offloaded=floor_bytes + state,
        resident=resident_bytes + state,
        state=state,
    )


def _memory_lines(plan: CheckpointPlan, *, context: int, device_bytes: int) -> list[str]:
    layout = plan.layout
    assert layout.index is not None, "both families have an indexer"
    slots, asked = min(context, layout.slot_floor), request_needs(plan.config, tokens=context)
    stateful = len({field.layer for field in plan.config.states.fields})
    state = f"state      {asked.state:,} bytes a request, in {stateful} layers"
    unit = f" for {layout.select_unit} tokens" if layout.select_unit > 1 else ""
    windows = f" ({layout.window_floor:,} for a window)" if layout.window_floor else ""
    return [
        f"per token  {_rows(layout)} bytes,"
        f" {layout.key_layer_count} index keys of {layout.index.key_bytes} bytes{unit}",
        *([state] if asked.state else []),
        f"context    {context:,} tokens: host {format_bytes(asked.host)};"
        f" device {format_bytes(asked.offloaded)} at the floor of {slots:,} slots a group{windows},"
        f" {format_bytes(asked.resident)} with every row resident",
        *_room_lines(plan, device_bytes, asked.offloaded, asked.resident),
    ]


def _room_lines(
    plan: CheckpointPlan, device_bytes: int, floor_bytes: int, resident_bytes: int
) -> list[str]:
    room_bytes = device_bytes - plan.rank.bytes
    if room_bytes <= 0:
        return [f"device     {format_bytes(device_bytes)} do not hold the weights of a rank"]
    return [
        f"device     {format_bytes(device_bytes)} - weights = {format_bytes(room_bytes)}:"
        f" {room_bytes // floor_bytes:,} such contexts at the floor,"
        f" {room_bytes // resident_bytes:,} resident (before activations)"
    ]


def _entry_lines(plan: CheckpointPlan, *, context: int, device_bytes: int) -> list[str]:
    """Lines for a model that attends to entries of several tokens."""
    config, row = plan.config, entries.entry_bytes(plan.config)
    own, asked = entries.compressed(config), entries.needs(config, tokens=context)
    sparse, heavy = (own.kinds.count(kind) for kind in ("sparse", "heavy"))
    return [
        f"entries    {row} bytes: of {own.sparse_rate} tokens in {sparse} layers, with an index key"
        f" of {config.index_dim + entries.KEY_SCALE_BYTES} bytes; of {own.heavy_rate} in {heavy}",
        f"state      {asked.state:,} bytes a request, with {own.window} rows of {row} bytes in each"
        " layer",
        f"context    {context:,} tokens: host {format_bytes(asked.host)};"
        f" device {format_bytes(asked.offloaded)} with {entries.SLOTS:,} slots a layer,"
        f" {format_bytes(asked.resident)} with every entry resident",
        *_room_lines(plan, device_bytes, asked.offloaded, asked.resident),
        *_gain_lines(plan, context, device_bytes - plan.rank.bytes, asked.resident),
    ]


def _gain_lines(
    plan: CheckpointPlan, context: int, room_bytes: int, resident_bytes: int
) -> list[str]:
    if room_bytes < resident_bytes:
        return []
    machine = Machine(room_bytes=room_bytes, weight_bytes=plan.rank.bytes)
    gains = gain(plan.config, machine, tokens=context)
    return [
        f"offload    by bytes alone: {gains.at(0):.2f} times the tokens a second of a resident"
        f" batch if no entry is missing, {gains.at(0.05):.2f} if one in twenty is; it pays below"
        f" {min(1.0, max(0.0, gains.break_even)):.0%} (no operator of this family is measured)"
    ]
