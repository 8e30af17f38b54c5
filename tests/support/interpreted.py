"""A pytest plugin: `-p tests.support.interpreted` runs the cuda ops in Triton's interpreter.

It must be loaded before triton is. The interpreter turns arrays of one element into indexes, which
NumPy no longer does by itself; and where the device has no exceptions, NumPy warns.

Most of the interpreter's time went into what has no effect. It is the same program without that:

- It puts its own functions into Triton's language at each launch and each call of a device
  function, and takes them out at the end of a launch. Here nothing is compiled, so they stay.
- It computes every sum and product of integers again in 64 bits, for an assertion that is looked at
  with `debug` alone, which it has not.
- It makes a table of types whenever it asks for NumPy's, and describes each tuple of sizes.
"""

from __future__ import annotations

import functools
import os
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"

import triton.language as tl
from triton.runtime import interpreter

_PATCH_TENSOR, _PATCH_LANG = interpreter._patch_lang_tensor, interpreter._patch_lang
_NUMPY_TYPE = functools.cache(interpreter._get_np_dtype)
POINTER = np.dtype(np.uint64)
_LANGUAGE = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def _patch_tensor(tensor: type, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@functools.cache
def _patch_once() -> None:
    _PATCH_LANG(_LANGUAGE)


def _patch(fn: Any) -> Any:
    _patch_once()
    return interpreter._LangPatchScope()


def _numpy_type(told: Any) -> Any:
    scalar = told.element_ty if isinstance(told, tl.block_type) else told
    return POINTER if isinstance(scalar, tl.pointer_type) else _NUMPY_TYPE(scalar)


def _tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = [*args]
    if type is not None:
        self.type = type if isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    return tl.core._type_for_tuple_values(self.values)


interpreter._patch_lang_tensor = _patch_tensor
interpreter._patch_lang = _patch
interpreter._get_np_dtype = _numpy_type
_BUILDER = interpreter.interpreter_builder
_BUILDER.options = replace(_BUILDER.options, sanitize_overflow=_BUILDER.options.debug)
tl.core.tuple.__init__ = _tuple
tl.core.tuple.type = functools.cached_property(_type_of_tuple)
tl.core.tuple.type.__set_name__(tl.core.tuple, "type")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Fewer similar values, unless all are wanted: a device takes no time for it."""
    for item in items:
        if hasattr(item.module, "CAST_ROWS") and "INTERPRET_ALL" not in os.environ:
            item.module.CAST_ROWS = 512


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


warnings.simplefilter("ignore", RuntimeWarning)
