"""The loop: make an input, run it, keep it if it reached a new line, store what it broke.

An input is a JSON value whatever the target, so it is kept, cut smaller and run again in one way.
Everything is drawn from the seed. Findings that share their kind and place are counted, not stored
again.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tests.fuzz.lines import Line, Lines

Value = Any
CORPUS = Path(__file__).parent / "corpus"
KNOWN = Path(__file__).parent / "known"
BREAKING = ("left", "held", "leak", "memory", "stuck", "cpu", "died")
SHRINK_RUNS_MAX = 60
SHRINK_S_MAX = 10.0
PROMOTE_S_MAX = 1.5
PROMOTED_CHARACTERS_MAX = 16 << 10  # of one input; the whole corpus stays small


class Finding(Exception):
    """`kind` and `place` tell findings apart: an exception and where, a status and its route.
    `value` is the input that caused it, if not the running one."""

    def __init__(self, kind: str, place: str, sentence: str, *, value: Value = None) -> None:
        super().__init__(f"{kind} at {place}: {sentence}")
        self.key = (kind, place)
        self.value = value


class Target(AbstractContextManager["Target"], Protocol):
    """`run` raises a Finding; after one `restart` makes the target as good as new."""

    name: str
    lines: Lines

    def fresh(self, source: random.Random) -> Value: ...

    def changed(self, source: random.Random, value: Value, other: Value) -> Value: ...

    def run(self, value: Value) -> None: ...

    def restart(self) -> None: ...


@dataclass(slots=True)
class Stored:
    """Inputs in a folder, one file each, named by what they hold."""

    folder: Path | None
    values: list[Value] = field(default_factory=list)

    def load(self) -> Stored:
        if self.folder is not None and self.folder.is_dir():
            for path in sorted(self.folder.glob("*.json")):
                self.values.append(json.loads(path.read_text())["input"])
        return self

    def keep(self, value: Value) -> None:
        self.values.append(value)
        if self.folder is not None:
            write(self.folder, {"input": value})


def write(folder: Path, document: dict[str, Any], stem: str = "") -> Path:
    text = json.dumps(document, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem or hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    path.write_text(text + "\n")
    return path


class Fuzzer:
    def __init__(
        self,
        target: Target,
        *,
        seed: int,
        working: Path | None = None,
        findings: Path | None = None,
        avoid: Sequence[str] = (),
        is_known: Callable[[tuple[str, str]], bool] = lambda key: False,
    ) -> None:
        """`working` grows; the corpus of the tree is only read. Fresh inputs with a text of `avoid`
        are passed over: they lead into a known fault. Of a known fault nothing is stored."""
        self.target = target
        self.run_count = 0
        self.found: dict[tuple[str, str], int] = {}
        self.files: list[Path] = []
        self.values: list[Value] = []
        self._random = random.Random(f"{target.name} {seed}")
        self._stored = Stored(working).load()
        self._findings = findings
        self._avoid = avoid
        self._is_known = is_known

    def replay(self, values: Sequence[Value]) -> None:
        """The corpus first: what it reaches is known already."""
        for value in values:
            self._run(value)
            self.values.append(value)

    def begin(self) -> None:
        self.replay(Stored(CORPUS / self.target.name).load().values)
        self.replay(self._stored.values)

    def step(self) -> None:
        value = self._next()
        text = json.dumps(value) if self._avoid else ""
        if any(avoided in text for avoided in self._avoid):
            return
        before = len(self.target.lines.seen)
        self._run(value)
        if len(self.target.lines.seen) > before:
            self.values.append(value)
            self._stored.keep(value)

    def run_many(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def spend(self, *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.step()

    def _next(self) -> Value:
        """Half of the changed inputs grow from the youngest eighth of the corpus."""
        source, values = self._random, self.values
        if not values or source.random() < 0.2:
            return self.target.fresh(source)
        young = values[-max(1, len(values) // 8) :] if source.random() < 0.5 else values
        value = copy.deepcopy(source.choice(young))
        for _ in range(1 + min(4, int(source.expovariate(1.0)))):
            value = self.target.changed(source, value, source.choice(values))
        return value

    def _run(self, value: Value) -> None:
        self.run_count += 1
        try:
            self.target.run(value)
        except Finding as finding:
            self._note(finding, value)

    def _note(self, finding: Finding, value: Value) -> None:
        self.found[finding.key] = self.found.get(finding.key, 0) + 1
        mend(self.target, finding)
        if self.found[finding.key] > 1 or self._findings is None or self._is_known(finding.key):
            return
        value = value if finding.value is None else finding.value
        small = shrunk(value, lambda smaller: breaks(self.target, smaller, finding.key))
        kind, place = finding.key
        text = "".join(c if c.isalnum() else "-" for c in f"{self.target.name}-{kind}-{place}")
        document = {"target": self.target.name, "what": str(finding)[:2000], "input": small}
        self.files.append(write(self._findings, document, text[:120]))


def mend(target: Target, finding: Finding) -> None:
    if finding.key[0] in BREAKING:
        target.restart()


def breaks(target: Target, value: Value, key: tuple[str, str]) -> bool:
    try:
        target.run(value)
    except Finding as finding:
        mend(target, finding)
        return finding.key == key
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return False  # it has been cut so far that it is no input any more
    return False


def covers(target: Target, value: Value, wanted: set[Line]) -> bool:
    target.lines.forget()
    try:
        target.run(value)
    except Finding as finding:
        mend(target, finding)
        return False
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return False
    return wanted <= target.lines.seen


def shrunk(value: Value, holds: Callable[[Value], bool], *, seconds: float = SHRINK_S_MAX) -> Value:
    """A smaller input for which it still holds, in a bounded number of runs."""
    runs, end = 0, time.monotonic() + seconds
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in smaller_values(value):
            runs += 1
            if runs > SHRINK_RUNS_MAX or time.monotonic() > end:
                return value
            if holds(smaller):
                value, is_smaller = smaller, True
                break
    return value


def smaller_values(value: Value) -> Iterator[Value]:
    """Large cuts first, then those inside."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 3:
        yield value // 8
    elif isinstance(value, str):
        for size in (len(value) // 2, len(value) // 4, len(value) // 8):
            for start in range(0, len(value) if size else 0, size or 1):
                yield value[:start] + value[start + size :]
    elif isinstance(value, list):
        for size in sorted({len(value) // 2, 1} - {0}, reverse=True):
            for start in range(0, len(value), size):
                yield value[:start] + value[start + size :]
        for at, item in enumerate(value):
            for smaller in smaller_values(item):
                yield [*value[:at], smaller, *value[at + 1 :]]
    elif isinstance(value, dict):
        for name, item in value.items():
            for smaller in smaller_values(item):
                yield {**value, name: smaller}


def promoted(target: Target, values: Sequence[Value]) -> list[Value]:
    """The few of them, cut small, that reach every line that the inputs of a fair size reach."""
    reached: list[tuple[Value, set[Line]]] = []
    for value in values:
        if len(str(value)) <= PROMOTED_CHARACTERS_MAX and covers(target, value, set()):
            reached.append((value, set(target.lines.seen)))
    left = set().union(*(lines for _, lines in reached))
    kept = []
    while left:
        value, lines = max(reached, key=lambda pair: (len(pair[1] & left), -len(str(pair[0]))))
        wanted = lines & left
        if not wanted:
            break
        left -= wanted
        kept.append(
            shrunk(
                value,
                lambda smaller, wanted=wanted: covers(target, smaller, wanted),
                seconds=PROMOTE_S_MAX,
            )
        )
    return kept
