"""The numbers by which the code is judged, as the tree is now.

python -m tests.house
"""

from __future__ import annotations

import ast
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import ess
from tests.house import allowed
from tests.house.circles import circles, import_graph
from tests.house.rules import vague_loops
from tests.house.tree import (
    Function,
    folder_sizes,
    functions,
    layer_of,
    line_count,
    module_of,
    nodes,
    package_texts,
    parsed,
)
from tests.house.uses import unused_in_tree

STATEFUL = ("ess/pool", "ess/overlap", "ess/door", "ess/engine", "ess/flashtrans")


def main() -> None:
    sources = package_texts()
    for title, lines in report(sources):
        print(title)
        print("\n".join(f"  {line}" for line in lines) or "  none")


def report(sources: dict[str, str]) -> Iterator[tuple[str, Sequence[str]]]:
    measured = [function for text in sources.values() for function in functions(parsed(text))]
    yield (
        "lines: median / 90 % / most",
        [
            f"functions {spread([line_count(function) for function in measured])}",
            f"files     {spread([text.count(chr(10)) for text in sources.values()])}",
        ],
    )
    yield "lines of code by layer", lines_by_layer(sources)
    yield "asserts per function", [assert_share(sources, folder) for folder in STATEFUL]
    yield "classes that change their own attributes, without check()", unaudited(sources)
    yield "public names of ess", [f"{len(ess.__all__)}: {' '.join(ess.__all__)}"]
    yield "public members of Offload", [f"{len(members := public_members())}: {' '.join(members)}"]
    widest = folder_sizes().most_common(12)
    yield "modules per folder, the widest", [f"{count:3} {folder}" for folder, count in widest]
    graph = import_graph({module_of(name): text for name, text in sources.items()})
    walks = circles(graph)
    yield "circles", [" -> ".join(walk) for walk in walks]
    unused = {str(name) for name in unused_in_tree()}
    yield "names that only tests use", sorted(unused)
    yield "loops over `one`", loops(sources)
    yield "struck off tests/house/allowed.py can be", stale(unused)


def spread(counts: list[int]) -> str:
    tenths = statistics.quantiles(counts, n=10)
    return f"{statistics.median(counts):.0f} / {tenths[-1]:.0f} / {max(counts)} of {len(counts)}"


def lines_by_layer(sources: dict[str, str]) -> list[str]:
    """Lines that are neither empty nor a comment; documentation counts."""
    lines: Counter[str] = Counter()
    for name, text in sources.items():
        kept = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
        lines[layer_of(name)] += len(kept)
    total = f"{sum(lines.values()):6} in all"
    return [f"{count:6} {layer}" for layer, count in lines.most_common()] + [total]


def assert_share(sources: dict[str, str], folder: str) -> str:
    texts = [text for name, text in sources.items() if name.startswith(f"{folder}/")]
    function_count = sum(has_body(node) for text in texts for node in functions(parsed(text)))
    assert_count = sum(isinstance(node, ast.Assert) for text in texts for node in nodes(text))
    share = assert_count / function_count
    return f"{share:.2f} {folder}: {assert_count} asserts, {function_count} functions"


def has_body(function: Function) -> bool:
    """Not a mere declaration, as those of a Protocol are."""
    return not all(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for node in function.body
    )


def unaudited(sources: dict[str, str]) -> list[str]:
    """A class that changes an attribute after `__init__` owns state, and should audit it."""
    return [
        f"{module_of(name)}:{owner.name}"
        for name, text in sources.items()
        if name.startswith(STATEFUL)
        for owner in parsed(text).body
        if isinstance(owner, ast.ClassDef) and owns_state(owner)
    ]


def owns_state(owner: ast.ClassDef) -> bool:
    methods = [node for node in owner.body if isinstance(node, Function)]
    changes = any(
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
        for method in methods
        if method.name not in ("__init__", "__post_init__")
        for node in ast.walk(method)
    )
    return changes and "check" not in {method.name for method in methods}


def public_members() -> list[str]:
    return sorted(name for name in dir(ess.Offload) if not name.startswith("_"))


def loops(sources: dict[str, str]) -> list[str]:
    counts: defaultdict[str, int] = defaultdict(int)
    for name, text in sources.items():
        counts[layer_of(name)] += len(vague_loops(text))
    return [f"{count:3} {layer}" for layer, count in sorted(counts.items()) if count]


def stale(unused: set[str]) -> list[str]:
    return sorted(set(allowed.KEPT) - unused)


if __name__ == "__main__":
    main()
