"""`python csrc/build.py build_ext --inplace`: the native library, a source on each core.

By itself setuptools compiles one source after the other: a minute, of which a machine with 16 cores
needs a quarter. After an interruption it compiles all sources again. Here an object stays if a run
has finished it, from the same texts by the same command; a file beside it has their digest.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext


class SideBySide(build_ext):
    def build_extensions(self) -> None:
        self.compiler.compile = functools.partial(compiled, self.compiler.compile)
        self.compiler._compile = functools.partial(self.keep, self.compiler._compile)
        super().build_extensions()

    def keep(self, compile_one: Callable[..., None], made: str, source: str, *options: Any) -> None:
        """Compiles the object `made`, unless an earlier run has finished it by the same command.
        The compiler's programs are part of that command, and contain CXX and CFLAGS."""
        programs = [getattr(self.compiler, name) for name in self.compiler.executables]
        wanted, told = made_of(source, (programs, options)), Path(f"{made}.of")
        is_whole = Path(made).exists() and told.exists() and told.read_text() == wanted
        if is_whole and not self.force:
            return
        told.unlink(missing_ok=True)
        compile_one(made, source, *options)
        told.write_text(wanted)


def compiled(
    compile_some: Callable[..., list[str]], sources: Sequence[str], **given: Any
) -> list[str]:
    """The objects, in the order of the sources."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = pool.map(lambda source: compile_some([source], **given), sources)
        return [file for objects in made for file in objects]


def made_of(source: str, command: tuple[Any, ...]) -> str:
    """The digest of all that an object depends on; any source may include any header."""
    digest = hashlib.sha256(repr(command).encode())
    for path in (Path(source), *sorted(Path(__file__).parent.rglob("*.h"))):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


if __name__ == "__main__":
    setup(cmdclass={"build_ext": SideBySide})
