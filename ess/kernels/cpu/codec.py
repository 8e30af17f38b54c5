"""Rows and keys to bytes and back, compiled where the library is there, NumPy where it is not.

The bytes are those of `ess.kernels.reference.formats`. Arrays are trusted: elements of a row lie
side by side, rows any distance apart. One thread; the GIL is released for the length of a call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from ess.kernels.cpu import native
from ess.kernels.cpu.records import Strides
from ess.kernels.reference import formats
from ess.kernels.reference.formats import Array, Bytes, Keys
from ess.layout import BYTE_SCALED, SCALE_GROUP, IndexCodec, RowCodec


@functools.cache
def _function(name: str) -> Callable[..., None]:
    return native.function(name, [ctypes.POINTER(Strides), *[ctypes.c_void_p] * 4])


def encode_rows(values: Array, codec: RowCodec, out: Bytes) -> Bytes:
    """Values [n, latent + rope], float32 or bfloat16 bits, into rows [n, row_bytes]."""
    if codec.form == "f32" or not native.available():
        return formats.encode_rows(values, codec, out)
    if codec.form == "fp8_64":
        out[:, codec.latent_dim + codec.plain_dim + codec.scale_count :] = 0
    _call("ess_codec_encode", values, codec, out)
    return out


def decode_rows(rows: Bytes, codec: RowCodec, out: Array) -> Array:
    """Rows [n, row_bytes] into values [n, latent + rope], float32 or bfloat16 bits."""
    if codec.form == "f32" or not native.available():
        return formats.decode_rows(rows, codec, out)
    _call("ess_codec_decode", out, codec, rows)
    return out


def encode_keys(values: Array, codec: IndexCodec) -> Keys:
    """Keys [n, key_dim], float32 or bfloat16 bits."""
    if codec.form == "f32" or not native.available():
        return formats.encode_keys(values, codec)
    count = len(values)
    keys = Keys(np.empty((count, codec.key_dim), np.uint8), np.empty(count, np.float32))
    form = _form(values, count, 1, codec.key_dim, 0, codec.scale_format == "ue8m0")
    form.row_stride, form.scale_stride = codec.key_dim, 4
    addresses = (native.address(array) for array in (values, *keys))
    _function("ess_codec_encode")(form, *addresses, None)
    return keys


def _call(name: str, values: Array, codec: RowCodec, rows: Bytes) -> None:
    """The fp8 forms, or the bf16 form as a tail without groups."""
    group_count = codec.scale_count
    if codec.form == "fp8_64":
        return _call_by_bytes(name, values, codec, rows)
    tail_count = codec.rope_dim if group_count else codec.latent_dim + codec.rope_dim
    form = _form(values, len(rows), group_count, SCALE_GROUP, tail_count, True)
    form.row_stride = form.scale_stride = rows.strides[0]
    codes = native.address(rows)
    scales = codes + group_count * SCALE_GROUP
    _function(name)(form, native.address(values), codes, scales, scales + 4 * group_count)


def _call_by_bytes(name: str, values: Array, codec: RowCodec, rows: Bytes) -> None:
    coded = codec.scale_count * BYTE_SCALED
    form = _form(values, len(rows), codec.scale_count, BYTE_SCALED, codec.plain_dim, True)
    form.row_stride = form.scale_stride = rows.strides[0]
    form.scale_is_byte = True
    codes, scales_from = native.address(rows), coded + 2 * codec.plain_dim
    _function(name)(form, native.address(values), codes, codes + scales_from, codes + coded)


def _form(
    values: Array, rows: int, groups: int, size: int, tail: int, power_of_two: bool
) -> Strides:
    is_bf16 = values.dtype == np.uint16
    return Strides(rows, groups, size, tail, power_of_two, is_bf16, values.strides[0])


def implementation() -> str:
    """The words of the start line for what runs."""
    return f"native {native.isa()}" if native.available() else "numpy"
