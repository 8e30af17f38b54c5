"""A long context, built once by a shortcut that is stated with the results.

Exact would be the whole text through the model, at a cost that grows with its square. Instead
segments of the text go through the engine, each on its own from position 0, and their rows and keys
are laid one after another until the context is full. The rotary parts of a segment are turned to
its new positions, so distances are true everywhere. Two things are not: a token has seen only its
own segment, and beyond `distinct` tokens the segments repeat. A context of at most one segment is
exact.

Only the rotary part of a row changes, and is rounded to bf16 once more. Keys are transformed back,
turned and quantised again, a second rounding.

Each computed segment is kept as a safetensors file, named by all that it depends on.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

import ess
from ess import console
from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.free_resources import memory_free
from ess.kernels.backend import ops
from ess.kernels.ops import Ops
from ess.layout import ModelLayout
from ess.models.layers import Rotation, rotate, rotate_part
from ess.models.load import EMBEDDED, load_model
from ess.models.model import Model
from ess.units import PAGE_ROWS, div_ceil, format_bytes

SEGMENT: Final = 4096
DISTINCT: Final = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows of every layer and keys of every group, for tokens 0..n-1 from position 0."""

    tokens: tuple[int, ...]
    rows: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """Segments that can be laid out to any length; `shortcut` describes that for people."""

    model: Model
    layout: ModelLayout
    segments: tuple[Segment, ...]
    length: int
    text: str
    seconds: float

    @property
    def segment_length(self) -> int:
        return len(self.segments[0].tokens)

    @property
    def shortcut(self) -> str:
        each, count = self.segment_length, len(self.segments)
        if self.length <= each:
            return f"{self.length:,} tokens of {self.text}, prefilled whole"
        times = self.length / (each * count)
        again = f", laid {times:.1f} times" if times > 1 else ""
        return (
            f"{self.length:,} tokens from {count} segments of {each:,} of {self.text}, each "
            f"prefilled on its own and turned to its positions{again}"
        )

    def tokens(self, length: int) -> list[int]:
        laid = [token for segment in self._laid(length) for token in segment.tokens]
        return laid[:length]

    def rows(self, layer: int, length: int) -> Tensor:
        """Rows as uint8 [length, row_bytes], turned to positions 0..length-1."""
        parts = [segment.rows[layer] for segment in self._laid(length)]
        turned = [self._turned_rows(part, place) for place, part in enumerate(parts)]
        return torch.cat(turned)[:length]

    def keys(self, group: int, length: int) -> Tensor:
        parts = [segment.keys[group] for segment in self._laid(length)]
        kernels = ops("cpu")
        turned = [self._turned_keys(kernels, part, place) for place, part in enumerate(parts)]
        return torch.cat(turned)[:length]

    def _laid(self, length: int) -> list[Segment]:
        count = div_ceil(length, self.segment_length)
        return [self.segments[place % len(self.segments)] for place in range(count)]

    def _rotation(self, place: int, count: int) -> Rotation:
        """The rotation by which the segment at this place was moved."""
        return self.model.rotation(torch.full((count,), place * self.segment_length))

    def _turned_rows(self, rows: Tensor, place: int) -> Tensor:
        """Turns the rotary part: the last of a row, in bf16 unless the row is f32."""
        if place == 0:
            return rows
        codec = self.layout.row
        form = torch.float32 if codec.form == "f32" else torch.bfloat16
        start = codec.row_bytes - codec.rope_dim * form.itemsize
        rotary = rows[:, start:].contiguous().view(form)
        turned = rotate(rotary, self._rotation(place, len(rows)), "interleaved")
        moved = rows.clone()
        moved[:, start:] = turned.contiguous().view(torch.uint8)
        return moved

    def _turned_keys(self, kernels: Ops, keys: Tensor, place: int) -> Tensor:
        if place == 0:
            return keys
        codec, config = self.layout.index, self.model.config
        assert codec is not None, "keys without an index codec"
        quantised = codec.form == "fp8"
        form = torch.float8_e4m3fn if quantised else torch.float32
        values = keys[:, : codec.value_bytes].contiguous().view(form).float()
        if quantised:
            values = values * keys[:, codec.value_bytes :].contiguous().view(torch.float32)
        is_mixed = quantised and codec.hadamard
        plain = kernels.hadamard(values) if is_mixed else values
        rotation = self._rotation(place, len(keys))
        turned = rotate_part(plain, rotation, config.index_rope_style, at=0, dim=config.rope_dim)
        mixed = kernels.hadamard(turned) if is_mixed else turned
        return key_bytes(kernels, mixed.contiguous(), self.layout)


def key_bytes(kernels: Ops, values: Tensor, layout: ModelLayout) -> Tensor:
    """The bytes of a key's record: its values, then its scale if the form has scales."""
    assert layout.index is not None, "keys without an index codec"
    encoded = kernels.encode_keys(values, layout.index)
    if not layout.index.scale_bytes:
        return encoded.values
    scales = encoded.scales.contiguous().view(torch.uint8).reshape(len(values), -1)
    return torch.cat((encoded.values, scales), dim=1)


def build_prefix(
    model: Model,
    layout: ModelLayout,
    ids: Sequence[int],
    *,
    length: int,
    text: str,
    segment: int = SEGMENT,
    distinct: int = DISTINCT,
    folder: Path | None = None,
    seconds: float = math.inf,
) -> Prefix:
    """Computes what `folder` does not hold yet; a folder of None keeps nothing.

    After `seconds` no further segment is begun, and the prefix repeats those that are done.
    """
    if model.config.rope.rotation_scale != 1.0:
        raise BadInput("a model that scales its rotations cannot have rows turned")
    each = min(segment, length)
    count = min(div_ceil(length, each), max(1, distinct // each))
    if len(ids) < count * each + 1:
        raise BadInput(f"{text} has {len(ids)} tokens, the prefix needs {count * each + 1}")
    started = time.perf_counter()
    segments: list[Segment] = []
    while len(segments) < count and (not segments or time.perf_counter() - started < seconds):
        at = len(segments) * each
        segments.append(_kept_or_made(model, layout, list(ids[at : at + each + 1]), folder))
    return Prefix(
        model=model,
        layout=layout,
        segments=tuple(segments),
        length=length,
        text=text,
        seconds=time.perf_counter() - started,
    )


def embedded_prefix(
    length: int,
    *,
    text: Path | None = None,
    folder: Path | None = None,
    model: Model | None = None,
    segment: int = SEGMENT,
    distinct: int = DISTINCT,
    seconds: float = math.inf,
) -> Prefix:
    """A prefix of the embedded model, or of another `model` with its weights, over `text`."""
    check_memory(length)
    ids, name = token_ids(text)
    if model is None:
        model, layout_name = load_model(), "ess-embedded"
    else:
        layout_name = f"ess-embedded, top-k {model.config.top_k}"
    console.note(f"context {length:,}: prefilling, or reading what an earlier run kept ...")
    return build_prefix(
        model,
        model.config.layout(name=layout_name),
        ids,
        length=length,
        text=name,
        segment=segment,
        distinct=distinct,
        folder=folder,
        seconds=seconds,
    )


def check_memory(tokens: int, layout: ModelLayout | None = None) -> None:
    """Refuses tokens of one way to decode that no memory holds, before anything is computed. The
    layout is by default that of the embedded model."""
    each = (layout or ModelLayout.embedded()).host_page_bytes
    needed, there = tokens // PAGE_ROWS * each, memory_free()
    if needed > there:
        raise BadInput(
            f"{tokens:,} tokens take {format_bytes(needed)} for their rows alone, "
            f"{format_bytes(there)} are free: take a smaller --ctx or --batch"
        )


def prefix_row(prefix: Prefix) -> Row:
    return Row(
        name=f"context {prefix.length:,}",
        value=round(prefix.seconds, 3),
        unit="s to prepare",
        config={"how": prefix.shortcut},
    )


def _kept_or_made(
    model: Model, layout: ModelLayout, ids: list[int], folder: Path | None
) -> Segment:
    if folder is None:
        return _make(model, layout, ids)
    path = folder / f"{_name(layout, ids)}.safetensors"
    kept = _load(path, layout, ids)
    if kept is not None:
        return kept
    made = _make(model, layout, ids)
    _save(path, made)
    return made


def _name(layout: ModelLayout, ids: list[int]) -> str:
    weights = hashlib.sha256((EMBEDDED / "model.safetensors").read_bytes()).digest()
    what = repr((ess.__version__, layout, ids)).encode()
    return hashlib.sha256(weights + what).hexdigest()[:32]


def _load(path: Path, layout: ModelLayout, ids: list[int]) -> Segment | None:
    """The segment; None if there is no file, or it does not hold what its name promises."""
    try:
        tensors = load(path.read_bytes())
        rows = tuple(tensors[f"rows.{layer}"] for layer in range(layout.layer_total))
        keys = tuple(tensors[f"keys.{group}"] for group in range(layout.group_count))
    except (OSError, SafetensorError, KeyError):
        return None
    count = len(ids) - 1
    if any(part.shape != (count, layout.row_bytes) for part in rows):
        return None
    return Segment(tokens=tuple(ids[:count]), rows=rows, keys=keys)


def _save(path: Path, segment: Segment) -> None:
    """Writes the whole file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    named = {f"rows.{layer}": part for layer, part in enumerate(segment.rows)}
    save_file(named | {f"keys.{group}": part for group, part in enumerate(segment.keys)}, draft)
    os.replace(draft, path)


def offload_of_one(layout: ModelLayout, pages: int, *, is_resident: bool, **more: Any) -> Offload:
    """For one request of at most `pages` pages: slots for all its rows, or a block per group."""
    each = pages * layout.page_bytes if is_resident else layout.chunk_bytes
    host_bytes, length_max = pages * layout.host_page_bytes, pages * PAGE_ROWS
    made = {"host_bytes": host_bytes, "length_max": length_max, "slot_floor": 1, **more}
    return Offload.create(layout, slot_bytes=layout.group_count * each, **made)


def _make(model: Model, layout: ModelLayout, ids: list[int]) -> Segment:
    """Runs it through the engine like a prompt; MTP pairs the last of `ids` with the last row."""
    count = len(ids) - 1
    pages = div_ceil(len(ids), PAGE_ROWS) + 1
    with offload_of_one(layout, pages, is_resident=False) as offload:
        engine = Engine(model, offload, EngineConfig(mtp=1, warm=False))
        request = engine.add(ids, Sampling(tokens_max=1))
        while request.state in ("waiting", "prefilling"):
            engine.step()
        segment = _segment_of(offload, request, layout, count)
        engine.cancel(request)
    return segment


def _segment_of(offload: Offload, request: Request, layout: ModelLayout, count: int) -> Segment:
    assert request.sequence is not None, "a prefilled request has a sequence"
    codec, kernels = layout.index, ops("cpu")
    assert codec is not None, "keys without an index codec"
    offload.drain()
    on_host = request.sequence.host_rows(0, count).long()
    active = request.sequence.active_rows(0, count)
    keys = []
    for group in layout.groups:
        records = kernels.read_keys(offload.memory(group[0]).key_pages, active, codec)
        parts = [records.values.contiguous()]
        if codec.scale_bytes:
            parts.append(records.scales.contiguous().view(torch.uint8).reshape(count, -1))
        keys.append(torch.cat(parts, dim=1))
    rows = tuple(offload.memory(layer).host[on_host].clone() for layer in range(layout.layer_total))
    return Segment(tokens=tuple(request.prompt[:count]), rows=rows, keys=tuple(keys))
