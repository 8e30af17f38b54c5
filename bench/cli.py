"""`ess-bench`: every benchmark is a line in a table and a command, imported when it runs."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
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

BENCHMARKS: Final = (
    Command(
        name=HEADLINE,
        home="ess.bench.headline.headline:headline_benchmark",
        summary="Decode at a context: measured on this machine, predicted for a GPU.",
    ),
    Command(
        name="rows",
        home="ess.bench.kernels.rows:rows_benchmark",
        summary="Copies of many small rows against plain copies.",
    ),
    Command(
        name="planner",
        home="ess.bench.kernels.planner:planner_benchmark",
        summary="The residency planner against its NumPy specification.",
    ),
    Command(
        name="attend",
        home="ess.bench.kernels.attend:attend_benchmark",
        summary="Attention, the indexer, top-k and merge against torch.",
    ),
    Command(
        name="step",
        home="ess.bench.engine.step:step_benchmark",
        summary="Decode steps of the embedded model: offload against everything resident.",
    ),
    Command(
        name="slow-link",
        home="ess.bench.engine.slow_link:slow_link_benchmark",
        summary="DA and DBA against NONE on a slowed link: what is hidden, what was predicted.",
    ),
    Command(
        name="locality",
        home="ess.bench.locality.on_text:locality_benchmark",
        summary="Similarity, misses, warm-up and MTP acceptance on real text.",
    ),
    Command(
        name="guest",
        home="ess.bench.locality.guest_quality:guest_benchmark",
        summary="What selections cost a guest: loss against dense attention, recall per layer.",
    ),
    Command(
        name="own-grid",
        home="ess.bench.prediction.own_grid:own_grid_benchmark",
        summary="Steps of this machine over a grid: predicted from its tables, and measured.",
    ),
    Command(
        name="orders",
        home="ess.bench.engine.orders:orders_benchmark",
        summary="What TBO and the orders of SBO cost on one rank.",
    ),
    Command(
        name="entries",
        home="ess.bench.engine.entries:entries_benchmark",
        summary="Decode of entries of several tokens: offload against everything resident.",
    ),
    Command(
        name="comm",
        home="ess.bench.ranks.exchange:comm_benchmark",
        summary="Ranks: bytes they send, waits that TBO and SBO hide, memory in common.",
    ),
    Command(
        name="overhead",
        home="ess.bench.engine.overhead:overhead_benchmark",
        summary="The share of a decode step that is not model math.",
    ),
    Command(
        name="vs-transformers",
        home="ess.bench.engine.vs_transformers:vs_transformers_benchmark",
        summary="Decode beside the transformers implementation of the same model.",
    ),
    Command(
        name="vs-llama",
        home="ess.bench.locality.guest_beside:vs_llama_benchmark",
        summary="A guest's prompt and decode beside llama.cpp, from the same file.",
    ),
    Command(
        name="precision",
        home="ess.bench.engine.precision:precision_benchmark",
        summary="How far bf16 and fp8 are from float32, and DA and DBA from no offload.",
    ),
    Command(
        name="calibrate",
        home="ess.bench.engine.calibrate:calibrate_benchmark",
        summary="Measure where the layerwise policy starts; --out FILE writes it for the engine.",
    ),
    Command(
        name="serve",
        home="ess.bench.engine.serve:serve_benchmark",
        summary="The HTTP server alone: events per core, and from the engine to the socket.",
    ),
    Command(
        name="load",
        home="ess.bench.load.load:load_benchmark",
        summary="A server under arriving requests: first token, tokens, goodput.",
    ),
    Command(
        name="handoff",
        home="ess.bench.handoff.handoff:handoff_benchmark",
        summary="Prefill in one worker, decode in another: what is hidden, missed and gained.",
    ),
    Command(
        name="links",
        home="ess.bench.handoff.links:links_benchmark",
        summary="Links between ranks: a hop, the bandwidth, what asynchronous sends hide.",
    ),
    Command(
        name="prefix",
        home="ess.bench.prefill.cached_prompts:prefix_benchmark",
        summary="A second turn's first token: computed, from the host pool, from the disk.",
    ),
    Command(
        name="prefill",
        home="ess.bench.prefill.tier:prefill_benchmark",
        summary="A pipeline of stages: bubbles, sends, chunk sizes, memory, turns, serving.",
    ),
    Command(
        name="silicon",
        home="ess.bench.silicon.against:silicon_benchmark",
        summary="Public measurements of real servers beside what measured operators predict.",
    ),
    Command(
        name="paper",
        home="ess.bench.paper.published:paper_benchmark",
        summary="The published tables and figures, ours beside theirs.",
    ),
    Command(
        name="prefill-model",
        home="ess.bench.paper.prefill:prefill_benchmark",
        summary="Chunked pipeline prefill, predicted against published rows.",
    ),
    Command(
        name="policies",
        home="ess.bench.locality.policies:policies_benchmark",
        summary="Which row gives way: policies, miss curves and budgets on generated selections.",
    ),
    Command(
        name="trace",
        home="ess.bench.locality.trace_format:trace_benchmark",
        summary="The trace format against raw int32 and zlib.",
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
        "vs-transformers",
        "precision",
    ),
    "all": tuple(benchmark.name for benchmark in BENCHMARKS),
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = spelled_out(sys.argv[1:] if arguments is None else arguments)
    if given and given[0].startswith("-") and given[0] not in ("-h", "--help", "--version"):
        given = [HEADLINE, *given]
    if any(given[:1] == [known.name] for known in BENCHMARKS) and not {"-h", "--help"} & {*given}:
        console.note(f"{given[0]}: loading ...")
    try:
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
    """Imports only the benchmark that the command line names; the others are listed."""
    app = console.make_app("ess-bench", summary=SUMMARY, version=ess.__version__, commands=())
    for benchmark in benchmarks:
        command = command_of(benchmark) if benchmark.name in given[:1] else _never_called
        app.command(command, name=benchmark.name, help=benchmark.summary)
    for suite, names in suites.items():
        members = [benchmark for benchmark in benchmarks if benchmark.name in names]
        help = "Every benchmark." if suite == "all" else f"{', '.join(names)}."
        app.command(suite_of(members), name=suite, help=help)
    return app


def _never_called() -> None:
    raise AssertionError("this command was not given, so it was not imported")


if __name__ == "__main__":
    sys.exit(main())
