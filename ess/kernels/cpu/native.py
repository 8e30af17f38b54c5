"""The compiled CPU library: a plain C ABI, bound through ctypes, which releases the GIL.

`ess._native` is an ordinary extension module only so that any installer can build and find it;
Python calls its C functions by name. Where no compiler was at hand the module is missing: callers
ask `available()` and fall back to NumPy, and `why_missing()` is the line to print.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, Unavailable

ISA: Final = "ESS_ISA"
ISA_NAMES: Final = ("portable", "avx2", "avx512", "avx512_bf16")


def check_isa() -> None:
    """BadInput where ESS_ISA names no instruction set that the library knows."""
    if (asked := os.environ.get(ISA)) and asked not in ISA_NAMES:
        raise BadInput(f"{ISA} is {asked!r:.40}, must be one of {', '.join(ISA_NAMES)}")


@functools.cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("ess._native")
    if spec is None or spec.origin is None:
        return None
    check_isa()
    return ctypes.CDLL(spec.origin)


def available() -> bool:
    return _library() is not None


def why_missing() -> str:
    return "ess._native is not built (no C++ compiler at install time): NumPy paths are used"


def function(name: str, argtypes: list[Any], restype: Any = None) -> Callable[..., Any]:
    """A C function with its types set; raises Unavailable when the library is missing."""
    library = _library()
    if library is None:
        raise Unavailable(why_missing())
    symbol = getattr(library, name)
    symbol.argtypes = argtypes
    symbol.restype = restype
    return symbol  # type: ignore[no-any-return]


def address(array: npt.NDArray[Any]) -> int:
    """Where the first element lies, 0 if there is none. `array.ctypes.data` costs microseconds, of
    which a step would make dozens."""
    at: int = _address()(array)
    return at


@functools.cache
def _address() -> Callable[[npt.NDArray[Any]], int]:
    if not available():
        return lambda array: int(array.ctypes.data) if array.size else 0
    at: Callable[[npt.NDArray[Any]], int] = importlib.import_module("ess._native").address
    return at


def isa() -> str:
    """The widest instruction set that the library uses on this machine."""
    name = function("ess_isa", [], ctypes.c_char_p)()
    return str(name.decode())


def kernels() -> str:
    """The set of compute kernels: `isa()`, or `avx512_bf16` where that is there too."""
    name = function("ess_kernels_name", [], ctypes.c_char_p)()
    return str(name.decode())


def has_tiles() -> bool:
    """Whether tile registers (AMX) take products of bf16: of stages, attention, index logits."""
    return bool(function("ess_has_tiles", [], ctypes.c_int32)())


def contiguous(array: npt.NDArray[Any], dtype: npt.DTypeLike) -> bool:
    return array.dtype == np.dtype(dtype) and array.flags.c_contiguous
