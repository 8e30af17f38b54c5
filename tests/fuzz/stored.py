"""Targets of files and frames: good documents, changed, are read as they are or refused in words.

    {"base": number of a good document, "edits": [[place, verb, item], ...], "ops": [[verb, ...]]}

Edits change a JSON tree node by node, before it is written down; ops change the bytes of the whole.
"""

from __future__ import annotations

import copy
import json
import random
import re
import tempfile
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ess.errors import EssError
from tests.fuzz import values
from tests.fuzz.fuzzer import Finding, Value
from tests.fuzz.lines import Lines, sources
from tests.fuzz.rig import described

NUMBERS = (0, 1, 2, 63, 64, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 62)
WIDTHS = (1, 2, 4, 8)
COPIED_MAX = 60


class Reader(Protocol):
    """`bases` are bytes or JSON trees, which `wrapped` makes a document of. `read` raises what a
    reader of strangers' bytes raises, or AssertionError where it has read something wrong."""

    name: str
    watched: tuple[str, ...]
    bases: list[Any]

    def __init__(self, folder: Path) -> None: ...

    def wrapped(self, base: int, raw: bytes) -> bytes: ...

    def read(self, base: int, content: bytes) -> None: ...


class Stored:
    """`outcomes` counts the ways in which inputs ended: read, or refused with which sentence."""

    def __init__(self, reader: type[Reader]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._reader = reader(Path(self._folder.name))
        self.name = reader.name
        self.lines = Lines(sources(*reader.watched))
        self.outcomes: Counter[str] = Counter()

    def __enter__(self) -> Stored:
        self.lines.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.lines.__exit__(kind, error, trace)
        self._folder.cleanup()

    def restart(self) -> None:
        """There is no state."""

    # ---- inputs

    def fresh(self, source: random.Random) -> Value:
        value = {"base": source.randrange(len(self._reader.bases)), "edits": [], "ops": []}
        return self.changed(source, value, value)

    def changed(self, source: random.Random, value: Value, other: Value) -> Value:
        """One change more, or one less."""
        name = "edits" if self._has_tree(value["base"]) and source.random() < 0.8 else "ops"
        kept = list(value[name])
        if kept and source.random() < 0.2:
            kept.pop(source.randrange(len(kept)))
        elif other[name] and source.random() < 0.2:
            kept.append(source.choice(other[name]))
        else:
            kept.append(_edit(source) if name == "edits" else _op(source))
        return {**value, name: kept[-8:]}

    def _has_tree(self, base: int) -> bool:
        return not isinstance(self._reader.bases[base % len(self._reader.bases)], bytes)

    def content(self, value: Value) -> tuple[int, bytes]:
        base = value["base"] % len(self._reader.bases)
        raw = self._reader.bases[base]
        if self._has_tree(base):
            raw = json.dumps(edited(raw, value["edits"])).encode("utf-8", "surrogatepass")
        content = self._reader.wrapped(base, raw)
        for op in value["ops"]:
            content = operated(content, op)
        return base, content

    # ---- running

    def run(self, value: Value) -> None:
        base, content = self.content(value)
        try:
            self._reader.read(base, content)
        except EssError as error:
            if not str(error).strip():
                raise Finding("an error without words", self.name, repr(error)) from None
            self.outcomes[f"{type(error).__name__}: {_shape(str(error))}"] += 1
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of a native library is no Exception
            raise Finding(*described(error), repr(error)[:500]) from error
        else:
            self.outcomes["read"] += 1


def _shape(sentence: str) -> str:
    """Without what differs from input to input."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\d,.]*\d|\[.*?\]", "_", sentence)[:60]


def _edit(source: random.Random) -> list[Any]:
    verb = source.choice(("set", "set", "set", "drop", "copy", "tweak"))
    item = values.value(source, 2) if verb == "set" else source.randrange(1 << 16)
    return [source.randrange(1 << 16), verb, item]


def edited(tree: Any, edits: list[Any]) -> Any:
    """Places are numbered as `values.nodes` walks."""
    tree = copy.deepcopy(tree)
    for place, verb, item in edits:
        nodes = list(values.nodes(tree))
        if not nodes:
            return item
        holder, key = nodes[place % len(nodes)]
        match verb:
            case "drop":
                del holder[key]
            case "copy":
                other, name = nodes[item % len(nodes)]
                if len(repr(other[name])) < COPIED_MAX:  # a tree of trees soon has no end
                    holder[key] = copy.deepcopy(other[name])
            case "tweak":
                holder[key] = values.tweaked(random.Random(item), holder[key])
            case _:
                holder[key] = copy.deepcopy(item)  # an edit may be given twice
    return tree


def _op(source: random.Random) -> list[Any]:
    at = source.randrange(1 << 20)
    match source.randrange(6):
        case 0:
            return ["flip", at, source.randrange(8)]
        case 1:
            return ["number", at, source.choice(WIDTHS), source.choice(NUMBERS)]
        case 2:
            return ["cut", at]
        case 3:
            return ["insert", at, source.randbytes(source.choice((1, 4, 64))).hex()]
        case 4:
            return ["drop", at, source.choice((1, 4, 64, 4096))]
    return ["repeat", at, source.choice((1, 4, 64, 4096))]


def operated(content: bytes, op: list[Any]) -> bytes:
    """Every other place is in the document's first bytes: most formats begin with their numbers."""
    verb, at = op[0], op[1] % (len(content) + 1)
    if op[1] % 2:
        at %= 64
    head, tail = content[:at], content[at:]
    match verb:
        case "flip":
            return head + bytes([tail[0] ^ 1 << op[2] % 8]) + tail[1:] if tail else head
        case "number":
            width = op[2] if op[2] in WIDTHS else 1
            return head + (op[3] % (1 << 8 * width)).to_bytes(width, "little") + tail[width:]
        case "cut":
            return head
        case "insert":
            return head + bytes.fromhex(op[2]) + tail
        case "drop":
            return head + tail[op[2] :]
    return head + tail[: op[2]] + tail
