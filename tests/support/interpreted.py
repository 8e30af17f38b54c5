"""A pytest plugin: `-p tests.support.interpreted` runs the cuda ops in Triton's interpreter.

It must be loaded before triton is. The interpreter turns arrays of one element into indexes, which
NumPy no longer does by itself; and where the device has no exceptions, NumPy warns.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_PATCH_TENSOR = interpreter._patch_lang_tensor


def _patch_tensor(tensor: type, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Fewer of what is alike, unless all is asked for: a device takes no time for it."""
    for item in items:
        if hasattr(item.module, "CAST_ROWS") and "INTERPRET_ALL" not in os.environ:
            item.module.CAST_ROWS = 512


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


warnings.simplefilter("ignore", RuntimeWarning)
