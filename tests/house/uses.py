"""Names of the packages that no command, server, library door or document ever reaches.

It finds code that only tests use. Such code looks alive because tests call it, and costs every
reader. The search starts from what users start, and follows names:

    roots    the names of `ess.__all__`, the two commands of pyproject.toml, modules that run by
             themselves (`if __name__ == "__main__"`), Python in docs/ and in README.md
    a root   or whatever else is reached makes its module load, so the module's bare statements run
    a name   is reached when something reached reads it: by itself, through an import, as an
             attribute of its module, or as a text "package.module:name"
    a module named in a text of a file that calls `import_module`, or handed on as a value, is open:
             of it everything counts as read that any attribute of unknown owner is called, or that
             a `getattr` can spell

A folder's `__init__` only passes names on. A public method counts as reached when anything reached
has an attribute of that name, or a text of it where the file calls `getattr`; so a common name
hides a dead method, but a live method is never reported. Methods whose class has a base from
outside of the tree may be called from there and are left out. Methods of classes in `ess.__all__`
are checked too: a method that neither our engine nor a document calls is unknown to users.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import ess
from tests.house.circles import imported
from tests.house.tree import ROOT, Function, module_of, nodes, package_texts, parsed, texts

Name = tuple[str, str]
"""A module and a name in it; the empty name is what the module does when it is loaded."""

PLAIN_BASES = {"NamedTuple", "Protocol", "Generic", "Enum", "IntEnum", "StrEnum", "Struct", "ABC"}
ENTRY = re.compile(r"ess(?:\.\w+)+:\w+")


@dataclass(slots=True)
class Reads:
    """What a piece of code reads: names, modules as values, attributes of unknown owners, texts,
    spelt patterns."""

    names: set[Name] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    texts: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Source:
    """One module: its definitions, what each of them reads, and where imported names come from."""

    module: str
    tree: ast.Module
    definitions: dict[str, list[ast.stmt]]
    bare: list[ast.stmt]
    imports: dict[str, Name]
    loads: frozenset[str]
    picks_by_name: bool


class Unused(NamedTuple):
    module: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


def unused_in_tree(kept: Iterable[str] = ()) -> list[Unused]:
    """What is `kept`, as `module:name`, counts as used, and so does what it uses."""
    called = {tuple(name.split(":")) for name in kept}
    return unused_names(
        {module_of(name): text for name, text in package_texts().items()},
        roots=dict(documents()),
        entries=entries() | called,
    )


def documents() -> Iterator[tuple[str, str]]:
    """Python that readers are told to run."""
    for name, text in texts(".py"):
        if name.startswith("docs/"):
            yield name, text
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    yield from ((f"README.md, block {number}", block) for number, block in enumerate(blocks))


def entries() -> set[Name]:
    """What the installed commands call, and the library door."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    called = {tuple(entry.split(":")) for entry in project["scripts"].values()}
    return {*called, *((home, name) for name, home in ess._HOME.items())}


def unused_names(
    sources: Mapping[str, str], *, roots: Mapping[str, str], entries: set[Name]
) -> list[Unused]:
    """All that is not reached from `roots`, texts by name, and from `entries`."""
    tree = {name: read_source(name, text, sources) for name, text in sources.items()}
    reader = Reached(tree)
    for name, text in roots.items():
        root = read_source(name, text, sources)
        reader.follow(root, [*root.bare, *of(root, root.definitions)])
    for module, name in entries:
        reader.reach(module, name)
    for module, source in tree.items():
        if "__main__" in {text for statement in source.bare for text in texts_in(statement)}:
            reader.reach(module, "")
    reader.settle()
    unused = [
        Unused(source.module, statements[0].lineno, name)
        for source in tree.values()
        if not source.module.endswith("__main__")
        for name, statements in source.definitions.items()
        if (source.module, name) not in reader.reached and not name.startswith("__")
    ]
    return sorted([*unused, *unused_methods(tree, reader)])


def unused_methods(tree: Mapping[str, Source], reader: Reached) -> Iterator[Unused]:
    for source in tree.values():
        for name, statements in source.definitions.items():
            owner = statements[0]
            if not isinstance(owner, ast.ClassDef) or (source.module, name) not in reader.reached:
                continue
            if reader.may_be_called_from_outside(source, owner):
                continue
            for node in owner.body:
                public = isinstance(node, Function) and not node.name.startswith("_")
                if public and not reader.reads_somewhere(node.name):
                    yield Unused(source.module, node.lineno, f"{name}.{node.name}")


class Reached:
    """Follows names until nothing new is reached."""

    def __init__(self, tree: Mapping[str, Source]) -> None:
        self._tree = tree
        self.reached: set[Name] = set()
        self.attributes: set[str] = set()
        self.texts: set[str] = set()
        self._patterns: set[str] = set()
        self._open: set[str] = set()

    def home(self, name: Name) -> Name:
        """Where a name that was passed on is defined."""
        module, inner = name
        source = self._tree.get(module)
        if source is None or inner in source.definitions or inner not in source.imports:
            return name
        return self.home(source.imports[inner])

    def reach(self, module: str, name: str) -> None:
        module, name = self.home((module, name))
        source = self._tree.get(module)
        if source is None or (module, name) in self.reached:
            return
        self.reached.add((module, name))
        if name:
            self.reach(module, "")
            self.follow(source, source.definitions.get(name, []))
        else:
            special = [name for name in source.definitions if name.startswith("__")]
            self.follow(source, [*source.bare, *of(source, special)])

    def follow(self, source: Source, statements: list[ast.stmt]) -> None:
        reads = read(source, statements)
        self._open |= source.loads | reads.modules
        for module in source.loads | reads.modules:
            self.reach(module, "")
        self.attributes |= reads.attributes
        self._patterns |= reads.patterns
        if source.picks_by_name:
            self.texts |= reads.texts
        for module, name in reads.names:
            self.reach(module, name)

    def settle(self) -> None:
        """Names of open modules are read as attributes of unknown owners."""
        before = -1
        while before != len(self.reached):
            before = len(self.reached)
            for module in sorted(self._open & set(self._tree)):
                for name in self._tree[module].definitions:
                    if self.reads_somewhere(name):
                        self.reach(module, name)

    def reads_somewhere(self, name: str) -> bool:
        spelt = any(re.fullmatch(pattern, name) for pattern in self._patterns)
        return spelt or name in self.attributes or name in self.texts

    def may_be_called_from_outside(self, source: Source, owner: ast.ClassDef) -> bool:
        for base in owner.bases:
            bare = base.value if isinstance(base, ast.Subscript) else base
            name = ast.unparse(bare).rpartition(".")[2]
            module, inner = self.home(source.imports.get(name, (source.module, name)))
            above = self._tree.get(module)
            if above is not None and inner in above.definitions:
                parent = above.definitions[inner][0]
                assert isinstance(parent, (ast.ClassDef, ast.Assign, ast.AnnAssign))
                if isinstance(parent, ast.ClassDef) and self.may_be_called_from_outside(
                    above, parent
                ):
                    return True
            elif name not in PLAIN_BASES:
                return True
        return False


def read_source(module: str, text: str, modules: Mapping[str, str]) -> Source:
    tree = parsed(text)
    definitions: dict[str, list[ast.stmt]] = {}
    bare = []
    for statement in tree.body:
        names = defined(statement)
        for name in names:
            definitions.setdefault(name, []).append(statement)
        if not names and not isinstance(statement, (ast.Import, ast.ImportFrom)):
            bare.append(statement)
    loads = {name for name in imported(text, modules) if name in modules}
    by_text = {
        node.value
        for node in nodes(text)
        if isinstance(node, ast.Constant) and node.value in modules
    }
    return Source(
        module=module,
        tree=tree,
        definitions=definitions,
        bare=bare,
        imports=dict(bound_names(text, modules)),
        loads=frozenset(by_text & loads),
        picks_by_name="getattr(" in text,
    )


def of(source: Source, names: Iterable[str]) -> list[ast.stmt]:
    return [statement for name in names for statement in source.definitions[name]]


def defined(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [] if registers(statement) else [name]
        case ast.Assign(targets=targets):
            return [node.id for target in targets for node in stored(target)]
        case ast.AnnAssign(target=target):
            return [node.id for node in stored(target)]
    return []


def registers(statement: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """`@app.command`: the decorator takes the function to where it is used."""
    verbs = {"command", "default", "register", "get", "post"}
    called = [
        node.func if isinstance(node, ast.Call) else node for node in statement.decorator_list
    ]
    return any(isinstance(node, ast.Attribute) and node.attr in verbs for node in called)


def stored(target: ast.AST) -> Iterator[ast.Name]:
    return (
        node
        for node in ast.walk(target)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )


def bound_names(text: str, modules: Mapping[str, str]) -> Iterator[tuple[str, Name]]:
    """Imports anywhere in the file; a module itself is bound to its empty name."""
    for node in nodes(text):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                home = (inner, "") if inner in modules else (str(node.module), alias.name)
                yield alias.asname or alias.name, home
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield alias.asname or first, (alias.name if alias.asname else first, "")


def texts_in(statement: ast.stmt) -> Iterator[str]:
    for node in ast.walk(statement):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def read(source: Source, statements: list[ast.stmt]) -> Reads:
    reads = Reads()
    for statement in statements:
        below = list(ast.walk(statement))
        owners = {node.value for node in below if isinstance(node, ast.Attribute)}
        for node in below:
            match node:
                case ast.Name(id=name) if name in source.imports:
                    module, inner = source.imports[name]
                    reads.names.add((module, inner))
                    if not inner and node not in owners:
                        reads.modules.add(module)
                case ast.Name(id=name, ctx=ast.Load()) if name in source.definitions:
                    reads.names.add((source.module, name))
                case ast.Attribute(value=value, attr=attr):
                    module = module_named(source, value)
                    if module is None:
                        reads.attributes.add(attr)
                    else:
                        reads.names.add((module, attr))
                case ast.Constant(value=str() as text):
                    reads.texts.add(text)
                    if ENTRY.fullmatch(text):
                        module, _, name = text.partition(":")
                        reads.names.add((module, name))
                case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.JoinedStr() as spelt, *_]):
                    reads.patterns.add(pattern_of(spelt))
    return reads


def module_named(source: Source, value: ast.expr) -> str | None:
    """The module that an expression such as `ess.kernels` or `specification` stands for."""
    match value:
        case ast.Name(id=name):
            module, inner = source.imports.get(name, ("", "-"))
            return None if inner else module
        case ast.Attribute(value=inner_value, attr=attr):
            above = module_named(source, inner_value)
            return None if above is None or not above.startswith("ess") else f"{above}.{attr}"
    return None


def pattern_of(spelt: ast.JoinedStr) -> str:
    return "".join(
        re.escape(str(piece.value)) if isinstance(piece, ast.Constant) else ".+"
        for piece in spelt.values
    )
