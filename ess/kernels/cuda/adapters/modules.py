"""Optional libraries: imported by name, used only after a probe, refused with all the reasons."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ess.errors import Unavailable

Adapter = TypeVar("Adapter")


class Library(NamedTuple):
    """A module and a line for people: its name and version."""

    module: Any
    line: str


def first_that(
    names: Sequence[str], functions: Sequence[str], make: Callable[[Library], Adapter]
) -> Adapter:
    """The adapter of the first module that is there, has the functions, and passes its probe.

    Other libraries fail in ways of their own, at import and in the first call, so any failure is
    a reason to try the next.
    """
    reasons = []
    for name in names:
        try:
            return make(_find(name, functions))
        except (Exception, SystemExit) as error:
            message = str(error).strip() if isinstance(error, Exception) else f"SystemExit {error}"
            message = message or type(error).__name__
            reasons.append(f"{name}: {message.splitlines()[0]}")
    raise Unavailable("; ".join(reasons))


def name_of(module: Any, names: Sequence[str]) -> str:
    """The first of these names of one function that the module has: versions differ in it."""
    for name in names:
        if hasattr(module, name):
            return name
    raise Unavailable(f"it has neither {' nor '.join(names)}")


def _find(name: str, functions: Sequence[str]) -> Library:
    _bind(name)
    module = importlib.import_module(name)
    missing = [function for function in functions if not hasattr(module, function)]
    if missing:
        raise Unavailable(f"it has no {', '.join(missing)}")
    version = getattr(module, "__version__", "of unknown version")
    return Library(module, f"{name} {version}")


def _bind(name: str) -> None:
    """apache-tvm-ffi leaves the symbols of a library to their first calls, and a call of a symbol
    that is nowhere ends the process: sgl-deep-gemm for another torch would do so. ctypes binds all
    symbols at once and raises instead; a library that has been loaded like this stays bound."""
    if name in sys.modules or importlib.util.find_spec("tvm_ffi") is None:
        return
    importlib.import_module("tvm_ffi")
    spec = importlib.util.find_spec(name)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (library := Path(folder, "_C.so")).exists():
            ctypes.CDLL(str(library))
