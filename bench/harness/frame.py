"""The frame around every benchmark: the options of all commands, and the output of their rows.

A benchmark is a function from its own options and `smoke` to rows. Nothing heavy is imported here:
the list of commands must appear at once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import cyclopts

from ess import console
from ess.console import Command
from ess.errors import BadInput, Unavailable

if TYPE_CHECKING:
    from ess.bench.harness.report import Row

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


def command_of(benchmark: Command) -> Callable[..., int]:
    """A command with the benchmark's own options, except `smoke`, and those of the frame."""
    rows = _load(benchmark)

    def command(*, frame: Frame = PLAIN, **options: Any) -> int:
        return _report(frame, {benchmark.name: functools.partial(rows, **options)})

    own = inspect.signature(rows, eval_str=True).parameters
    shown = [option for option in own.values() if option.name != "smoke"]
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
    module, _, name = benchmark.home.partition(":")
    try:
        rows: Rows = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "ess").partition(".")[0] == "ess":
            raise
        need = f"{benchmark.name} needs {error.name}, which is not installed"
        raise Unavailable(f"{need}: pip install 'ess[serve]'") from None
    return rows


def _run(benchmark: Command, *, smoke: bool) -> list[Row]:
    return _load(benchmark)(smoke=smoke)


def _report(frame: Frame, benchmarks: Mapping[str, Rows]) -> int:
    """Reports the benchmarks that ran even if another failed, or if Ctrl-C ended the rest; the exit
    code tells."""
    from ess.bench.harness import machine, report

    for option, path in (("--json", frame.json), ("--out", frame.out)):
        console.check_folder(option, path)
    rows: list[Row] = []
    failed: list[str] = []
    code, measured_on = console.OK, machine.machine()
    for name, benchmark in benchmarks.items():
        console.note(f"{name}{' (smoke)' if frame.smoke else ''} ...")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                rows += benchmark(smoke=frame.smoke)
        except KeyboardInterrupt:
            if not rows:
                raise
            console.note(f"interrupted in {name}; what came before it:")
            code = console.INTERRUPTED
            break
        except Exception:
            if len(benchmarks) == 1:
                raise
            traceback.print_exc(file=sys.stderr)
            failed.append(name)
    document = report.Document(build=machine.build(), machine=measured_on, rows=rows)
    report.present(document, json=frame.json, form=frame.format, out=frame.out)
    if failed:
        console.note(f"failed: {', '.join(failed)}; the reason is above")
        code = code or console.FAILED
    return code
