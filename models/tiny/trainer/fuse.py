"""The elementwise chains of a training step, compiled where a C++ compiler is at hand.

Small tensors run as written, because compiling a chain costs seconds; so does everything on a
machine without a compiler, a fifth slower. Nothing is compiled, or even imported for it, before
the first large call.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

WORTH_FUSING: Final = 1 << 17
CHAIN_VARIANTS_MAX: Final = 64


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile `function` for calls whose first tensor has at least 128K elements."""

    @functools.cache
    def compiled() -> Callable[Arguments, Result]:
        if shutil.which("g++") is None and shutil.which("clang++") is None:
            return function
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = CHAIN_VARIANTS_MAX
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        first = args[0]
        large = isinstance(first, Tensor) and first.numel() >= WORTH_FUSING
        return (compiled() if large else function)(*args, **named)

    return call
