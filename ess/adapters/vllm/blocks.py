"""vLLM's KV cache tensors, read as ESS pages.

    rows     [block, row of block, 656]: one record for each token
    keys     [block, row of block, 132] by name, but block-split: the values of all keys of a block,
             then their scales

A request lists blocks of `block_rows` tokens. A tensor may be cut into smaller blocks, to suit its
kernels; a token's slot, block * block_rows + offset, is the same in both counts. An ESS page is 64
tokens of a request in order. Where a tensor's blocks are pages too they are copied whole; else
rows, values and scales are picked one by one and joined.

vLLM quantises index keys as they are; ESS applies a Hadamard transform first, as it does to
queries. Dot products agree only when both sides do the same, so keys are decoded, transformed and
encoded here where the layout says so.

vLLM's scales of rows are any float32. FlashMLA rounds them to bfloat16 when it reads a row, other
kernels do not. They are rounded here, once, so that a row has the same values in all kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ess.errors import BadInput
from ess.kernels.reference.keys import encode_keys, hadamard
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.row_codec import SCALE_BYTES
from ess.transfer.messages import PieceKind
from ess.units import PAGE_ROWS

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_KEYS: Final = "indexer.k_cache"


@dataclass(frozen=True, slots=True)
class CachePlace:
    """What a tensor holds. For index keys, `layer` counts only layers that have an indexer."""

    kind: PieceKind
    layer: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where a prompt's tokens lie: block i has its tokens from `i * block_rows` on."""

    ids: NDArray[np.int64]
    block_rows: int

    def slots(self, start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        which = positions // self.block_rows
        if stop > len(self.ids) * self.block_rows:
            raise BadInput(
                f"tokens up to {stop} in {len(self.ids)} blocks of {self.block_rows} tokens"
            )
        slots: NDArray[np.int64] = self.ids[which] * self.block_rows + positions % self.block_rows
        return slots


def place_of(name: str, layout: ModelLayout) -> CachePlace:
    """The place of the cache that vLLM has under this layer name."""
    match = _LAYER.search(name)
    if match is None:
        raise BadInput(f"vLLM's cache {name!r} names no layer, as in 'model.layers.3.self_attn'")
    layer = int(match[1])
    layout.check_layer(layer)
    if not name.endswith(_KEYS):
        return CachePlace(PieceKind.ROWS, layer)
    group, member = layout.place_of(layer)
    number = layout.key_layer_of(group)
    if number is None or member:
        raise BadInput(f"vLLM's cache {name!r}: layer {layer} of {layout.name!r} has no indexer")
    return CachePlace(PieceKind.INDEX_KEYS, number)


class Part:
    """One tensor as [block, record bytes] of bytes; `rows` tokens in a block."""

    def __init__(self, name: str, tensor: Tensor, record_bytes: int) -> None:
        plain = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        if plain.dtype is not torch.uint8 or plain.ndim < 3 or plain.shape[-1] != record_bytes:
            raise BadInput(
                f"vLLM's cache {name!r} is {tensor.dtype} {tuple(tensor.shape)}, not bytes in"
                f" records of {record_bytes}: start vLLM with --kv-cache-dtype fp8_ds_mla"
            )
        if not plain[0].is_contiguous():
            raise BadInput(f"vLLM's cache {name!r} has gaps inside a block: {plain.stride()}")
        self.rows = plain[0].numel() // record_bytes
        self.flat = plain.flatten(1)
        assert self.flat.data_ptr() == plain.data_ptr(), "a copy would never change again"

    def pages(self, slots: NDArray[np.int64]) -> Tensor | None:
        """Whole blocks, if each is a page; `slots` are those of whole pages. None otherwise."""
        if self.rows != PAGE_ROWS:
            return None
        by_page = slots.reshape(-1, PAGE_ROWS)
        first = by_page[:, 0]
        is_block = (first % PAGE_ROWS == 0) & (by_page[:, -1] == first + PAGE_ROWS - 1)
        if not is_block.all():
            return None
        return self.flat[self._on_device(first // PAGE_ROWS)]

    def records(self, slots: NDArray[np.int64], *, begin: int, size: int) -> Tensor:
        """[slot, size]: bytes of the records that begin `begin` bytes into each block."""
        span = self.flat[:, begin : begin + self.rows * size]
        each = span.view(len(span), self.rows, size)
        return each[self._on_device(slots // self.rows), self._on_device(slots % self.rows)]

    def _on_device(self, numbers: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers)).to(self.flat.device)


class BlockReader:
    """The tensors of all layers of the layout."""

    def __init__(self, layout: ModelLayout, tensors: Mapping[str, Tensor]) -> None:
        self.layout = layout
        self._parts: dict[CachePlace, Part] = {}
        for name, tensor in tensors.items():
            place = place_of(name, layout)
            if place in self._parts:
                raise BadInput(f"vLLM's cache {name!r}: its layer has two of its kind")
            self._parts[place] = Part(name, tensor, self._record_bytes(place.kind))
        self._require_all()

    def unit_bytes(self, kind: PieceKind) -> int:
        return PAGE_ROWS * self._record_bytes(kind)

    def read(self, place: CachePlace, blocks: Blocks, pages: range, *, token_count: int) -> Tensor:
        """Pages as [page, unit bytes] in host memory. Zero behind `token_count` tokens: the rest of
        a block may be another prompt's."""
        part, start = self._parts[place], pages.start * PAGE_ROWS
        stop = min(pages.stop * PAGE_ROWS, token_count)
        slots = blocks.slots(start, stop)
        whole = part.pages(slots) if len(slots) == len(pages) * PAGE_ROWS else None
        if place.kind is PieceKind.ROWS:
            codec = self.layout.row_of(place.layer)
            if whole is None:
                rows = part.records(slots, begin=0, size=codec.row_bytes)
                whole = _filled(rows, len(pages))
            return with_short_scales(whole, codec).cpu()
        return self._keys(part, slots, whole, len(pages)).cpu()

    def _keys(
        self, part: Part, slots: NDArray[np.int64], whole: Tensor | None, page_count: int
    ) -> Tensor:
        codec = self.layout.index
        assert codec is not None, "a reader has key tensors only where the layout has keys"
        if whole is None:
            split = part.rows * codec.value_bytes
            values = part.records(slots, begin=0, size=codec.value_bytes)
            scales = part.records(slots, begin=split, size=codec.scale_bytes)
            parts = (_filled(values, page_count), _filled(scales, page_count))
            whole = torch.cat(parts, dim=1)
        return turned(whole, codec) if codec.hadamard else whole

    def _record_bytes(self, kind: PieceKind) -> int:
        if kind is PieceKind.ROWS:
            return self.layout.row_bytes
        assert self.layout.index is not None, "keys are placed only where the layout has keys"
        return self.layout.index.key_bytes

    def _require_all(self) -> None:
        wanted = set(all_places(self.layout))
        if missing := sorted((place.kind.name, place.layer) for place in wanted - set(self._parts)):
            raise BadInput(
                f"vLLM has no cache for {len(missing)} of {len(wanted)} layers of"
                f" {self.layout.name!r}, first {missing[0]}: of a model with MTP layers both sides"
                f" must run them or neither"
            )


def all_places(layout: ModelLayout) -> Iterable[CachePlace]:
    yield from (CachePlace(PieceKind.ROWS, layer) for layer in range(layout.layer_total))
    yield from (CachePlace(PieceKind.INDEX_KEYS, layer) for layer in range(layout.key_layer_count))


def with_short_scales(pages: Tensor, codec: RowCodec) -> Tensor:
    """The same pages, with the scales of their rows rounded to bfloat16, as float32."""
    assert codec.form == "fp8", f"rows of form {codec.form} from vLLM"
    end = codec.latent_dim + codec.scale_count * SCALE_BYTES
    scales = pages.view(-1, codec.row_bytes)[:, codec.latent_dim : end].view(torch.float32)
    scales.copy_(scales.bfloat16())
    return pages


def turned(pages: Tensor, codec: IndexCodec) -> Tensor:
    """Block-split pages of plain keys as ESS keeps them: transformed, and encoded anew."""
    split = PAGE_ROWS * codec.value_bytes
    values = pages[:, :split].reshape(-1, codec.key_dim).view(torch.float8_e4m3fn).float()
    scales = pages[:, split:].contiguous().view(torch.float32).reshape(-1, 1)
    keys = encode_keys(hadamard(values * scales), codec)
    parts = (keys.values.reshape(len(pages), -1), keys.scales.view(torch.uint8))
    return torch.cat((parts[0], parts[1].reshape(len(pages), -1)), dim=1)


def _filled(records: Tensor, page_count: int) -> Tensor:
    """Records [n, size] as pages [page, 64 * size], zero behind the last record."""
    pages = records.new_zeros(page_count * PAGE_ROWS, records.shape[1])
    pages[: len(records)] = records
    return pages.reshape(page_count, -1)
