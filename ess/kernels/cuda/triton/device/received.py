"""Lines of tokens that have come to their experts, and the sums that go back.

A program has a line, or a stretch of a sum's columns. One whose line lies behind the last end has
nothing to do: how many there are is known on the device alone.
"""

import triton
import triton.language as tl

from ess.kernels.cuda.triton.device.floats import load, narrow


@triton.jit
def take(tokens, lines, ends, out, last, token_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The bits of a line, of any type."""
    line = tl.program_id(0).to(tl.int64)
    if line < tl.load(ends + last):
        start = tokens + tl.load(lines + line) * token_stride
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            value = tl.load(start + column, mask=column < WIDTH, other=0)
            tl.store(out + line * WIDTH + column, value, mask=column < WIDTH)


@triton.jit
def gate(
    both, ends, out, last, limit,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HAS_LIMIT: tl.constexpr, IS_BF16: tl.constexpr,
):  # fmt: skip
    """silu of the first half of a line times the second."""
    line = tl.program_id(0).to(tl.int64)
    if line < tl.load(ends + last):
        start = both + line * 2 * WIDTH
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            mask = column < WIDTH
            front = load(start + column, mask, IS_BF16)
            up = load(start + WIDTH + column, mask, IS_BF16)
            if HAS_LIMIT:
                front = tl.where(front > limit, limit, front)
                up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            value = front / (1.0 + tl.exp(-front)) * up
            at = out + line * WIDTH + column
            tl.store(at, narrow(value) if IS_BF16 else value, mask=mask)


@triton.jit
def add(
    made, places, weights, out, made_stride,
    EACH: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    IS_BF16: tl.constexpr, OUT_IS_BF16: tl.constexpr,
):  # fmt: skip
    """A token's lines in order, each weighed; those that are not here are not read."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < WIDTH
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in range(EACH):
        place = tl.load(places + token * EACH + number)
        if place >= 0:
            weight = tl.load(weights + token * EACH + number)
            total += load(made + place * made_stride + column, mask, IS_BF16) * weight
    at = out + token * WIDTH + column
    tl.store(at, narrow(total) if OUT_IS_BF16 else total, mask=mask)
