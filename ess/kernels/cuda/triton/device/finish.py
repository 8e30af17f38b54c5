"""From what a projection gives to what the pools hold, in one pass: norm, rotation, mix, codes.

A pair of a rotation lies in two columns of a line. Each column reads its partner from memory, where
its neighbour has just read it, so nothing is exchanged between threads. Compiled without fused
multiply-add, so that a rotation rounds each product as torch does.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import load, narrow
from ess.kernels.cuda.triton.device.rows import coded, placed


@triton.jit
def _partner(at, DIM: tl.constexpr, IS_HALF: tl.constexpr):
    """For column `at` of DIM: the other column of its pair, the pair, and whether `at` is the
    first."""
    if IS_HALF:
        is_first = at < DIM // 2
        other = tl.where(is_first, at + DIM // 2, at - DIM // 2)
        pair = tl.minimum(at, other)
    else:
        is_first = at % 2 == 0
        other = at ^ 1
        pair = at // 2
    return other, pair, is_first


@triton.jit
def _turned(value, other, cos, sin, is_first):
    return value * cos + tl.where(is_first, -other, other) * sin


@triton.jit
def _turns(cos, sin, token, pair, mask, PAIRS: tl.constexpr):
    at = token[:, None] * PAIRS + pair[None, :]
    return tl.load(cos + at, mask=mask, other=1.0), tl.load(sin + at, mask=mask, other=0.0)


@triton.jit
def _mix(values, LINES: tl.constexpr, DIM: tl.constexpr, LEVELS: tl.constexpr):
    """Walsh-Hadamard by its steps: sums and differences at distances 1, 2, 4, ..."""
    for level in tl.static_range(LEVELS):
        apart = tl.reshape(values, (LINES, DIM // (2 << level), 2, 1 << level))
        low, high = tl.split(tl.permute(apart, (0, 1, 3, 2)))
        both = tl.permute(tl.join(low + high, low - high), (0, 1, 3, 2))
        values = tl.reshape(both, (LINES, DIM))
    return values


@triton.jit(do_not_specialize=["line_count"])
def turn(
    values, cos, sin, out, line_count, heads, token_stride, head_stride, factor,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, IS_HALF: tl.constexpr,
    LEVELS: tl.constexpr, IS_BF16: tl.constexpr, OUT_IS_BF16: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Lines of DIM numbers, their first ROPE of them rotated, mixed LEVELS deep, dense in `out`."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_line = line < line_count
    mask = is_line[:, None] & (column < DIM)[None, :]
    token = line // heads
    start = (values + token * token_stride + line % heads * head_stride)[:, None]
    value = load(start + column[None, :], mask, IS_BF16)
    if ROPE > 0:
        other, pair, is_first = _partner(column, ROPE, IS_HALF)
        is_turned = mask & (column < ROPE)[None, :]
        beside = load(start + other[None, :], is_turned, IS_BF16)
        cosine, sine = _turns(cos, sin, token, pair, is_turned, ROPE // 2)
        value = tl.where(is_turned, _turned(value, beside, cosine, sine, is_first[None, :]), value)
    if LEVELS > 0:
        value = _mix(value, LINES, PADDED, LEVELS) * factor
    at = line[:, None] * DIM + column[None, :]
    tl.store(out + at, narrow(value) if OUT_IS_BF16 else value, mask=mask)


@triton.jit(do_not_specialize=["count"])
def finish_keys(
    values, weight, bias, cos, sin, codes, scales, places,
    count, value_stride, code_stride, scale_stride, page_stride, eps, factor,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, IS_HALF: tl.constexpr,
    LEVELS: tl.constexpr, IS_BF16: tl.constexpr, IS_FP8: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, PAGE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Keys normed to mean 0 and variance 1, rotated in their first ROPE numbers, mixed, stored."""
    token = tl.program_id(0) * LINES + tl.arange(0, LINES).to(tl.int64)
    column = tl.arange(0, PADDED)
    is_column = column < DIM
    is_token = token < count
    mask = is_token[:, None] & is_column[None, :]
    start = (values + token * value_stride)[:, None]
    value = load(start + column[None, :], mask, IS_BF16)
    mean = tl.sum(value, axis=1)[:, None] / DIM
    apart = tl.where(mask, value - mean, 0.0)
    spread = 1.0 / tl.sqrt_rn(tl.sum(apart * apart, axis=1)[:, None] / DIM + eps)
    gain = tl.load(weight + column, mask=is_column, other=0.0)[None, :]
    value = apart * spread * gain + tl.load(bias + column, mask=is_column, other=0.0)[None, :]
    if ROPE > 0:
        other, pair, is_first = _partner(column, ROPE, IS_HALF)
        is_rope = column < ROPE
        is_turned = mask & is_rope[None, :]
        beside = load(start + other[None, :], is_turned, IS_BF16) - mean
        beside *= spread * tl.load(weight + other, mask=is_rope, other=0.0)[None, :]
        beside += tl.load(bias + other, mask=is_rope, other=0.0)[None, :]
        cosine, sine = _turns(cos, sin, token, pair, is_turned, ROPE // 2)
        value = tl.where(is_turned, _turned(value, beside, cosine, sine, is_first[None, :]), value)
    if LEVELS > 0:
        value = _mix(value, LINES, PADDED, LEVELS) * factor
    place, page = placed(places, token, is_token, page_stride, PAGE)
    mask = mask & (place >= 0)[:, None]
    at = codes + (page + place * code_stride)
    if IS_FP8:
        code, bits = coded(value, POWER_OF_TWO)
        tl.store(at[:, None] + column[None, :], code, mask=mask)
        at = scales + (page + place * scale_stride)
        tl.store(at.to(tl.pointer_type(tl.int32)), bits, mask=is_token & (place >= 0))
    else:
        tl.store(at.to(tl.pointer_type(tl.float32))[:, None] + column[None, :], value, mask=mask)


@triton.jit
def finish_rows(
    values, weight, cos, sin, rows, places, value_stride, row_stride, eps,
    DIM: tl.constexpr, PADDED: tl.constexpr, ROPE: tl.constexpr, ROPE_PADDED: tl.constexpr,
    ROPE_FROM: tl.constexpr, FORM: tl.constexpr, IS_BF16: tl.constexpr, HAS_PLACES: tl.constexpr,
):  # fmt: skip
    """One program per row: latents normed by their root mean square, the rope part rotated."""
    token = tl.program_id(0).to(tl.int64)
    place = token
    if HAS_PLACES:
        place = tl.load(places + token).to(tl.int64)
    column = tl.arange(0, PADDED)
    mask = (column < DIM) & (place >= 0)
    start = values + token * value_stride
    value = load(start + column, mask, IS_BF16)
    spread = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / DIM + eps)
    value = value * spread * tl.load(weight + column, mask=mask, other=0.0)
    row = rows + place * row_stride
    if FORM == "fp8":
        code, bits = coded(tl.reshape(value, (PADDED // 128, 128)), True)
        tl.store(row + column, tl.reshape(code, (PADDED,)), mask=mask)
        group = tl.arange(0, PADDED // 128)
        is_group = (group < DIM // 128) & (place >= 0)
        tl.store((row + DIM).to(tl.pointer_type(tl.int32)) + group, bits, mask=is_group)
    elif FORM == "bf16":
        tl.store(row.to(tl.pointer_type(tl.int16)) + column, narrow(value), mask=mask)
    else:
        tl.store(row.to(tl.pointer_type(tl.float32)) + column, value, mask=mask)
    if ROPE > 0:
        column = tl.arange(0, ROPE_PADDED)
        mask = (column < ROPE) & (place >= 0)
        other, pair, is_first = _partner(column, ROPE, False)
        value = load(start + DIM + column, mask, IS_BF16)
        beside = load(start + DIM + other, mask, IS_BF16)
        at = token * (ROPE // 2) + pair
        cosine = tl.load(cos + at, mask=mask, other=1.0)
        sine = tl.load(sin + at, mask=mask, other=0.0)
        value = _turned(value, beside, cosine, sine, is_first)
        row += ROPE_FROM
        if FORM == "f32":
            tl.store(row.to(tl.pointer_type(tl.float32)) + column, value, mask=mask)
        else:
            tl.store(row.to(tl.pointer_type(tl.int16)) + column, narrow(value), mask=mask)
