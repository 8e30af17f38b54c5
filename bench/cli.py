"""`ess-bench`: every benchmark is a line in a table, imported when it runs."""

from __future__ import annotations

import contextlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import cyclopts

import ess
from ess import console
from ess.bench.headline.command import headline
from ess.console import Command
from ess.errors import BadInput

if TYPE_CHECKING:
    from ess.bench.harness.report import Row

SUMMARY: Final = "Benchmarks that print a ratio against a named baseline."


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """`home` is "module:function"; the function takes `smoke` and returns rows.

    One that `takes_trace` also takes `trace`, a recorded trace to work on or None.
    """

    suite: str
    name: str
    home: str
    takes_trace: bool = False


BENCHMARKS: Final = (
    Benchmark(suite="kernels", name="rows", home="ess.bench.kernels.rows:rows_benchmark"),
    Benchmark(suite="kernels", name="planner", home="ess.bench.kernels.planner:planner_benchmark"),
    Benchmark(suite="kernels", name="attend", home="ess.bench.kernels.attend:attend_benchmark"),
    Benchmark(suite="paper", name="paper", home="ess.bench.paper.published:paper_benchmark"),
    Benchmark(suite="trace", name="trace", home="ess.bench.paper.trace:trace_benchmark"),
    Benchmark(
        suite="policies",
        name="policies",
        home="ess.bench.paper.policies:policies_benchmark",
        takes_trace=True,
    ),
    Benchmark(
        suite="prefill-model",
        name="prefill-model",
        home="ess.bench.paper.prefill:prefill_benchmark",
    ),
    Benchmark(suite="engine", name="step", home="ess.bench.engine.step:step_benchmark"),
    Benchmark(suite="engine", name="paced", home="ess.bench.engine.slow_link:paced_benchmark"),
    Benchmark(suite="engine", name="locality", home="ess.bench.engine.locality:locality_benchmark"),
    Benchmark(
        suite="calibrate", name="calibrate", home="ess.bench.engine.calibrate:calibrate_benchmark"
    ),
    Benchmark(suite="engine", name="orders", home="ess.bench.engine.orders:orders_benchmark"),
    Benchmark(suite="engine", name="overhead", home="ess.bench.engine.overhead:overhead_benchmark"),
    Benchmark(
        suite="engine", name="rival", home="ess.bench.engine.vs_transformers:rival_benchmark"
    ),
    Benchmark(suite="serve", name="serve", home="ess.bench.engine.serve:serve_benchmark"),
)

COMMANDS: Final = (
    Command(
        name="overhead",
        home="ess.bench.engine.overhead:overhead",
        summary="The share of a decode step that is not model math.",
    ),
    Command(
        name="rival",
        home="ess.bench.engine.vs_transformers:rival",
        summary="Decode beside the transformers implementation of the same model.",
    ),
    Command(
        name="step",
        home="ess.bench.engine.step:step",
        summary="Decode steps of the embedded model: offload against everything resident.",
    ),
    Command(
        name="paced",
        home="ess.bench.engine.slow_link:paced",
        summary="DA and DBA against NONE on a slowed link: what is hidden, what was predicted.",
    ),
    Command(
        name="locality",
        home="ess.bench.engine.locality:locality",
        summary="Similarity, misses, warm-up and MTP acceptance on real text.",
    ),
)
"""Benchmarks with options of their own; `all` runs their BENCHMARKS line in smoke or full size."""

SUITES: Final = {
    "kernels": "Row movers, the residency planner, attention and the indexer.",
    "paper": "The published tables and figures, ours beside theirs.",
    "trace": "The trace format against raw int32 and zlib.",
    "policies": "Which row gives way: policies, miss curves and budgets on generated selections.",
    "prefill-model": "Chunked pipeline prefill, predicted against published rows.",
    "engine": "The engine on the embedded model: what residency costs and what it hides.",
    "calibrate": "What the layerwise policy starts from; --out FILE writes it for the engine.",
    "serve": "The HTTP server alone: events per core, and from the engine to the socket.",
    "all": "Every suite.",
}


def make_app(
    benchmarks: Sequence[Benchmark],
    suites: Mapping[str, str],
    commands: Sequence[Command] = (),
) -> cyclopts.App:
    app = console.make_app("ess-bench", summary=SUMMARY, version=ess.__version__, commands=commands)
    for suite, summary in suites.items():
        members = [one for one in benchmarks if suite in ("all", one.suite)]
        app.command(_suite_command(members), name=suite, help=summary)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Options without a suite are the headline's; a word is a suite, or a slip that gets a hint."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    app = make_app(BENCHMARKS, SUITES, COMMANDS)
    if given and given[0].startswith("-"):
        app.default(headline)
    return console.run(app, given)


def _suite_command(members: Sequence[Benchmark]) -> Callable[..., int]:
    def command(
        *,
        smoke: bool = False,
        json: bool = False,
        only: str | None = None,
        out: Path | None = None,
        trace: Path | None = None,
    ) -> int:
        """Run the benchmarks of this suite.

        Parameters
        ----------
        smoke
            Small sizes: shows that everything runs, not how fast.
        json
            Print the JSON document on stdout; everything else goes to stderr.
        only
            Run this one benchmark.
        out
            Also write the JSON document to this file.
        trace
            Work on this recorded trace, where a benchmark can.
        """
        chosen = _choose(members, only)
        if trace is not None and not any(one.takes_trace for one in chosen):
            names = ", ".join(one.name for one in chosen)
            raise BadInput(f"--trace {trace}: {names} cannot work on a recorded trace")
        console.check_folder("--out", out)
        return _run_suite(chosen, smoke=smoke, json=json, out=out, trace=trace)

    return command


def _choose(members: Sequence[Benchmark], only: str | None) -> Sequence[Benchmark]:
    chosen = [one for one in members if only in (None, one.name)]
    if not chosen:
        names = ", ".join(one.name for one in members)
        raise BadInput(f"--only {only}: no such benchmark in this suite; choose from {names}")
    return chosen


def _run_suite(
    benchmarks: Sequence[Benchmark],
    *,
    smoke: bool,
    json: bool,
    out: Path | None,
    trace: Path | None,
) -> int:
    """Rows of those that ran are reported even when another failed; then the exit code says so."""
    from ess.bench.harness import machine, report

    rows: list[Row] = []
    failed: list[str] = []
    measured_on = machine.machine()
    for one in benchmarks:
        try:
            rows += _run_benchmark(one, smoke=smoke, trace=trace)
        except Exception:
            traceback.print_exc(file=sys.stderr)
            failed.append(one.name)
    document = report.Document(build=machine.build(), machine=measured_on, rows=rows)
    report.present(document, json=json, out=out)
    if failed:
        console.note(f"failed: {', '.join(failed)}; the reason is above")
    return console.FAILED if failed else console.OK


def _run_benchmark(benchmark: Benchmark, *, smoke: bool, trace: Path | None) -> list[Row]:
    """Whatever a benchmark prints goes to stderr: stdout is for the document."""
    from ess.bench.harness.report import as_row

    console.note(f"{benchmark.suite}/{benchmark.name}{' (smoke)' if smoke else ''} ...")
    module, _, name = benchmark.home.partition(":")
    function = getattr(importlib.import_module(module), name)
    with contextlib.redirect_stdout(sys.stderr):
        given = {"trace": trace} if benchmark.takes_trace else {}
        rows: Iterable[Any] = function(smoke=smoke, **given)
    return [as_row(row) for row in rows]
