"""A pytest plugin: `-p tests.support.interpreted` runs the cuda ops in Triton's interpreter.

It must be loaded before triton is. The interpreter turns arrays of one element into indexes, which
NumPy no longer does by itself; and where the device has no exceptions, NumPy warns.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

_PATCH_TENSOR = interpreter._patch_lang_tensor


def _patch_tensor(tensor: type, scope: Any) -> None:
    _PATCH_TENSOR(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Fewer of what is alike, unless all is asked for: a device takes no time for it. Of each
    function's cases only every INTERPRET_EVERY-th is run, the first one always."""
    every, met = int(os.environ.get("INTERPRET_EVERY", "1")), Counter[str]()
    for item in [*items]:
        if hasattr(item.module, "CAST_ROWS") and "INTERPRET_ALL" not in os.environ:
            item.module.CAST_ROWS = 512
        name = item.nodeid.partition("[")[0]
        if met[name] % every:
            items.remove(item)
        met[name] += 1


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning")


warnings.simplefilter("ignore", RuntimeWarning)
