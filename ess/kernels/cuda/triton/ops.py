"""The ops of a CUDA device, by Triton. None of them waits for the device; a graph can hold them.

Slots, row ids, places, lengths, page tables and the ends of experts lie on the device, so looking
at them would wait for it: nothing does, they are trusted, and a wrong one reads or writes memory of
others. All of them are made on the device too, by the planner, the top-k and the tables of the
pools. In the interpreter they are looked at before the call.

A caller that overlaps work uses the launches behind this module, which take more: `attend_lists`,
`logits_into`, `top_k_into`, `merge_into`, `products_into`.

`threads` means nothing here. What a query gets depends on its own list alone.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ess.kernels.calls import Attend, Cuts, Draws, IndexQueries, Keys, Linear, Products
from ess.kernels.cuda.rows import COPY_BLOCKS
from ess.kernels.cuda.triton import attend as attention
from ess.kernels.cuda.triton import cut as cutting
from ess.kernels.cuda.triton import grouped, index, linear, noise
from ess.kernels.cuda.triton import rows as codec_kernels
from ess.kernels.cuda.triton.attend import merge_into as merge
from ess.kernels.cuda.triton.finish import finish_keys, finish_rows, hadamard, turn_queries
from ess.kernels.cuda.triton.launch import interpreted, place, require_device
from ess.kernels.cuda.triton.received import add_received, gate_received, take_received
from ess.kernels.cuda.triton.rows import decode_rows, encode_rows, store_rows
from ess.kernels.reference.keys import encode_keys as keep_keys
from ess.kernels.reference.ops import counts_to_build, has_stages
from ess.layout import IndexCodec


def implementation() -> str:
    where = "interpreted" if interpreted() else torch.cuda.get_device_name()
    return f"triton {triton.__version__} on {where}"


def reaches(tensor: Tensor, *, in_place: bool) -> bool:
    """Whether kernels can read the tensor. Pinned memory of the host counts where rows are read in
    place."""
    return tensor.is_cuda or interpreted() or (in_place and tensor.is_pinned())


def checked_before(name: str, ids: Tensor) -> bool:
    return interpreted()


def encode_keys(values: Tensor, codec: IndexCodec) -> Keys:
    if codec.form == "f32":
        return keep_keys(values, codec)
    return Keys(*codec_kernels.encode_keys(values, codec))


def attend(call: Attend) -> None:
    queries, rows, slots, codec, scale, placed, into, _, balanced, _, spares, adds = call
    asked = queries if queries.dtype == torch.bfloat16 else queries.float()
    attention.attend_lists(
        asked,
        rows,
        attention.close_up(slots),
        codec,
        scale=scale,
        placed=placed,
        into=into,
        spare_sms=min(COPY_BLOCKS, place(asked).sm_count - 1) if spares else 0,
        balanced=balanced,
        adds=adds,
    )


def index_logits(call: IndexQueries, out: Tensor) -> None:
    """Only this op writes the logits behind a length, as -inf; a top-k knows the lengths."""
    _logits(call, out.fill_(float("-inf")))


def index_top_k(call: IndexQueries, out: Tensor) -> None:
    index_scored(call, out)


def index_scored(call: IndexQueries, out: Tensor) -> Tensor:
    logits = _logits(call, call.weights.new_empty(len(call.queries), call.width))
    index.top_k_into(logits, call.lengths, out=out)
    return logits


def _logits(call: IndexQueries, out: Tensor) -> Tensor:
    queries, weights, pages, table, lengths, codec, _, each = call
    return index.logits_into(
        queries, weights, pages, table, lengths, codec, out=out, queries_per_request=each
    )


def top_k(logits: Tensor, lengths: Tensor, out: Tensor, threads: int) -> None:
    index.top_k_into(logits, lengths, out=out)


def cut(scores: Tensor, cuts: Cuts, out: Tensor) -> None:
    cutting.cut_into(scores, cuts, out)


def draw(scores: Tensor, draws: Draws, tokens: Tensor) -> None:
    noise.draw_into(scores, draws, tokens)


def expert_products(call: Products) -> None:
    tokens, begin, ends, weights, scales, out = call
    grouped.products_into(tokens, ends, weights, out=out, scales=scales, begin=begin)


def linear_fp8(call: Linear) -> None:
    linear.linear_into(*call)
