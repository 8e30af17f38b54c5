"""Optional libraries: imported by name, used only after a probe, refused with all the reasons."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
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
    module = importlib.import_module(name)
    missing = [function for function in functions if not hasattr(module, function)]
    if missing:
        raise Unavailable(f"it has no {', '.join(missing)}")
    version = getattr(module, "__version__", "of unknown version")
    return Library(module, f"{name} {version}")
