"""What rows and index keys are, in NumPy, from the definitions of their formats.

Every other implementation agrees with this one byte for byte; nothing here was taken from theirs.
bfloat16 arrays are `uint16` bit patterns, e4m3 arrays are `uint8` codes.

**Floats.** e4m3fn has four exponent bits with bias 7, three mantissa bits, no infinity, one NaN
magnitude (0x7F) and a largest value of 448. Encoding takes the nearest value, a tie takes the even
code, and what lies nearer to the place of the NaN code (above 464) becomes NaN, infinity included.
Some casts clamp there instead, torch's CPU cast from 2.13 on among them, so no codec may ever come
near it: scaled values stay within 448. A bfloat16 NaN is always written as 0x7FC0.

**Groups.** The scale of a group is amax / 448, where amax counts as at least 1e-4. Rounded up to a
power of two it is exact in bfloat16, which is how some kernels read it. A group with a NaN or an
infinity in it is NaN throughout, scale and codes: a broken value is seen by every reader, also by
one that takes the NaN code for 480. Values within 1/32 of the end of float32 may decode to
infinity.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ess.layout import BYTE_SCALED, SCALE_GROUP, IndexCodec, RowCodec

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]

AMAX_MIN: Final = np.float32(1e-4)
E4M3_MAX: Final = np.float32(448)
NAN_CODE: Final = 0x7F


class Keys(NamedTuple):
    """Encoded index keys: bytes of values [n, value_bytes], float32 scales [n], 1 where plain."""

    values: Bytes
    scales: Floats


def _e4m3_magnitudes() -> Floats:
    """Codes 0..127 by the definition; 127 as the number that its bits would have been."""
    code = np.arange(128)
    exponent, mantissa = code >> 3, code & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    return np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal).astype(np.float32)


def e4m3_encode(values: Floats) -> Bytes:
    """The nearest code, ties to the even one. All midpoints are exact in float32."""
    magnitudes = _e4m3_magnitudes()
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = np.searchsorted(midpoints, np.abs(values), side="left")
    above = np.searchsorted(midpoints, np.abs(values), side="right")
    code = np.where(below == above, below, below + (below & 1))
    signed: Bytes = (code | np.signbit(values) << 7).astype(np.uint8)
    return signed


def e4m3_decode(codes: Bytes) -> Floats:
    magnitudes = _e4m3_magnitudes()
    magnitudes[NAN_CODE] = np.nan
    values: Floats = np.concatenate([magnitudes, -magnitudes])[codes]
    return values


def bf16_round(values: Floats) -> Halves:
    """Nearest, ties to even; every NaN becomes 0x7FC0."""
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def bf16_widen(bits: Halves) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def widen(values: Array) -> Floats:
    return bf16_widen(values) if values.dtype == np.uint16 else values.astype(np.float32)


def narrow(values: Array) -> Halves:
    return values if values.dtype == np.uint16 else bf16_round(values)


def group_scales(amax: Floats, *, power_of_two: bool) -> Floats:
    """NaN where amax is NaN or infinite."""
    scales = np.maximum(amax, AMAX_MIN) / E4M3_MAX
    if power_of_two:
        mantissa, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (mantissa == 0.5))
    return np.where(np.isfinite(amax), scales, np.float32(np.nan))


def encode_groups(groups: Floats, *, power_of_two: bool) -> tuple[Bytes, Floats]:
    """Codes [..., size] and scales [...] of groups [..., size]."""
    with np.errstate(invalid="ignore"):
        scales = group_scales(np.abs(groups).max(axis=-1), power_of_two=power_of_two)
        codes = e4m3_encode(groups / scales[..., None])
    codes[np.isnan(scales)] = NAN_CODE
    return codes, scales


def encode_rows(values: Array, codec: RowCodec, out: Bytes) -> Bytes:
    """Values [n, latent + rope], float32 or bfloat16 bits, into rows [n, row_bytes]."""
    if codec.form == "fp8_64":
        return _encode_by_bytes(values, codec, out)
    if codec.form != "fp8":
        plain = widen(values) if codec.form == "f32" else narrow(values)
        out[:] = np.ascontiguousarray(plain).view(np.uint8)
        return out
    latent, rope = np.split(values, [codec.latent_dim], axis=1)
    groups = widen(latent).reshape(len(values), codec.scale_count, SCALE_GROUP)
    codes, scales = encode_groups(groups, power_of_two=True)
    parts = codes.reshape(latent.shape), scales, np.ascontiguousarray(narrow(rope))
    np.concatenate([part.view(np.uint8) for part in parts], axis=1, out=out)
    return out


def decode_rows(rows: Bytes, codec: RowCodec, out: Array) -> Array:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16 bits."""
    reads = {"fp8": _dequantised, "fp8_64": _decode_by_bytes}.get(codec.form, _plain)
    plain = reads(rows, codec)
    out[:] = narrow(plain) if out.dtype == np.uint16 else widen(plain)
    return out


def _plain(rows: Bytes, codec: RowCodec) -> Array:
    rows = np.ascontiguousarray(rows)
    return rows.view(np.float32) if codec.form == "f32" else rows.view(np.uint16)


def _dequantised(rows: Bytes, codec: RowCodec) -> Floats:
    """A scale is the writer's word: any float32 is multiplied, an infinity times 0 is NaN."""
    ends = [codec.latent_dim, codec.latent_dim + 4 * codec.scale_count]
    codes, scales, rope = (np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1))
    groups = e4m3_decode(codes).reshape(len(rows), codec.scale_count, SCALE_GROUP)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        latent = groups * scales.view(np.float32)[..., None]
    return np.concatenate([latent.reshape(codes.shape), bf16_widen(rope.view(np.uint16))], axis=1)


def _encode_by_bytes(values: Array, codec: RowCodec, out: Bytes) -> Bytes:
    """e8m0: the exponent of a power of two, with the bias of a float; 255 is NaN."""
    coded, tail = np.split(values, [codec.latent_dim - codec.plain_dim], axis=1)
    groups = widen(coded).reshape(len(values), codec.scale_count, BYTE_SCALED)
    codes, scales = encode_groups(groups, power_of_two=True)
    exponents = (scales.view(np.uint32) >> 23).astype(np.uint8)
    parts = codes.reshape(coded.shape), np.ascontiguousarray(narrow(tail)).view(np.uint8), exponents
    whole = np.concatenate(parts, axis=1)
    out[:, : whole.shape[1]], out[:, whole.shape[1] :] = whole, 0
    return out


def _decode_by_bytes(rows: Bytes, codec: RowCodec) -> Floats:
    coded = codec.latent_dim - codec.plain_dim
    ends = np.cumsum([coded, 2 * codec.plain_dim, codec.scale_count])
    parts = [np.ascontiguousarray(part) for part in np.split(rows, ends, axis=1)]
    codes, tail, exponents = parts[:3]
    bits = np.where(exponents == 0, 1 << 22, exponents.astype(np.int64) << 23)
    scales = np.where(exponents == 255, np.nan, bits.astype(np.uint32).view(np.float32))
    scales = scales.astype(np.float32)
    groups = e4m3_decode(codes).reshape(len(rows), codec.scale_count, BYTE_SCALED)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        latent = groups * scales[..., None]
    return np.concatenate([latent.reshape(codes.shape), bf16_widen(tail.view(np.uint16))], axis=1)


def encode_keys(values: Array, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16 bits; the float32 form keeps them, with scale 1."""
    plain = widen(values)
    if codec.form == "f32":
        return Keys(plain.view(np.uint8), np.ones(len(plain), np.float32))
    return Keys(*encode_groups(plain, power_of_two=codec.scale_format == "ue8m0"))
