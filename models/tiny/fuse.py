"""The elementwise chains of a training step, compiled where a C++ compiler is at hand.

Everything works without one, a fifth slower. `torch.compiler.set_stance("force_eager")` turns it
off, which is what a short run wants: the first calls cost half a minute.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import torch._dynamo.config

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
CHAIN_VARIANTS_MAX = 64


def fused(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    torch._dynamo.config.recompile_limit = CHAIN_VARIANTS_MAX
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        return function
    return torch.compile(function, dynamic=True)
