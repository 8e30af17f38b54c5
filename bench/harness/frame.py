"""The frame around every benchmark: the options of all commands, and the output of their rows.

A benchmark is a function from its own options and `smoke` to rows. Nothing heavy is imported here:
the list of commands must appear at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import cyclopts

from ess import console
from ess.console import Command
from ess.errors import BadInput, Unavailable, not_installed

if TYPE_CHECKING:
    from ess.bench.harness.report import Row, Shown

Rows = Callable[..., "list[Row]"]


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The options of every command.

    Parameters
    ----------
    smoke
        Small sizes instead of all others: shows that it runs, not how fast.
    json
        The JSON document instead of a table: on stdout, or in this file.
    format
        The form of the rows where --json is not given.
    out
        Also write the JSON document to this file.
    """

    smoke: bool = False
    json: Path | None = None
    format: Literal["table", "md", "csv", "jsonl"] = "table"
    out: Path | None = None


PLAIN: Final = Frame()
WHOLE: Final[Mapping[Any, Any]] = {int: console.Whole, int | None: console.MaybeWhole}
"""Whole numbers are read as they were written: 2.5 steps are refused, not rounded."""

SLOW_SHARE: Final = 0.1
"""The share of a suite's time from which a benchmark is named as slow."""


def command_of(benchmark: Command) -> Callable[..., int]:
    """A command with the benchmark's own options, except `smoke`, and those of the frame."""
    rows = _load(benchmark)

    def command(*, frame: Frame = PLAIN, **options: Any) -> int:
        return _report(frame, {benchmark.name: functools.partial(rows, **options)})

    own = inspect.signature(rows, eval_str=True).parameters
    shown = [
        option.replace(annotation=WHOLE.get(option.annotation, option.annotation))
        for option in own.values()
        if option.name != "smoke"
    ]
    shown += (inspect.signature(command, eval_str=True).parameters["frame"],)
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    command.__annotations__ = {option.name: option.annotation for option in shown}
    command.__doc__ = rows.__doc__
    return command


def suite_of(members: Sequence[Command]) -> Callable[..., int]:
    def command(*, only: str | None = None, frame: Frame = PLAIN) -> int:
        """Run the benchmarks of this suite.

        Parameters
        ----------
        only
            Run this one benchmark.
        """
        chosen = {
            member.name: functools.partial(_run, member)
            for member in members
            if only in (None, member.name)
        }
        if not chosen:
            names = ", ".join(member.name for member in members)
            raise BadInput(f"--only {only}: no such benchmark in this suite; choose from {names}")
        return _report(frame, chosen)

    return command


def _load(benchmark: Command) -> Rows:
    assert isinstance(benchmark.home, str), f"{benchmark.name} is a suite"
    module, _, name = benchmark.home.partition(":")
    try:
        rows: Rows = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "ess").partition(".")[0] == "ess":
            raise
        raise not_installed(f"{benchmark.name} needs {error.name}, which", extra="serve") from None
    return rows


def _run(benchmark: Command, *, smoke: bool) -> list[Row]:
    return _load(benchmark)(smoke=smoke)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by the wall, and of the processor: this process and those that it has waited for."""

    wall_s: float
    cpu_s: float

    @classmethod
    def so_far(cls) -> Spent:
        return cls(time.monotonic(), sum(os.times()[:4]))

    def since(self, start: Spent) -> Spent:
        return Spent(self.wall_s - start.wall_s, self.cpu_s - start.cpu_s)

    def __str__(self) -> str:
        return f"{self.wall_s:.1f} s, {self.cpu_s:.1f} s of processor time"


@dataclass(slots=True)
class Suite:
    """Benchmarks that run one after another. Their rows are shown as soon as each has ended; one
    that fails, or lacks a package, does not stop the others."""

    frame: Frame
    shown: Shown
    count: int
    rows: list[Row] = field(default_factory=list)
    spent: dict[str, Spent] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def run(self, name: str, benchmark: Rows) -> None:
        place = f"[{len(self.spent) + 1}/{self.count}] " if self.count > 1 else ""
        console.note(f"{place}{name}{' (smoke)' if self.frame.smoke else ''} ...")
        start = Spent.so_far()
        try:
            with contextlib.redirect_stdout(sys.stderr), console.seconds_shown():
                made = benchmark(smoke=self.frame.smoke)
        except Exception as error:
            if self.count == 1:
                raise
            self._missed(name, error)
            made = []
        self.spent[name] = Spent.so_far().since(start)
        if self.count > 1:
            console.note(f"{place}{name}: {self.spent[name]}")
        self.rows += made
        self.shown.add(made)

    def _missed(self, name: str, error: Exception) -> None:
        if isinstance(error, Unavailable):
            console.note(f"{name} is left out: {error}")
            self.left_out.append(name)
            return
        traceback.print_exception(error, file=sys.stderr)
        self.failed.append(name)

    def told(self) -> None:
        """Says which benchmarks were slow, were left out and failed."""
        if self.count > 1:
            whole_s = sum(each.wall_s for each in self.spent.values())
            slow = {n: each for n, each in self.spent.items() if each.wall_s > SLOW_SHARE * whole_s}
            shown = sorted(slow.items(), key=lambda pair: -pair[1].wall_s)
            console.note("slowest: " + "; ".join(f"{name} {each}" for name, each in shown))
        if self.left_out:
            console.note(f"left out: {', '.join(self.left_out)}; the reason is above")
        if self.failed:
            console.note(f"failed: {', '.join(self.failed)}; the reason is above")


def _report(frame: Frame, benchmarks: Mapping[str, Rows]) -> int:
    """Reports the benchmarks that ran even if another failed, or if Ctrl-C ended the rest; the exit
    code tells."""
    from ess.bench.harness import report
    from ess.bench.harness.measure import machine

    for option, path in (("--json", frame.json), ("--out", frame.out)):
        console.check_file(option, path)
    build, measured_on = machine.build(), machine.machine()
    shown = report.Shown(None if frame.json else frame.format, build, measured_on)
    suite, is_cut = Suite(frame, shown, len(benchmarks)), False
    for name, benchmark in benchmarks.items():
        try:
            suite.run(name, benchmark)
        except KeyboardInterrupt:
            if not suite.rows:
                raise
            console.note(f"interrupted in {name}; the rows are of what came before it")
            is_cut = True
            break
    shown.end()
    document = report.Document(build=build, machine=measured_on, rows=suite.rows)
    report.write(document, json=frame.json, out=frame.out)
    suite.told()
    return console.INTERRUPTED if is_cut else console.FAILED if suite.failed else console.OK
