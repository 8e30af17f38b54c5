"""Which module needs which, and the circles among them.

An import counts wherever it stands: one inside a function only hides a circle until the function is
called. So does the name of a module in a text, be it `module:name`, where the file calls
`import_module`: that is an import which the import statements do not show. What stands under
TYPE_CHECKING does not count: it never runs, and a module that reads its annotations when it runs,
as msgspec and cyclopts do, has to import them outside.

To import `ess.a.b` runs `ess.a` first, so who needs the one needs the other; a module of the folder
itself does not need its folder's `__init__` by being there.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping

from tests.house.tree import running_nodes

Graph = Mapping[str, frozenset[str]]


def import_graph(sources: Mapping[str, str]) -> dict[str, frozenset[str]]:
    """`sources` by module name -> the modules of `sources` that each one needs."""
    return {
        module: frozenset(
            needed
            for name in imported(text, sources)
            for needed in (name, *(set(ancestors(name)) - set(ancestors(module))))
            if needed in sources and needed != module
        )
        for module, text in sources.items()
    }


def ancestors(module: str) -> list[str]:
    """Of ess.pool.lru: ess and ess.pool."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def imported(text: str, sources: Container[str]) -> Iterator[str]:
    """Names of modules, some of which are not ours."""
    for node in running_nodes(text):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"line {node.lineno}: import it by its whole name"
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield module if module in sources else str(node.module)
            case ast.Constant(value=str() as name) if "import_module" in text:
                yield name.partition(":")[0]


def circles(graph: Graph) -> list[list[str]]:
    """Every set of modules that need one another, as a walk around it by its shortest way."""
    reached = {module: reachable(graph, module) for module in graph}
    walks, seen = [], set()
    for module in sorted(graph):
        if module in reached[module] and module not in seen:
            together = {other for other in reached[module] if module in reached[other]}
            seen |= together
            walks.append(shortest_walk(graph, module))
    return walks


def reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        fresh = graph[waiting.pop()] - seen
        seen |= fresh
        waiting.extend(fresh)
    return seen


def shortest_walk(graph: Graph, start: str) -> list[str]:
    """From a module in a circle back to itself."""
    walks = [[start]]
    seen: set[str] = set()
    while True:
        walk = walks.pop(0)
        for needed in sorted(graph[walk[-1]]):
            if needed == start:
                return [*walk, start]
            if needed not in seen:
                seen.add(needed)
                walks.append([*walk, needed])
