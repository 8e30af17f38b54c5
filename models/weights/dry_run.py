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

import msgspec

from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.config import ModelConfig
from ess.models.registry import read_config as parse_config
from ess.models.weights.folder import JSON_BYTES_MAX
from ess.models.weights.shapes import Spec, expected_tensors, scale_shape
from ess.models.weights.split import Split
from ess.models.weights.stored import stores_fp8
from ess.models.weights.strict_json import parse_object
from ess.pool.capacity import needs, page_count, request_bytes
from ess.units import PAGE_ROWS, align_up, format_bytes

PUBLISHED: Final = (
    *("deepseek-v3.2", "glm-5.2", "a.x-k2-light", "hy4-preview", "mistral-large-4"),
    "dots3-note",
)
_BF16_BYTES: Final = 2
_F32_BYTES: Final = 4


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
class Plan:
    """What a checkpoint holds, what one rank holds of it, and how rows and keys are laid out."""

    config: ModelConfig
    split: Split
    whole: Count
    rank: Count
    layout: ModelLayout


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
        raise BadInput(f"{path} cannot be read ({error}); published by name: {known}") from None
    return parse_object(raw, what=path)


def make_plan(raw: Mapping[str, Any], *, tp: int = 1, ep: int = 1, mtp: bool = True) -> Plan:
    config, fp8 = parse_config(raw), stores_fp8(raw)
    if not mtp:
        config = msgspec.structs.replace(config, mtp_layer_count=0)
    split = Split(tp=tp, ep=ep)
    split.check(config)
    specs = [spec for spec in expected_tensors(config) if math.prod(spec.shape)]
    held = [spec for spec in specs if split.holds(spec, expert_count=config.expert_count)]
    return Plan(
        config=config,
        split=split,
        whole=sum((_count(spec, Split(), fp8=fp8) for spec in specs), Count()),
        rank=sum((_count(spec, split, fp8=fp8) for spec in held), Count()),
        layout=config.layout(),
    )


def _count(spec: Spec, split: Split, *, fp8: bool) -> Count:
    blocked = fp8 and spec.role == "linear"
    window = split.window(spec, blocked=blocked)
    shape = spec.shape if window is None else window.shape(spec.shape)
    values = math.prod(shape)
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
    return Count(tensors=1, values=values, bytes=count, bf16_bytes=count)


def plan_lines(plan: Plan, *, context: int, device_bytes: int) -> list[str]:
    """The plan for people."""
    if context < 1 or device_bytes < 1:
        raise BadInput(f"a context of {context} tokens on {device_bytes} bytes is not a plan")
    return [*_weight_lines(plan), *_memory_lines(plan, context=context, device_bytes=device_bytes)]


def _weight_lines(plan: Plan) -> list[str]:
    config, split = plan.config, plan.split
    indexed = sum(map(config.has_indexer, range(config.layer_total)))
    return [
        f"model      {config.family}, {config.layer_count} layers + {plan.layout.mtp_layer_count}"
        f" MTP, {indexed} indexers, {config.expert_count} routed experts",
        f"tensors    {plan.whole.tensors:,}",
        f"values     {plan.whole.values:,}",
        f"bytes      {plan.whole.bytes:,} ({format_bytes(plan.whole.bytes)})",
        f"per rank   tp {split.tp}, ep {split.ep}: {plan.rank.tensors:,} tensors,"
        f" {plan.rank.bytes:,} bytes ({format_bytes(plan.rank.bytes)})"
        f" as stored, {format_bytes(plan.rank.bf16_bytes)} as bf16",
    ]


def _memory_lines(plan: Plan, *, context: int, device_bytes: int) -> list[str]:
    layout = plan.layout
    assert layout.index is not None, "both families have an indexer"
    slots = min(context, layout.slot_floor)
    host_bytes = page_count(context) * layout.host_page_bytes
    floor_bytes = request_bytes(layout, needs(context, slots=slots))
    resident_bytes = request_bytes(layout, needs(context, slots=align_up(context, PAGE_ROWS)))
    room_bytes = device_bytes - plan.rank.bytes
    lines = [
        f"per token  {layout.layer_total} rows of {layout.row_bytes} bytes,"
        f" {layout.key_layer_count} index keys of {layout.index.key_bytes} bytes",
        f"context    {context:,} tokens: host {format_bytes(host_bytes)};"
        f" device {format_bytes(floor_bytes)} at the floor of {slots:,} slots a group,"
        f" {format_bytes(resident_bytes)} with every row resident",
    ]
    if room_bytes <= 0:
        lines.append(f"device     {format_bytes(device_bytes)} do not hold the weights of a rank")
    else:
        lines.append(
            f"device     {format_bytes(device_bytes)} - weights = {format_bytes(room_bytes)}:"
            f" {room_bytes // floor_bytes:,} such contexts at the floor,"
            f" {room_bytes // resident_bytes:,} resident (before activations)"
        )
    return lines
