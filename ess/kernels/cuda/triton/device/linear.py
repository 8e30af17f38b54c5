"""Products of codes: values under a scale for each 128 of a line, weights for each 128 x 128.

Weights are the rows of a product and tokens its columns, so that few tokens waste little; of more
tokens it is the other way, for a thread holds the scale of each column that is its own.

The tensor cores add products of e4m3 in less than float32, so the sums of each 128 of the depth
start from nothing and are added up in float32, after both scales.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import from_e4m3, narrow


@triton.jit
def _codes(at, mask, INTERPRETED: tl.constexpr):
    if INTERPRETED:
        codes = from_e4m3(tl.load(at, mask=mask, other=0), INTERPRETED)
    else:
        codes = tl.load(at.to(tl.pointer_type(tl.float8e4nv)), mask=mask, other=0.0)
    return codes


@triton.jit(do_not_specialize=["count"])
def linear(
    codes, sizes, weights, scales, out, count, out_stride,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, CODED: tl.constexpr, OUT_IS_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Program (i, j) makes COLUMNS columns of TOKENS tokens. A line of codes is CODED long."""
    GROUPS: tl.constexpr = CODED // 128
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_column, is_token = column < WIDTH, token < count
    lines = weights + column.to(tl.int64)[:, None] * DEPTH
    asked = codes + token.to(tl.int64)[:, None] * CODED
    factors = scales + tl.program_id(0) * COLUMNS // 128 * GROUPS
    sizes += token * GROUPS
    step = tl.arange(0, 128)[None, :]
    sums = tl.zeros((TOKENS, COLUMNS) if TURNED else (COLUMNS, TOKENS), tl.float32)
    scale = tl.load(factors) * tl.load(sizes, mask=is_token, other=0.0)
    for group in range(GROUPS):
        at = group * 128 + step
        weight = _codes(lines + at, is_column[:, None] & (at < DEPTH), INTERPRETED)
        value = _codes(asked + at, is_token[:, None], INTERPRETED)
        if TURNED:
            sums += tl.dot(value, tl.trans(weight), input_precision="ieee") * scale[:, None]
        else:
            sums += tl.dot(weight, tl.trans(value), input_precision="ieee") * scale[None, :]
        is_more = group + 1 < GROUPS
        ahead = tl.load(sizes + group + 1, mask=is_token & is_more, other=0.0)
        scale = tl.load(factors + group + 1, mask=is_more, other=0.0) * ahead
    made = narrow(sums) if OUT_IS_BF16 else sums
    start = token.to(tl.int64) * out_stride
    if TURNED:
        mask = is_token[:, None] & is_column[None, :]
        tl.store(out + start[:, None] + column[None, :], made, mask=mask)
    else:
        mask = is_token[None, :] & is_column[:, None]
        tl.store(out + start[None, :] + column[:, None], made, mask=mask)
