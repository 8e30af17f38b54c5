"""Runs a Python console script that ends with its parent, however the parent ends.

    python -m ess.server.commands.pd.leashed             (a Program as one JSON line on stdin)

Its arguments come over stdin, not on the command line: lists of processes show no key.
"""

from __future__ import annotations

import importlib
import os
import sys

import msgspec

from ess.engine.process.lifeline import die_with_parent


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """`home` is "module:function", of a console script; `parent` is the starter's pid."""

    home: str
    words: tuple[str, ...]
    parent: int


def main() -> int:
    die_with_parent()
    with open(0, "rb", buffering=0, closefd=False) as told:
        program = msgspec.json.decode(told.readline(), type=Program)
    if os.getppid() != program.parent:  # it ended before die_with_parent took effect
        return 1
    module, _, name = program.home.partition(":")
    sys.argv = [module.partition(".")[0], *program.words]
    function = getattr(importlib.import_module(module), name)
    return function() or 0


if __name__ == "__main__":
    sys.exit(main())
