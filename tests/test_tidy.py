"""The house rules, as far as a machine can see them. Every finding says where and what to do."""

from __future__ import annotations

import ast
import functools
import re
import statistics
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
COLUMNS_MAX = 100
TREE_BYTES_MAX = 48 << 20
FUNCTION_LINES_MEDIAN = 10
FILE_LINES_MEDIAN = 150

LINKS = {f"ess/{name}": f"../{name}" for name in ("models", "server", "bench", "csrc")}
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "LICENSE", "NOTICE", "Makefile", "CHANGELOG.md", ".gitignore"),
    *(".ci", "docs", "ess", "models", "server", "bench", "csrc", "tests"),
}
CPP = (".cpp", ".h", ".cu", ".cuh")
BANNED_ALONE = {"cache", "buffer", "loc", "indices", "manager", "utils", "data", "info"}
BANNED_ANYWHERE = {"manager", "coordinator", "utils"}
BUILTIN_ERRORS = {"Exception", "ValueError", "RuntimeError", "TypeError", "NotImplementedError"}
ESS_ERRORS = {"BadInput", "BadState", "Unavailable"}
PLAIN_FILLERS = {"list", "dict", "set", "bytearray"}
FILLERS = {"deque", "defaultdict", "Counter", "OrderedDict", "WeakValueDictionary", "Queue"}
OWNED = {"Lock", "RLock", "local", "Condition", "Event", "ContextVar", "ThreadPoolExecutor"}
CHANGERS = {"append", "add", "update", "pop", "clear", "setdefault", "extend", "insert", "remove"}
UNFINISHED = re.compile(r"\b(?:TO" + r"DO|FIX" + r"ME|X{3}|HA" + r"CK)\b")
LOCAL_PATH = re.compile(r"(?<![\w.~$}>)/])/(?:home|root|work|Users|mnt)/")
REGISTRY = re.compile(
    r"(?:pypi|python"
    r"hosted|anaconda|quay|ghcr|docker)\.(?:org|io)\b|download\.pytorch|"
    r"crates\.io|registry\.|proxy\.golang|index"
    r"-url"
)
CPP_NOISE = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | R"\(.*?\)" | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'
    | ^[ \t]*\#(?:\\\n|[^\n])* | \balignas\s*\([^)]*\) | __attribute__\s*\(\(.*?\)\)""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


@functools.cache
def tracked() -> tuple[str, ...]:
    """Files of the tree as it would be committed, links as themselves."""
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return tuple(
        sorted(name for name in set(listing) if (ROOT / name).is_symlink() or exists(name))
    )


def exists(name: str) -> bool:
    return (ROOT / name).is_file()


def texts(*suffixes: str) -> Iterator[tuple[str, str]]:
    for name in tracked():
        path = ROOT / name
        if not path.is_symlink() and name.endswith(suffixes):
            try:
                yield name, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                assert not name.endswith((".py", *CPP)), f"{name}: save it as UTF-8"


@functools.cache
def parsed(text: str) -> ast.Module:
    """Five rules look at every file's tree."""
    return ast.parse(text)


def in_package(name: str) -> bool:
    return name.startswith(("ess/", "models/", "server/", "bench/"))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (
        node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


def line_count(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def long_functions(text: str) -> list[str]:
    return [
        f"{node.lineno}: {node.name} has {line_count(node)} lines; split it at its branches"
        for node in functions(parsed(text))
        if line_count(node) > FUNCTION_LINES_MAX
    ]


def bare_cpp(text: str) -> str:
    """C++ without comments, strings and preprocessor lines; line numbers stay."""
    return CPP_NOISE.sub(lambda noise: "\n" * noise[0].count("\n"), text)


def long_cpp_functions(text: str) -> list[str]:
    """Namespaces, types and tables are transparent; any other outermost braces hold a body."""
    found, stack, statement, line = [], [], "", 1
    for sign in bare_cpp(text):
        line += sign == "\n"
        if sign == "{":
            open_scope = re.search(r"\b(namespace|extern|struct|class|union)\b", statement)
            transparent = (open_scope and "(" not in statement) or statement.rstrip().endswith("=")
            body = bool(stack and stack[-1][0]) or not transparent
            stack.append((body, line, bool(stack and stack[-1][0])))
        elif sign == "}" and stack:
            body, start, nested = stack.pop()
            if body and not nested and line - start + 1 > FUNCTION_LINES_MAX:
                found.append(f"{start}: a body of {line - start + 1} lines; split it")
        statement = "" if sign in "{};" else statement + sign
    return found


def banned_words(text: str) -> list[str]:
    found = []
    for name, line in declared_names(parsed(text)):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
        if "_".join(words) in BANNED_ALONE or BANNED_ANYWHERE & set(words):
            found.append(f"{line}: {name!r} says nothing; use a word of DESIGN section 4")
    return found


def declared_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")):
                yield node.attr, node.lineno
            case ast.alias(asname=str()):
                yield node.asname, node.lineno


def banned_cpp_words(text: str) -> list[str]:
    word = re.compile(r"(?<![.>:\w])(" + "|".join(sorted(BANNED_ALONE)) + r")\b(?!\s*\()")
    return [
        f"{bare_cpp(text)[: match.start()].count(chr(10)) + 1}: {match[1]!r} says nothing"
        for match in word.finditer(bare_cpp(text))
    ]


def module_state(text: str) -> list[str]:
    """Modules hold constants, types and functions: nothing that a later call could change."""
    tree = parsed(text)
    found = [
        f"{node.lineno}: `global` makes module state; pass the owner in"
        for node in ast.walk(tree)
        if isinstance(node, ast.Global)
    ]
    constants: set[str] = set()
    for node in module_assignments(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            if isinstance(target, ast.Name):
                constants.add(target.id)
                found += [f"{node.lineno}: {target.id} {why}" for why in why_state(target.id, node)]
    return found + [
        f"{line}: {name} is changed after it was made; give it an owner"
        for name, line in changed_names(tree)
        if name in constants
    ]


def module_assignments(tree: ast.Module) -> Iterator[ast.Assign | ast.AnnAssign]:
    for node in tree.body:
        inner = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        yield from (one for one in inner if isinstance(one, (ast.Assign, ast.AnnAssign)))


def why_state(name: str, node: ast.Assign | ast.AnnAssign) -> Iterator[str]:
    constant = re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__\w+__", name)
    if not constant and not re.fullmatch(r"_?[A-Z]\w*", name):
        yield "is a module-level variable; write it as a CONSTANT or pass it in"
    call = node.value.func if isinstance(node.value, ast.Call) else None
    maker = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "")
    empty = isinstance(node.value, ast.Call) and not (node.value.args or node.value.keywords)
    literal = isinstance(node.value, (ast.List, ast.Dict)) and not ast.unparse(node.value)[1:-1]
    if literal or maker in FILLERS or (empty and maker in PLAIN_FILLERS):
        yield "is made to be filled later; give it an owner"
    if maker in OWNED:
        yield f"is a module-level {maker}; give it an owner"


def changed_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name, node.lineno
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name, node.lineno
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
                if attr in CHANGERS:
                    yield name, node.lineno


def positional_flags(text: str) -> list[str]:
    found = []
    for node in functions(parsed(text)):
        given = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(given) - len(node.args.defaults)) + [*node.args.defaults]
        for argument, default in zip(given, defaults, strict=True):
            annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
            flag = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            if not node.name.startswith("_") and (flag or re.search(r"\bbool$", annotation)):
                found.append(f"{node.lineno}: {node.name}({argument.arg}): make it keyword-only")
    return found


def vague_errors(text: str) -> list[str]:
    """Errors are ours and typed, and carry a sentence that names the thing."""
    found = []
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        call = node.exc if isinstance(node.exc, ast.Call) else None
        name = ast.unparse(call.func if call else node.exc).rpartition(".")[2]
        if name in BUILTIN_ERRORS:
            found.append(f"{node.lineno}: {name}; raise one of ess.errors instead")
        if name in ESS_ERRORS and not (call and call.args and is_sentence(call.args[0])):
            found.append(f"{node.lineno}: {name} needs a sentence: what is wrong, what to do")
    return found


def is_sentence(node: ast.expr) -> bool:
    """At least three words, a placeholder is one, `{error}` is enough; computed text may be any."""
    match node:
        case ast.Constant(value=str() as text):
            return len(text.split()) >= 3
        case ast.JoinedStr():
            names = {ast.unparse(one.value) for one in node.values if hasattr(one, "format_spec")}
            pieces = [one.value if isinstance(one, ast.Constant) else "x" for one in node.values]
            return "error" in names or len("".join(map(str, pieces)).split()) >= 3
    return not isinstance(node, ast.Constant)


def wide_lines(text: str) -> list[str]:
    return [
        f"{number}: {len(line)} columns, at most {COLUMNS_MAX}"
        for number, line in enumerate(text.splitlines(), 1)
        if len(line) > COLUMNS_MAX
    ]


def long_file(text: str) -> list[str]:
    count = text.count("\n")
    return [f"{count} lines, at most {FILE_LINES_MAX}"] if count > FILE_LINES_MAX else []


def matches(pattern: re.Pattern[str], text: str, advice: str) -> list[str]:
    return [
        f"{number}: {found[0]!r}: {advice}"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := pattern.search(line))
    ]


def unfinished(text: str) -> list[str]:
    return matches(UNFINISHED, text, "finish it, or write it down in docs/log.md")


def local_paths(text: str) -> list[str]:
    return matches(LOCAL_PATH, text, "a path of one machine")


def registries(text: str) -> list[str]:
    return matches(REGISTRY, text, "the installer's configuration knows where packages are")


EVERY_FILE = ("",)
RULES = [
    (long_functions, (".py",), lambda name: True),
    (long_cpp_functions, CPP, lambda name: True),
    (wide_lines, (".py", *CPP), lambda name: True),
    (long_file, (".py", *CPP), lambda name: True),
    (banned_words, (".py",), lambda name: True),
    (banned_cpp_words, CPP, lambda name: True),
    (module_state, (".py",), in_package),
    (positional_flags, (".py",), in_package),
    (vague_errors, (".py",), in_package),
    (unfinished, EVERY_FILE, lambda name: True),
    (local_paths, EVERY_FILE, lambda name: True),
    (registries, EVERY_FILE, lambda name: True),
]


@pytest.mark.parametrize(
    ("rule", "suffixes", "where"), RULES, ids=[rule.__name__ for rule, *_ in RULES]
)
def test_the_tree_keeps_the_rule(
    rule: Callable[[str], list[str]], suffixes: tuple[str, ...], where: Callable[[str], bool]
) -> None:
    found = [
        f"{name}:{finding}"
        for name, text in texts(*suffixes)
        if where(name)
        for finding in rule(text)
    ]
    assert not found, "\n" + "\n".join(found)


def test_functions_and_files_are_short_as_a_rule() -> None:
    package = [text for name, text in texts(".py") if in_package(name)]
    lengths = [line_count(node) for text in package for node in functions(parsed(text))]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.median(text.count("\n") for text in package) <= FILE_LINES_MEDIAN


def test_file_names_follow_the_glossary() -> None:
    named = [name for name in tracked() if Path(name).stem.lower() in BANNED_ALONE]
    assert not named, f"{named}: name a module after what it does"


def test_the_top_level_is_the_one_of_the_design() -> None:
    assert {name.partition("/")[0] for name in tracked()} == TOP_LEVEL


def test_the_four_links() -> None:
    links = {
        name: str((ROOT / name).readlink()) for name in tracked() if (ROOT / name).is_symlink()
    }
    assert links == LINKS


def test_the_tree_is_small() -> None:
    sizes = {name: (ROOT / name).lstat().st_size for name in tracked()}
    largest = sorted(sizes.items(), key=lambda pair: -pair[1])[:5]
    assert sum(sizes.values()) < TREE_BYTES_MAX, f"{sum(sizes.values())} bytes; largest {largest}"


LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX
CPP_BODY = "\n".join(["int x;"] * FUNCTION_LINES_MAX)
CAUGHT = [
    (long_functions, LONG),
    (long_functions, "class A:\n" + "".join(f"    {line}\n" for line in LONG.splitlines())),
    (long_cpp_functions, "namespace ess {\nint f() {\n" + CPP_BODY + "\n}\n}"),
    (long_cpp_functions, 'extern "C" {\nstruct A { int f(struct B b) {\n' + CPP_BODY + "}};\n}"),
    (wide_lines, "x" * 101),
    (long_file, "\n" * 501),
    (banned_words, "cache = 1"),
    (banned_words, "def f(*, indices): ..."),
    (banned_words, "self._data = 1"),
    (banned_words, "class PoolManager: ..."),
    (banned_words, "import numpy as utils"),
    (banned_words, "for info in x: ..."),
    (banned_cpp_words, "int f(const char* data, int n);"),
    (module_state, "x = 1"),
    (module_state, "SEEN = {}"),
    (module_state, "SEEN = set()"),
    (module_state, "SEEN: Final = collections.defaultdict(list)"),
    (module_state, "SEEN = {1: 2}\ndef f(): SEEN[1] = 3"),
    (module_state, "SEEN = [1]\ndef f(): SEEN.append(3)"),
    (module_state, "LOCK = threading.Lock()"),
    (module_state, "def f():\n    global x"),
    (positional_flags, "def f(a, deep=True): ..."),
    (positional_flags, "def f(deep: bool): ..."),
    (positional_flags, "class A:\n    def f(self, deep: int | bool): ..."),
    (vague_errors, "raise ValueError('x is wrong here, change it')"),
    (vague_errors, "raise BadInput"),
    (vague_errors, "raise errors.BadState('wrong state')"),
    (vague_errors, "raise BadInput(f'bad {x}')"),
    (unfinished, "# TO" + "DO later"),
    (local_paths, "path = '/ho" + "me/me/x'"),
    (registries, "pip install --index" + "-url x"),
]
ALLOWED = [
    (long_functions, "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX - 1)),
    (long_cpp_functions, "namespace ess {\n" + "int f() { return 1; }\n" * 100 + "}"),
    (long_cpp_functions, "static const int table[] = {\n" + "1,\n" * 100 + "};"),
    (long_cpp_functions, "struct alignas(64) A {\n" + "int f() { return 1; }\n" * 100 + "};"),
    (vague_errors, "raise BadInput(f'{path}: {error}')"),
    (banned_words, "page_data = array.data\nf(indices=1)\ncached = 2"),
    (banned_cpp_words, "v.data(); // the cache\nint cache_lines;"),
    (module_state, "A = 1\n_B: Final = {1: 2}\nT = TypeVar('T')\nMode = str\n__all__ = ['x']"),
    (module_state, "def f():\n    seen = []\n    seen.append(1)\n    return seen"),
    (positional_flags, "def f(a: int, *, deep: bool = True) -> bool: ...\ndef _g(x: bool): ..."),
    (vague_errors, "raise BadInput(f'row {row} is outside 0..{count}')\nraise BadInput(sentence)"),
    (local_paths, "/proc/cpuinfo and https://example.org/home/x and ess/home/y"),
]


@pytest.mark.parametrize(("rule", "text"), CAUGHT)
def test_the_rule_catches(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text)


@pytest.mark.parametrize(("rule", "text"), ALLOWED)
def test_the_rule_allows(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text) == []
