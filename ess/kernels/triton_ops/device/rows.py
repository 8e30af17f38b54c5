"""Rows and keys to bytes and back: groups of values under one scale, then a plain tail."""

import triton
import triton.language as tl

from ess.kernels.triton_ops.device.floats import from_e4m3, narrow, to_e4m3, widen


@triton.jit
def _load(values, at, mask, IS_BF16: tl.constexpr):
    found = tl.load(values + at, mask=mask, other=0)
    if IS_BF16:
        found = widen(found)
    return found


@triton.jit
def _scales(values, POWER_OF_TWO: tl.constexpr):
    """The scale of each row of a group, NaN where anything in it is infinite or NaN."""
    size = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_broken = size >= 0x7F800000
    amax = tl.where(is_broken, 0, size).to(tl.float32, bitcast=True)
    scale = tl.div_rn(tl.maximum(amax, 1e-4), tl.full(amax.shape, 448.0, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale, is_broken


@triton.jit
def encode(
    values, codes, scales, tails, row_ids,
    count, value_stride, code_stride, scale_stride, page_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr,
    IS_BF16: tl.constexpr, POWER_OF_TWO: tl.constexpr, IS_PAGED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, g) writes group g of ROWS rows, program (i, GROUPS) their tails.

    Paged: row i goes to place row_ids[i], 64 places to a page; strides are within a page.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    group = tl.program_id(1)
    is_row = row < count
    place = row
    page = tl.zeros_like(row)
    if IS_PAGED:
        row_id = tl.load(row_ids + row, mask=is_row, other=0).to(tl.int64)
        place = row_id % 64
        page = row_id // 64 * page_stride
    if group < GROUPS:
        column = tl.arange(0, GROUP_PADDED)
        mask = is_row[:, None] & (column < GROUP)[None, :]
        at = row[:, None] * value_stride + group * GROUP + column[None, :]
        found = _load(values, at, mask, IS_BF16)
        scale, is_broken = _scales(found, POWER_OF_TWO)
        code = to_e4m3(tl.div_rn(found, tl.broadcast_to(scale[:, None], found.shape)))
        code = tl.where(is_broken[:, None], 0x7F, code).to(tl.uint8)
        out = (page + place * code_stride)[:, None] + group * GROUP + column[None, :]
        tl.store(codes + out, code, mask=mask)
        scale_bits = tl.where(is_broken, 0x7FC00000, scale.to(tl.int32, bitcast=True))
        out = scales + (page + place * scale_stride + group * 4)
        tl.store(out.to(tl.pointer_type(tl.int32)), scale_bits, mask=is_row)
    else:
        column = tl.arange(0, TAIL_PADDED)
        mask = is_row[:, None] & (column < TAIL)[None, :]
        at = row[:, None] * value_stride + GROUPS * GROUP + column[None, :]
        found = tl.load(values + at, mask=mask, other=0)
        if not IS_BF16:
            found = narrow(found)
        out = tails + (row[:, None] * code_stride + 2 * column[None, :])
        tl.store(out.to(tl.pointer_type(tl.int16)), found, mask=mask)


@triton.jit
def decode(
    codes, scales, tails, values, count, row_stride, value_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    group = tl.program_id(1)
    is_row = row < count
    start = row * row_stride
    if group < GROUPS:
        column = tl.arange(0, GROUP)
        code = tl.load(codes + (start[:, None] + group * GROUP + column[None, :]), is_row[:, None])
        at = scales + (start + group * 4)
        scale = tl.load(at.to(tl.pointer_type(tl.float32)), mask=is_row, other=0.0)
        found = from_e4m3(code, INTERPRETED) * scale[:, None]
        out = row[:, None] * value_stride + group * GROUP + column[None, :]
        if IS_BF16:
            tl.store(values + out, narrow(found), mask=is_row[:, None])
        else:
            tl.store(values + out, found, mask=is_row[:, None])
    else:
        column = tl.arange(0, TAIL_PADDED)
        mask = is_row[:, None] & (column < TAIL)[None, :]
        at = tails + (start[:, None] + 2 * column[None, :])
        found = tl.load(at.to(tl.pointer_type(tl.int16)), mask=mask, other=0)
        out = row[:, None] * value_stride + GROUPS * GROUP + column[None, :]
        if IS_BF16:
            tl.store(values + out, found, mask=mask)
        else:
            tl.store(values + out, widen(found), mask=mask)
