"""vLLM's KV cache tensors, laid out by hand, and what is in them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from ess.adapters.vllm.blocks import Blocks, CachePlace, all_places
from ess.kernels.cpu import codec
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.transfer.messages import PieceKind

KEYS = IndexCodec(head_count=8, hadamard=False)
LAYOUT = ModelLayout(
    name="four layers, two indexers",
    layer_count=4,
    groups=((0, 1, 2), (3,)),
    index=KEYS,
    row=RowCodec(),
    top_k=64,
    slot_floor=64,
)
FOREIGN = 0x5A

Bytes = NDArray[np.uint8]
Contents = Mapping[CachePlace, Bytes]


def contents(token_count: int, layout: ModelLayout = LAYOUT) -> dict[CachePlace, Bytes]:
    """A record for each token, as our encoder writes it, of random latents and keys."""
    made = {}
    for place in all_places(layout):
        draw = np.random.default_rng([place.kind, place.layer])
        if place.kind is PieceKind.ROWS:
            values = draw.normal(size=(token_count, 576)).astype(np.float32)
            room = np.empty((token_count, layout.row_bytes), np.uint8)
            made[place] = codec.encode_rows(values, layout.row, room)
        else:
            values = draw.normal(size=(token_count, 128)).astype(np.float32)
            keys = codec.encode_keys(values, KEYS)
            scales = keys.scales[:, None].view(np.uint8)
            made[place] = np.concatenate([keys.values, scales], axis=1)
    return made


def name_of(place: CachePlace, layout: ModelLayout = LAYOUT) -> str:
    if place.kind is PieceKind.ROWS:
        return f"model.layers.{place.layer}.self_attn.attn"
    return f"model.layers.{layout.groups[place.layer][0]}.self_attn.indexer.k_cache"


def shuffled(token_count: int, block_rows: int) -> Blocks:
    """Blocks in any order, with others between them."""
    count = -(-token_count // block_rows)
    order = np.random.default_rng(block_rows).permutation(count + 3)[:count]
    return Blocks(order.astype(np.int64), block_rows)


def tensor_of(place: CachePlace, records: Bytes, blocks: Blocks, tensor_rows: int) -> torch.Tensor:
    """Bytes of another prompt, and the records at their slots: rows one by one, of keys all values
    of a block and then all scales."""
    slot_count = (int(blocks.ids.max()) + 1) * blocks.block_rows
    token_count, size = records.shape
    block_count = -(-slot_count // tensor_rows)
    memory = np.full((block_count, tensor_rows * size), FOREIGN, np.uint8)
    sizes = [size] if place.kind is PieceKind.ROWS else [128, 4]
    for token, slot in enumerate(blocks.slots(0, token_count).tolist()):
        block, offset = divmod(slot, tensor_rows)
        begin = taken = 0
        for part in sizes:
            at = begin + offset * part
            memory[block, at : at + part] = records[token, taken : taken + part]
            begin, taken = begin + tensor_rows * part, taken + part
    return torch.from_numpy(memory.reshape(block_count, tensor_rows, size))


def tensors_of(made: Contents, blocks: Blocks, tensor_rows: int) -> dict[str, torch.Tensor]:
    return {
        name_of(place): tensor_of(place, records, blocks, tensor_rows)
        for place, records in made.items()
    }
