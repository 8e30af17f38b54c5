"""`ess-bench`: every benchmark is a line in a table and a command, imported when it runs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import cyclopts

import ess
from ess import console
from ess.bench.harness.frame import command_of, suite_of
from ess.console import Command
from ess.errors import Unavailable

HEADLINE: Final = "headline"
SUMMARY: Final = (
    "Benchmarks that print a ratio against a named baseline. Options without a command are those "
    f"of `{HEADLINE}`: ess-bench --ctx 128k --mtp 2"
)

STEPS: Final = "Steps of a model, on this machine"
KERNELS: Final = "Kernels, on this machine"
TEXT: Final = "Selections on real text"
BESIDE: Final = "Beside other software"
SERVERS: Final = "Servers, workers and ranks"
COUNTS: Final = "Published figures and counts"

BENCHMARKS: Final = (
    Command(
        name=HEADLINE,
        home="ess.bench.headline.headline:headline_benchmark",
        summary="Decode at a context: measured on this machine, predicted for a GPU.",
        group=STEPS,
    ),
    Command(
        name="rows",
        home="ess.bench.kernels.rows:rows_benchmark",
        summary="Copies of many small rows against plain copies.",
        group=KERNELS,
    ),
    Command(
        name="planner",
        home="ess.bench.kernels.planner:planner_benchmark",
        summary="The residency planner against its NumPy specification.",
        group=KERNELS,
    ),
    Command(
        name="attend",
        home="ess.bench.kernels.attend:attend_benchmark",
        summary="Attention, the indexer, top-k and merge against torch.",
        group=KERNELS,
    ),
    Command(
        name="step",
        home="ess.bench.engine.step:step_benchmark",
        summary="Decode steps of the embedded model: offload against everything resident.",
        group=STEPS,
    ),
    Command(
        name="slow-link",
        home="ess.bench.engine.slow_link:slow_link_benchmark",
        summary="DA and DBA against NONE on a slowed link: what is hidden, what was predicted.",
        group=STEPS,
    ),
    Command(
        name="locality",
        home="ess.bench.locality.on_text:locality_benchmark",
        summary="Similarity, misses, warm-up and MTP acceptance on real text.",
        group=TEXT,
    ),
    Command(
        name="guest",
        home="ess.bench.locality.guest_quality:guest_benchmark",
        summary="What selections cost a guest: loss against dense attention, recall per layer.",
        group=TEXT,
    ),
    Command(
        name="own-grid",
        home="ess.bench.prediction.own_grid:own_grid_benchmark",
        summary="Steps of this machine over a grid: predicted from its tables, and measured.",
        group=STEPS,
    ),
    Command(
        name="orders",
        home="ess.bench.engine.orders:orders_benchmark",
        summary="What TBO and the orders of SBO cost on one rank.",
        group=STEPS,
    ),
    Command(
        name="entries",
        home="ess.bench.engine.entries:entries_benchmark",
        summary="Decode of entries of several tokens: offload against everything resident.",
        group=STEPS,
    ),
    Command(
        name="comm",
        home="ess.bench.ranks.exchange:comm_benchmark",
        summary="Ranks: bytes they send, waits that TBO and SBO hide, memory in common.",
        group=SERVERS,
    ),
    Command(
        name="overhead",
        home="ess.bench.engine.overhead:overhead_benchmark",
        summary="The share of a decode step that is not model math.",
        group=STEPS,
    ),
    Command(
        name="loop",
        home="ess.bench.engine.loop:loop_benchmark",
        summary="A step in the engine's process beside the model, up to 160 requests.",
        group=STEPS,
    ),
    Command(
        name="vs-transformers",
        home="ess.bench.engine.vs_transformers:vs_transformers_benchmark",
        summary="Decode beside the transformers implementation of the same model.",
        group=BESIDE,
    ),
    Command(
        name="vs-llama",
        home="ess.bench.locality.guest_beside:vs_llama_benchmark",
        summary="A guest's prompt and decode beside llama.cpp, from the same file.",
        group=BESIDE,
    ),
    Command(
        name="precision",
        home="ess.bench.engine.precision:precision_benchmark",
        summary="How far bf16 and fp8 are from float32, and DA and DBA from no offload.",
        group=STEPS,
    ),
    Command(
        name="calibrate",
        home="ess.bench.engine.calibrate:calibrate_benchmark",
        summary="Measure where the layerwise policy starts; --out FILE writes it for the engine.",
        group=STEPS,
    ),
    Command(
        name="serve",
        home="ess.bench.engine.serve:serve_benchmark",
        summary="The HTTP server alone: events per core, and from the engine to the socket.",
        group=SERVERS,
    ),
    Command(
        name="load",
        home="ess.bench.load.load:load_benchmark",
        summary="A server under arriving requests: first token, tokens, goodput.",
        group=SERVERS,
    ),
    Command(
        name="handoff",
        home="ess.bench.handoff.handoff:handoff_benchmark",
        summary="Prefill in one worker, decode in another: what is hidden, missed and gained.",
        group=SERVERS,
    ),
    Command(
        name="links",
        home="ess.bench.handoff.links:links_benchmark",
        summary="Links between ranks: a hop, the bandwidth, what asynchronous sends hide.",
        group=SERVERS,
    ),
    Command(
        name="prefix",
        home="ess.bench.prefill.cached_prompts:prefix_benchmark",
        summary="A second turn's first token: computed, from the host pool, from the disk.",
        group=SERVERS,
    ),
    Command(
        name="prefill",
        home="ess.bench.prefill.tier:prefill_benchmark",
        summary="A pipeline of stages: bubbles, sends, chunk sizes, memory, turns, serving.",
        group=SERVERS,
    ),
    Command(
        name="silicon",
        home="ess.bench.silicon.against:silicon_benchmark",
        summary="Public measurements of real servers beside what measured operators predict.",
        group=COUNTS,
    ),
    Command(
        name="paper",
        home="ess.bench.paper.published:paper_benchmark",
        summary="The published tables and figures, ours beside theirs.",
        group=COUNTS,
    ),
    Command(
        name="prefill-model",
        home="ess.bench.paper.prefill:prefill_benchmark",
        summary="Chunked pipeline prefill, predicted against published rows.",
        group=COUNTS,
    ),
    Command(
        name="policies",
        home="ess.bench.locality.policies:policies_benchmark",
        summary="Which row gives way: policies, miss curves and budgets on generated selections.",
        group=COUNTS,
    ),
    Command(
        name="trace",
        home="ess.bench.locality.trace_format:trace_benchmark",
        summary="The trace format against raw int32 and zlib.",
        group=COUNTS,
    ),
)

SUITES: Final = {
    "kernels": ("rows", "planner", "attend"),
    "engine": (
        "step",
        "slow-link",
        "locality",
        "orders",
        "entries",
        "overhead",
        "loop",
        "vs-transformers",
        "precision",
    ),
    "all": tuple(benchmark.name for benchmark in BENCHMARKS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = spelled_out(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        given = [HEADLINE, *given]
    try:
        with console.patience(f"{' '.join(('ess-bench', *given[:1]))}: loading ..."):
            app = make_app(BENCHMARKS, SUITES, given)
    except Unavailable as error:
        console.note(f"ess-bench: {error}")
        return console.FAILED
    return console.run(app, given)


def spelled_out(given: Sequence[str]) -> list[str]:
    """`--json` without a file becomes `--json=-`: the parser wants a value after every option."""
    pairs = itertools.pairwise(["", *given])
    words = [word for before, word in pairs if (before, word) != ("--json", "-")]
    return [
        "--json=-" if word == "--json" and after.startswith("-") else word
        for word, after in itertools.pairwise([*words, "-"])
    ]


def make_app(
    benchmarks: Sequence[Command], suites: Mapping[str, Sequence[str]], given: Sequence[str]
) -> cyclopts.App:
    """Imports the benchmark that the command line names, all for `completion`; lists the others."""
    commands = [replace(known, home=_home_of(known, given[:1])) for known in benchmarks]
    for suite, names in suites.items():
        members = [benchmark for benchmark in benchmarks if benchmark.name in names]
        summary = "Every benchmark." if suite == "all" else f"{', '.join(names)}."
        home = suite_of(members)
        commands.append(Command(name=suite, home=home, summary=summary, group="Several at once"))
    return console.make_app(
        "ess-bench", summary=SUMMARY, version=ess.__version__, commands=commands
    )


def _home_of(known: Command, given: Sequence[str]) -> Callable[..., object]:
    if known.name in given:
        return command_of(known)
    if "completion" in given:
        with contextlib.suppress(Unavailable):
            return command_of(known)
    return _never_called


def _never_called() -> None:
    raise AssertionError("this command was not given, so it was not imported")


if __name__ == "__main__":
    sys.exit(main())
