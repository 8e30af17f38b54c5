"""The house rules, as far as a machine can see them. Every finding says where and what to do.

`python -m tests.house` prints the numbers by which the code is judged.
"""

from __future__ import annotations

import gc
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house import allowed
from tests.house.__main__ import main
from tests.house.circles import circles, import_graph
from tests.house.names import lost_files, lost_modules, lost_short_modules
from tests.house.rules import (
    BANNED_ALONE,
    FUNCTION_LINES_MAX,
    banned_cpp_words,
    banned_words,
    local_paths,
    long_cpp_functions,
    long_file,
    long_functions,
    module_state,
    positional_flags,
    registries,
    split_texts,
    unfinished,
    vague_errors,
    vague_loops,
    wide_lines,
)
from tests.house.tree import (
    CPP,
    ROOT,
    folder_sizes,
    functions,
    in_package,
    layer_of,
    line_count,
    module_of,
    nodes,
    package_texts,
    parsed,
    running_nodes,
    texts,
    tracked,
)
from tests.house.uses import unused_in_tree, unused_names

TREE_BYTES_MAX = 48 << 20
FUNCTION_LINES_MEDIAN = 10
FILE_LINES_MEDIAN = 150
FOLDER_MODULES_MAX = 16
FOLDER_TESTS_MAX = 60

LINKS = {f"ess/{name}": f"../{name}" for name in ("models", "server", "bench", "csrc")}
TOP_LEVEL = {
    *("pyproject.toml", "README.md", "LICENSE", "NOTICE", "Makefile", "CHANGELOG.md", ".gitignore"),
    *(".ci", "docs", "ess", "models", "server", "bench", "csrc", "tests"),
}
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
    (vague_loops, (".py",), in_package),
    (split_texts, (".py",), in_package),
    (unfinished, EVERY_FILE, lambda name: True),
    (local_paths, EVERY_FILE, lambda name: True),
    (registries, EVERY_FILE, lambda name: True),
]


@pytest.fixture(autouse=True, scope="module")
def _trees() -> Iterator[None]:
    """Trees of all files are some million objects: looking for garbage among them takes longer than
    making them, and no other test needs them."""
    gc.disable()
    yield
    gc.enable()
    for kept in (parsed, nodes, running_nodes):
        kept.cache_clear()


@pytest.mark.parametrize(
    ("rule", "suffixes", "where"), RULES, ids=[rule.__name__ for rule, *_ in RULES]
)
def test_the_tree_keeps_the_rule(
    rule: Callable[[str], list[str]], suffixes: tuple[str, ...], where: Callable[[str], bool]
) -> None:
    lines = [
        f"{name}:{finding}"
        for name, text in texts(*suffixes)
        if where(name)
        for finding in rule(text)
    ]
    assert not lines, "\n" + "\n".join(lines)


def test_functions_and_files_are_short_as_a_rule() -> None:
    package = [text for name, text in texts(".py") if in_package(name)]
    lengths = [line_count(node) for text in package for node in functions(parsed(text))]
    assert statistics.median(lengths) <= FUNCTION_LINES_MEDIAN
    assert statistics.median(text.count("\n") for text in package) <= FILE_LINES_MEDIAN


def test_a_file_name_says_something_and_stands_for_one_thing() -> None:
    rooms = defaultdict(list)
    for name in tracked():
        stem = Path(name).stem.lower()
        if name.endswith((".py", *CPP)):
            assert not BANNED_ALONE & set(stem.split("_")), f"{name}: name it after what it does"
        if in_package(name) and name.endswith(".py") and not stem.startswith("__"):
            rooms[layer_of(name), stem].append(name)
    twice = [
        names for (layer, _), names in rooms.items() if layer not in allowed.TWINS and names[1:]
    ]
    assert not twice, f"{twice}: two modules of one layer bear one name; say what each is for"


def test_a_folder_is_seen_at_a_glance() -> None:
    for folder, count in folder_sizes().items():
        most = FOLDER_TESTS_MAX if folder.startswith("tests") else FOLDER_MODULES_MAX
        assert count <= most, f"{folder}/ holds {count} modules, at most {most}: give it rooms"


def test_modules_and_files_that_texts_name_are_there() -> None:
    sources = {module_of(name): text for name, text in package_texts().items()}
    files = set(tracked())
    lost = [
        f"{name}:{finding}"
        for name, text in texts(".py", ".md", ".toml", ".service", "Makefile", *CPP)
        if name != "tests/test_tidy.py"  # its examples are invented
        for finding in (
            *lost_modules(text, sources),
            *lost_files(text, files),
            *(lost_short_modules(text, sources) if name.endswith(".md") else ()),
        )
    ]
    assert not lost, "\n".join(lost)


def test_no_modules_need_one_another() -> None:
    sources = {module_of(name): text for name, text in package_texts().items()}
    lines = [" needs ".join(walk) for walk in circles(import_graph(sources))]
    assert not lines, "\n".join(["cut the circle at what both need:", *lines])


def test_every_name_is_used_by_more_than_tests() -> None:
    lines = [
        f"{name} (line {name.line})"
        for name in unused_in_tree(allowed.KEPT)
        if str(name) not in allowed.KEPT
    ]
    assert not lines, "\n".join(["nothing but tests reaches these; delete them:", *lines])


def test_what_is_kept_unused_is_unused() -> None:
    stale = set(allowed.KEPT) - set(map(str, unused_in_tree()))
    assert not stale, f"{stale}: used or gone, strike it off tests/house/allowed.py"


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
    (vague_loops, "for one in x: ..."),
    (vague_loops, "[f(one) for at, (one, other) in x]"),
    (split_texts, 'class A:\n    x = 1\n    "a "\n    "b"'),
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
    (vague_loops, "for sequence in x:\n    one = sequence"),
    (split_texts, 'class A:\n    x = 1\n    ("a "\n    "b")\n    y = 2\n    "c"'),
    (local_paths, "/proc/cpuinfo and https://example.org/home/x and ess/home/y"),
]


@pytest.mark.parametrize(("rule", "text"), CAUGHT)
def test_the_rule_catches(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text)


@pytest.mark.parametrize(("rule", "text"), ALLOWED)
def test_the_rule_allows(rule: Callable[[str], list[str]], text: str) -> None:
    assert rule(text) == []


NAMED = {"ess.pool": "from ess.pool.pages import Pages", "ess.pool.pages": "class Pages: ..."}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("`ess.pool.pages`, ess.pool.pages.Pages.take, ess.pool.Pages, 'ess.pool.pages:Pages'", 0),
        ("ess.pool.page, ess.pool.pages.Page, import ess.pool.lost", 3),
        ("ess.sock, ess.pool.__file__, /ess.pool.lost, x.ess.pool.lost", 0),
    ],
)
def test_lost_modules(text: str, count: int) -> None:
    assert len(lost_modules(text, NAMED)) == count
    assert len(lost_short_modules("`pool.pages` `pool.lost` pool.x `config.json`", NAMED)) == 1


def test_lost_files() -> None:
    files = {"ess/pool/pages.py", "server/app.py", "tests/pd/rig.py"}
    text = "ess/pool/pages.py:12 ess/server/app.py pd/rig.py ess/pool/lost.py"
    assert lost_files(text, files) == ["1: there is no ess/pool/lost.py"]


CIRCLE_CASES = {
    "in a function": {"ess.a": "def f():\n    import ess.b", "ess.b": "from ess.a import f"},
    "by a text": {"ess.a": "import_module('ess.b:run')", "ess.b": "from ess import a"},
    "through a folder": {
        "ess.a": "from ess.room.inner import x",
        "ess.room": "from ess.a import y",
        "ess.room.inner": "",
    },
}
STRAIGHT_CASES = {
    "types only": {"ess.a": "if TYPE_CHECKING:\n    from ess.b import B", "ess.b": "import ess.a"},
    "own folder": {"ess.room": "from ess.room.a import x", "ess.room.a": "from ess.room import b"},
    "a text that is no import": {"ess.a": "x = 'ess.b'", "ess.b": "import ess.a"},
}


@pytest.mark.parametrize("case", CIRCLE_CASES)
def test_the_graph_shows_a_circle(case: str) -> None:
    modules = dict.fromkeys(["ess", "ess.room.b"], "") | CIRCLE_CASES[case]
    [walk] = circles(import_graph(modules))
    assert walk[0] == walk[-1] == "ess.a"


@pytest.mark.parametrize("case", STRAIGHT_CASES)
def test_the_graph_shows_no_circle(case: str) -> None:
    modules = dict.fromkeys(["ess", "ess.room.b"], "") | STRAIGHT_CASES[case]
    assert circles(import_graph(modules)) == []


USED = """
from ess.b import helper, Shape
TABLE = {"area": "ess.b:listed"}
def main():
    helper(Shape().area, getattr(Shape, "named"))
    return TABLE
def dead(): return deader()
def deader(): return 1
"""
USED_BY_IT = """
class Shape:
    def area(self): ...
    def named(self): ...
    def lonely(self): ...
    def _private(self): ...
def helper(*_): return INNER
def listed(): ...
INNER, OUTER = 1, 2
"""


def test_names_that_nothing_reaches() -> None:
    sources = {"ess.a": USED, "ess.b": USED_BY_IT}
    unused_ones = unused_names(sources, roots={}, entries={("ess.a", "main")})
    unused = {"ess.a:dead", "ess.a:deader", "ess.b:OUTER", "ess.b:Shape.lonely"}
    assert set(map(str, unused_ones)) == unused
    document = "import ess.a\nfrom ess.b import OUTER, Shape\ness.a.dead(Shape().lonely, OUTER)"
    assert unused_names(sources, roots={"README": document}, entries={("ess.a", "main")}) == []


def test_the_numbers_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    printed = capsys.readouterr().out
    assert re.search(r"^  functions \d+ / \d+ / \d+ of \d+$", printed, re.MULTILINE), printed
    assert re.search(r"^  \d\.\d\d ess/pool: \d+ asserts", printed, re.MULTILINE), printed
