"""Floats as bits, so that every device and the interpreter round alike.

bfloat16 enters and leaves as its 16 bits: the interpreter has no bfloat16 that can be trusted.
Rounding is to nearest, ties to even, and a NaN that is made here is always the same one: the bytes
of a row then depend on its values alone.
"""

import triton
import triton.language as tl


@triton.jit
def widen(bits):
    """The float32 of 16 bits of bfloat16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def narrow(values):
    """The 16 bits of float32 rounded to bfloat16."""
    bits = values.to(tl.int32, bitcast=True)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)


@triton.jit
def load(at, mask, IS_BF16: tl.constexpr):
    """float32 of what lies there, which is 16 bits or float32; zero where the mask is not."""
    loaded = tl.load(at, mask=mask, other=0)
    return widen(loaded) if IS_BF16 else loaded


@triton.jit
def to_e4m3(values):
    """The code of float32 within +-448.

    From 2^-6 up the code is the upper bits of the float in a lower bias. Below, codes count steps
    of 2^-9, which is what one step of a float near 2^14 is: the addition rounds.
    """
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + (0x7FFFF + ((size >> 20) & 1))) >> 20) - (120 << 3)
    steps = size.to(tl.float32, bitcast=True) + 16384.0
    small = steps.to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x3C800000, normal, small)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_e4m3(codes, INTERPRETED: tl.constexpr):
    """float32. The interpreter reads the two codes that are no number as 480."""
    values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    if INTERPRETED:
        values = tl.where((codes & 0x7F) == 0x7F, float("nan"), values)
    return values


@triton.jit
def operand(at, mask, FORM: tl.constexpr, IN_BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """What lies there for a product: bfloat16, or float32 where sums have to be exact."""
    if FORM == "fp8":
        values = from_e4m3(tl.load(at, mask=mask, other=0), INTERPRETED)
        values = values.to(tl.bfloat16) if IN_BF16 else values
    elif FORM == "f32":
        values = tl.load(at, mask=mask, other=0.0)
    elif IN_BF16:
        values = tl.load(at.to(tl.pointer_type(tl.bfloat16)), mask=mask, other=0.0)
    else:
        values = widen(tl.load(at, mask=mask, other=0))
    return values


@triton.jit
def rising(values):
    """uint32 that compare as float32 do: both zeros alike, every NaN above all else."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    bits = tl.where(size == 0, 0, bits)
    bits = tl.where(size > 0x7F800000, 0x7FFFFFFF, bits)
    signed = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return signed.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def falling(seen):
    """The float32 that `rising` has made these of."""
    signed = (seen ^ 0x80000000).to(tl.int32, bitcast=True)
    return (signed ^ ((signed >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
