"""The native library with tile registers that emulated_tiles.h plays, in place of the real one.

As a plugin of pytest (`-p tests.support.tiled`) it loads the library that TILED_LIBRARY names.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support.kept_objects import ROOT, kept_object

HEADER = Path(__file__).resolve().parent / "emulated_tiles.h"
VARIABLE = "TILED_LIBRARY"
OWN_FLAGS = ("-O1", "-fPIC", f'-DESS_EMULATED_TILES="{HEADER}"')
OTHER = ("kernels_amx", "module")
"""What the header changes."""


def build(folder: Path) -> Path:
    """Compiles the sources that pyproject.toml lists. Of those that are as in the package it takes
    what building that has left, if no source is newer."""
    [extension] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "ext-modules"
    ]
    flags = [flag for flag in extension["extra-compile-args"] if flag != "-O3"]
    include = f"-I{sys.base_prefix}/include/python{sys.version_info[0]}.{sys.version_info[1]}"

    def compiled(source: str) -> str:
        kept = kept_object(source)
        if kept is not None and kept.stem not in OTHER:
            return str(kept)
        target = folder / f"{Path(source).stem}.o"
        run("g++", *flags, *OWN_FLAGS, include, "-c", str(ROOT / source), "-o", str(target))
        return str(target)

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, extension["sources"]))
    library = folder / "tiled.so"
    run("g++", "-shared", "-pthread", *objects, "-o", str(library))
    return library


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def install(library: str) -> None:
    spec = importlib.util.spec_from_file_location("ess._native", library)
    assert spec is not None
    sys.modules["ess._native"] = importlib.util.module_from_spec(spec)


if os.environ.get(VARIABLE):
    install(os.environ[VARIABLE])
