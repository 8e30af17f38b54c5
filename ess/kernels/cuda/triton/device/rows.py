"""Rows and keys to bytes and back: groups of values under one scale, then a plain tail."""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import from_e4m3, narrow, to_e4m3, widen


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
def _encode_group(
    values, codes, scales, is_row, GROUP: tl.constexpr, PADDED: tl.constexpr,
    IS_BF16: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """From where the rows' groups start to where their codes and scales start."""
    column = tl.arange(0, PADDED)
    mask = is_row[:, None] & (column < GROUP)[None, :]
    loaded = tl.load(values[:, None] + column[None, :], mask=mask, other=0)
    if IS_BF16:
        loaded = widen(loaded)
    code, bits = coded(loaded, POWER_OF_TWO)
    tl.store(codes[:, None] + column[None, :], code, mask=mask)
    tl.store(scales.to(tl.pointer_type(tl.int32)), bits, mask=is_row)


@triton.jit
def coded(values, POWER_OF_TWO: tl.constexpr):
    """Codes of values [lines, group], and the bits of each line's scale."""
    scale, is_broken = _scales(values, POWER_OF_TWO)
    code = to_e4m3(tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
    code = tl.where(is_broken[:, None], 0x7F, code).to(tl.uint8)
    return code, tl.where(is_broken, 0x7FC00000, scale.to(tl.int32, bitcast=True))


@triton.jit
def _encode_tail(
    values, tails, is_row, TAIL: tl.constexpr, PADDED: tl.constexpr, IS_BF16: tl.constexpr,
    TAIL_IS_F32: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, PADDED)
    mask = is_row[:, None] & (column < TAIL)[None, :]
    loaded = tl.load(values[:, None] + column[None, :], mask=mask, other=0)
    if TAIL_IS_F32:
        out = tails.to(tl.pointer_type(tl.float32))[:, None] + column[None, :]
        tl.store(out, widen(loaded) if IS_BF16 else loaded, mask=mask)
    else:
        out = tails.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
        tl.store(out, loaded if IS_BF16 else narrow(loaded), mask=mask)


@triton.jit(do_not_specialize=["count"])
def encode(
    values, codes, scales, tails, places,
    count, value_stride, code_stride, scale_stride, page_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr,
    TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr, TAIL_IS_F32: tl.constexpr,
    IS_BF16: tl.constexpr, POWER_OF_TWO: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, g) writes group g of ROWS rows, program (i, GROUPS) their tails.

    With pages of PAGE places row i goes to place places[i], strides are within a page, and a row
    whose place is negative goes nowhere. PAGE 0 is no pages: row i goes to place i.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    group = tl.program_id(1)
    is_row = row < count
    values += row * value_stride + group * GROUP
    place, page = placed(places, row, is_row, page_stride, PAGE)
    is_row = is_row & (place >= 0)
    if group < GROUPS:
        code_at = codes + (page + place * code_stride + group * GROUP)
        scale_at = scales + (page + place * scale_stride + group * 4)
        _encode_group(values, code_at, scale_at, is_row, GROUP, GROUP_PADDED, IS_BF16, POWER_OF_TWO)
    else:
        tail_at = tails + (page + place * code_stride)
        _encode_tail(values, tail_at, is_row, TAIL, TAIL_PADDED, IS_BF16, TAIL_IS_F32)


@triton.jit
def placed(places, row, is_row, page_stride, PAGE: tl.constexpr):
    """Where a row goes: place in a page, negative for nowhere, and start of the page."""
    if PAGE == 0:
        place, page = row, tl.zeros_like(row)
    else:
        named = tl.load(places + row, mask=is_row, other=-1).to(tl.int64)
        place = tl.where(named < 0, -1, named % PAGE)
        page = tl.where(named < 0, 0, named // PAGE * page_stride)
    return place, page


@triton.jit
def _decode_group(
    codes, scales, values, is_row, GROUP: tl.constexpr, IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    column, mask = tl.arange(0, GROUP), is_row[:, None]
    code = tl.load(codes[:, None] + column[None, :], mask=mask, other=0)
    scale = tl.load(scales.to(tl.pointer_type(tl.float32)), mask=is_row, other=0.0)
    loaded = from_e4m3(code, INTERPRETED) * scale[:, None]
    tl.store(values[:, None] + column[None, :], narrow(loaded) if IS_BF16 else loaded, mask=mask)


@triton.jit
def _decode_tail(
    tails, values, is_row, TAIL: tl.constexpr, PADDED: tl.constexpr, IS_BF16: tl.constexpr
):
    column = tl.arange(0, PADDED)
    mask = is_row[:, None] & (column < TAIL)[None, :]
    at = tails.to(tl.pointer_type(tl.int16))[:, None] + column[None, :]
    loaded = tl.load(at, mask=mask, other=0)
    tl.store(values[:, None] + column[None, :], loaded if IS_BF16 else widen(loaded), mask=mask)


@triton.jit(do_not_specialize=["count"])
def decode(
    codes, scales, tails, values, count, row_stride, value_stride,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, TAIL: tl.constexpr, TAIL_PADDED: tl.constexpr,
    IS_BF16: tl.constexpr, INTERPRETED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (i, g) reads group g of ROWS rows, program (i, GROUPS) their tails."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    group = tl.program_id(1)
    is_row = row < count
    start = row * row_stride
    values += row * value_stride + group * GROUP
    if group < GROUPS:
        code_at, scale_at = codes + (start + group * GROUP), scales + (start + group * 4)
        _decode_group(code_at, scale_at, values, is_row, GROUP, IS_BF16, INTERPRETED)
    else:
        _decode_tail(tails + start, values, is_row, TAIL, TAIL_PADDED, IS_BF16)
