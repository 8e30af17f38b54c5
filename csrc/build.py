"""`python csrc/build.py build_ext --inplace`: the native library, a source on each core.

By itself setuptools compiles one source after the other: a minute, of which a machine with 16 cores
needs a quarter.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class SideBySide(build_ext):
    def build_extensions(self) -> None:
        self.compiler.compile = functools.partial(compiled, self.compiler.compile)
        super().build_extensions()


def compiled(
    compile_some: Callable[..., list[str]], sources: Sequence[str], **given: Any
) -> list[str]:
    """The objects, in the order of the sources."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda source: compile_some([source], **given), sources)
        return [file for objects in made for file in objects]


if __name__ == "__main__":
    setup(cmdclass={"build_ext": SideBySide})
