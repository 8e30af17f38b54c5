"""The rules that hold for a file by itself: each takes a text and says which line breaks it."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from tests.house.tree import functions, line_count, nodes, parsed

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
COLUMNS_MAX = 100
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
    long, stack, statement, line = [], [], "", 1
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
                long.append(f"{start}: a body of {line - start + 1} lines; split it")
        statement = "" if sign in "{};" else statement + sign
    return long


def banned_words(text: str) -> list[str]:
    lines = []
    for name, line in declared_names(parsed(text)):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_").split("_")
        if "_".join(words) in BANNED_ALONE or BANNED_ANYWHERE & set(words):
            lines.append(f"{line}: {name!r} says nothing; use a word of DESIGN section 4")
    return lines


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
    lines = [
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
                lines += [f"{node.lineno}: {target.id} {why}" for why in why_state(target.id, node)]
    return lines + [
        f"{line}: {name} is changed after it was made; give it an owner"
        for name, line in changed_names(tree)
        if name in constants
    ]


def module_assignments(tree: ast.Module) -> Iterator[ast.Assign | ast.AnnAssign]:
    for node in tree.body:
        inner = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        yield from (each for each in inner if isinstance(each, (ast.Assign, ast.AnnAssign)))


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
    lines = []
    for node in functions(parsed(text)):
        given = [*node.args.posonlyargs, *node.args.args]
        defaults = [None] * (len(given) - len(node.args.defaults)) + [*node.args.defaults]
        for argument, default in zip(given, defaults, strict=True):
            annotation = "" if argument.annotation is None else ast.unparse(argument.annotation)
            flag = isinstance(default, ast.Constant) and isinstance(default.value, bool)
            if not node.name.startswith("_") and (flag or re.search(r"\bbool$", annotation)):
                lines.append(f"{node.lineno}: {node.name}({argument.arg}): make it keyword-only")
    return lines


def vague_errors(text: str) -> list[str]:
    """Errors are ours and typed, and carry a sentence that names the thing."""
    lines = []
    for node in ast.walk(parsed(text)):
        if not isinstance(node, ast.Raise) or node.exc is None:
            continue
        call = node.exc if isinstance(node.exc, ast.Call) else None
        name = ast.unparse(call.func if call else node.exc).rpartition(".")[2]
        if name in BUILTIN_ERRORS:
            lines.append(f"{node.lineno}: {name}; raise one of ess.errors instead")
        if name in ESS_ERRORS and not (call and call.args and is_sentence(call.args[0])):
            lines.append(f"{node.lineno}: {name} needs a sentence: what is wrong, what to do")
    return lines


def is_sentence(node: ast.expr) -> bool:
    """At least three words, a placeholder is one, `{error}` is enough; computed text may be any."""
    match node:
        case ast.Constant(value=str() as text):
            return len(text.split()) >= 3
        case ast.JoinedStr():
            names = {
                ast.unparse(each.value) for each in node.values if hasattr(each, "format_spec")
            }
            pieces = [each.value if isinstance(each, ast.Constant) else "x" for each in node.values]
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
        f"{number}: {match[0]!r}: {advice}"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := pattern.search(line))
    ]


def unfinished(text: str) -> list[str]:
    return matches(UNFINISHED, text, "finish it, or write it down in docs/log.md")


def local_paths(text: str) -> list[str]:
    return matches(LOCAL_PATH, text, "a path of one machine")


def registries(text: str) -> list[str]:
    return matches(REGISTRY, text, "the installer's configuration knows where packages are")


def vague_loops(text: str) -> list[str]:
    return [
        f"{name.lineno}: a loop over `one`; call it what it is"
        for node in nodes(text)
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension))
        for name in ast.walk(node.target)
        if isinstance(name, ast.Name) and name.id == "one"
    ]


def split_texts(text: str) -> list[str]:
    """Of two strings in a row, which document an attribute, only the first is shown."""
    return [
        f"{second.lineno}: a string after a string is lost; join them in brackets"
        for node in nodes(text)
        if isinstance(node, (ast.ClassDef, ast.Module))
        for first, second in itertools.pairwise(node.body)
        if is_text(first) and is_text(second)
    ]


def is_text(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False
