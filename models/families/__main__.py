"""`python -m ess.models.families`: how many lines of code each family is made of."""

from __future__ import annotations

import ast
import io
import tokenize
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ess.models.registry import MODULES

ROOMS: Final = ("ess.models.families.", "ess.models.compressed.", "ess.models.guest.")
QUIET: Final = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def source_of(module: str) -> str:
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    return Path(spec.origin).read_text()


def code_lines(source: str) -> int:
    """Lines that are neither empty nor a comment nor a docstring."""
    quiet: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            quiet |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    used = {
        line
        for token in tokens
        if token.type not in (*QUIET, tokenize.ENDMARKER)
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(used - quiet)


def needed(module: str) -> set[str]:
    """Modules of the families' rooms that it imports, and those that these do."""
    modules: set[str] = set()
    left = [module]
    while left:
        for node in ast.walk(ast.parse(source_of(left.pop()))):
            name = node.module if isinstance(node, ast.ImportFrom) else None
            if name is not None and name.startswith(ROOMS) and name not in modules:
                modules.add(name)
                left.append(name)
    return modules - {module}


def main() -> None:
    families = {kind: name for kind, name in MODULES.items() if not kind.endswith("_text")}
    uses = {kind: needed(name) for kind, name in families.items()}
    readers = set(families.values())
    print(f"{'model_type':<16} {'its file':>8} {'layers':>7} {'others have too':>16}")
    for kind, name in families.items():
        rest = {room for other, rooms in uses.items() if other != kind for room in rooms}
        own = sum(code_lines(source_of(room)) for room in uses[kind] - rest - readers)
        shared = sum(code_lines(source_of(room)) for room in uses[kind] & (rest | readers))
        print(f"{kind:<16} {code_lines(source_of(name)):>8} {own:>7} {shared:>16}")


if __name__ == "__main__":
    main()
