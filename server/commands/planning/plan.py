"""`ess plan`: what fits, how fast it runs, and what limits it, before a GPU is bought."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from cyclopts import Parameter

from ess import console
from ess.console import MaybeWhole, Whole
from ess.engine.chunking.partition import counted_costs, explained, partition, read_partition
from ess.errors import BadInput
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.dry_run import read_config
from ess.server.commands.planning import fits, planpage
from ess.server.commands.planning.planshow import show, show_changes
from ess.sim.operators.parallel import Parallel
from ess.sim.operators.silicon.stacks import SGLANG, Stack
from ess.sim.planning.answers import PlanAnswer, Question, answered
from ess.sim.planning.ask import Ask
from ess.sim.planning.changes import ChangedPlan, Setup, changed
from ess.sim.planning.deployment import CACHED_SHARE, OUTPUT_TOKENS, Work
from ess.sim.planning.fleet import FleetGoal
from ess.sim.planning.node import GIGABYTE_US, Node, Numa, node_of, sources_of
from ess.sim.planning.planner import Planner
from ess.sim.planning.planners import MODEL, planner_of
from ess.sim.planning.ways import best_way
from ess.units import parse_size

SCHEMA: Final = "ess.plan/1"
DURATION: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*$")
DURATION_US: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareFlags:
    """The GPUs that decode, and the measurements of them."""

    gpu: str = "h200"
    (
        "A GPU with operator tables, h100, h200 or b200; h800 and h20 by stated ratios of these, "
        "and gb200, a b200 in racks of 72."
    )
    stack: Stack = SGLANG
    "The framework whose measured kernels a step is made of: sglang, vllm or trtllm."
    gpus: Whole = 32
    "GPUs that share the experts."
    mtp: Whole = 2
    "Tokens verified per step, up to 8."
    accepted: float | None = None
    "Tokens accepted per step; by default 70 % of each draft in turn."
    device_bytes: str | None = None
    "Memory per GPU for slots and index. By default what weights and reserves leave."
    perf_db: Path | None = None
    "An unpacked measurement package to use in place of the tables that ship."

    @property
    def device_limit(self) -> int | None:
        given = self.device_bytes
        return None if given is None else parse_size(given, "--device-bytes")

    def asked(self, context: int, ways: WayFlags, nodes: NodeFlags, **more: Any) -> Ask:
        return Ask(
            context=context,
            queries_each=self.mtp,
            accepted=self.accepted,
            gpu_count=self.gpus,
            device_bytes=self.device_limit,
            host_bytes=nodes.host_bytes(self.gpu, self.gpus),
            parallel=ways.over(self.gpus),
            **more,
        )

    def planner_for(self, setup: Setup, model: str) -> Planner:
        ask, gpu, node = setup.ask, setup.gpu, setup.node
        return planner_of(ask, gpu, node, model=model, stack=self.stack, package=self.perf_db)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFlags(HardwareFlags):
    """The decoding model, and the time allowed per token."""

    ctx: str = "128k"
    "Context length, such as 32k."
    model: str = MODEL
    (
        "deepseek-v3.2, glm-5 or glm-5.2; deepseek-v3 and -r1 attend to every row, and run "
        "resident. For a.x-k2-light, hy4-preview, mistral-large-4, dots3-note, deepseek-v4-flash "
        "and glm-5.3-flash no operator was measured: the plan says only what fits."
    )
    tpot: str | None = None
    "The most time per token and user, such as 50ms."
    batch: MaybeWhole = None
    "Requests per GPU: plans the slots for it."
    ratio: float | None = None
    "Slots over context: plans the batch for it. It cannot leave a layer less than its floor."


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WayFlags:
    """How the GPUs share the model."""

    attention_tp: MaybeWhole = None
    (
        "GPUs that share the heads of a request. Without this and the next two `ess plan` searches "
        "for the best; `ess sim` spreads requests and experts over all GPUs."
    )
    expert_tp: MaybeWhole = None
    "GPUs that share each expert."
    decode_pp: MaybeWhole = None
    "Stages of decode, each with its share of the layers."

    def over(self, gpus: int) -> Parallel | None:
        """The layout of the GPUs; None if no flag is set."""
        given = (self.attention_tp, self.expert_tp, self.decode_pp)
        if given == (None, None, None):
            return None
        tp, expert_tp, pp = (1 if size is None else size for size in given)
        if min(tp, expert_tp, pp) < 1 or gpus % (tp * pp) or gpus % (expert_tp * pp):
            raise BadInput(
                f"--gpus {gpus} do not divide evenly by --attention-tp {tp}, --expert-tp "
                f"{expert_tp} and --decode-pp {pp}"
            )
        stage = gpus // pp
        return Parallel(
            attention_tp=tp,
            attention_dp=stage // tp,
            expert_ep=stage // expert_tp,
            expert_tp=expert_tp,
            pp=pp,
        )


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TierFlags:
    """Decode and prefill together: what a request is, and how many arrive."""

    out: Whole = OUTPUT_TOKENS
    "Tokens that a request makes; what is left of --ctx is its prompt."
    cached: float = CACHED_SHARE
    "Share of the prompt that is cached; the default is that of a long, continued conversation."
    price_per_gpu_hour: float | None = None
    "Price of a GPU hour; adds the cost of a million tokens. No default."
    rate: float | None = None
    "Requests per second; searches the fewest GPUs that serve them, over all group sizes."
    ttft: str = "10s"
    "With --rate: the most time to the first token, for nine in ten requests."


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFlags:
    """The nodes that the GPUs are in."""

    ram: str | None = None
    "Host memory of all nodes together, such as 8TiB, in place of --node-ram."
    node_ram: str | None = None
    "Host memory per node for rows: by default 2TiB, all that a DGX H200 has, and 960GB for gb200."
    node_gpus: MaybeWhole = None
    "GPUs that share this memory: by default 8, and 4 for gb200."
    link_rate: float | None = None
    (
        "GB/s at which a GPU gathers rows from host memory: by default 39.7, published for PCIe 5, "
        "and 140 for gb200."
    )
    dram_rate: float | None = None
    (
        "GB/s of host memory per node: by default 491.5, four fifths of 16 channels of DDR5-4800, "
        "and 622 for gb200."
    )
    numa: Numa = "local"
    "Rows lie on the socket of their GPU, or interleaved over both."
    socket_rate: float = 153.6
    "GB/s between sockets, each way: by default four fifths of four UPI links at 16 GT/s."
    nic_rate: float | None = None
    "GB/s of network per node, shared by its GPUs: by default 400 Gbit/s for each."

    def node(self, gpu: str) -> Node:
        """The node of this GPU, with the figures that were given in place of its own."""
        given: dict[str, Any] = {"gpu_count": self.node_gpus}
        if self.node_ram is not None:
            given["host_bytes"] = parse_size(self.node_ram, "--node-ram")
        for name in ("link_rate", "dram_rate", "nic_rate"):
            rate = getattr(self, name)
            given[name] = None if rate is None else rate * GIGABYTE_US
        return replace(
            node_of(gpu),
            numa=self.numa,
            socket_rate=self.socket_rate * GIGABYTE_US,
            **{name: value for name, value in given.items() if value is not None},
        )

    def host_bytes(self, gpu: str, gpus: int) -> int:
        """Host bytes for this many GPUs, over all nodes."""
        if self.ram is not None:
            return parse_size(self.ram, "--ram")
        return self.node(gpu).host_bytes_of(max(gpus, 1))


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFlags(HardwareFlags):
    """The worker that `ess sim` replays; it stands here, where cyclopts finds the types."""

    model: str = MODEL
    "A model that selects rows: deepseek-v3.2, glm-5 or glm-5.2."

    def planner(self, context: int, ways: WayFlags, nodes: NodeFlags) -> Planner:
        node = nodes.node(self.gpu)
        setup = Setup(ask=self.asked(context, ways, nodes), node=node, gpu=self.gpu)
        return self.planner_for(setup, self.model)


def plan(
    *,
    decode: DecodeFlags | None = None,
    ways: WayFlags | None = None,
    tiers: TierFlags | None = None,
    nodes: NodeFlags | None = None,
    what_if: bool = False,
    html: Path | None = None,
    pp_size: MaybeWhole = None,
    pp_layer_partition: str | None = None,
    json: bool = False,
) -> None:
    """Batch, slots and time for a model on given GPUs, and what limits them.

    Parameters
    ----------
    what_if
        Also say what other GPUs, memory, links and numbers of drafts would do.
    html
        Also write a page that plans in a browser, without a server, to this file.
    pp_size
        Stages of a prefill tier's pipeline: says which layers each of them has, and why.
    pp_layer_partition
        Layers of each stage, such as 15,15,15,16, in place of the choice.
    json
        Print one JSON document.
    """
    decode, tiers, nodes = decode or DecodeFlags(), tiers or TierFlags(), nodes or NodeFlags()
    console.check_file("--html", html)
    fits.check_planned(decode.model)
    if fits.is_unmeasured(decode.model):
        stages = {"--pp-size": pp_size, "--pp-layer-partition": pp_layer_partition, "--html": html}
        stages["--what-if"] = what_if or None
        fits.show(_fit(decode, ways or WayFlags(), tiers, nodes, stages), json=json)
        return
    ask = _asked(decode, ways or WayFlags(), nodes)
    is_free = ask.parallel is None and ask.batch is None and ask.ratio is None
    cut = cut_of(decode.model, ask, pp_size, pp_layer_partition)
    node = nodes.node(decode.gpu)
    question = _question(ask, tiers, node, is_searched=is_free)
    planner_for = partial(decode.planner_for, model=decode.model)
    setup = Setup(ask=ask, node=node, gpu=decode.gpu)
    with console.patience("ess: searching batches, slots and ways to share the model ..."):
        planner = planner_for(setup)
        if is_free:
            planner = best_way(planner)
        answer = answered(planner, question)
        others = changed(setup, question, planner_for) if what_if else ()
    if html is not None:
        _write_page(html, planner, question, decode)
    if json:
        console.print_json(_document(_asked_for(decode, setup, question), answer, cut, others))
    else:
        show(answer, ask, question, [] if cut is None else cut.lines)
        if others:
            show_changes(others)


def _fit(
    decode: DecodeFlags,
    ways: WayFlags,
    tiers: TierFlags,
    nodes: NodeFlags,
    more: Mapping[str, object],
) -> fits.Fit:
    """What fits, without times; refuses flags that need times. `more` are some of them."""
    needing = {
        "--tpot": decode.tpot,
        "--batch": decode.batch,
        "--ratio": decode.ratio,
        "--perf-db": decode.perf_db,
        "--attention-tp": ways.attention_tp,
        "--expert-tp": ways.expert_tp,
        "--decode-pp": ways.decode_pp,
        "--rate": tiers.rate,
        "--price-per-gpu-hour": tiers.price_per_gpu_hour,
    }
    for flag, value in {**needing, **more}.items():
        if value is not None:
            raise BadInput(f"{flag} needs operator tables, and none of {decode.model} was measured")
    return fits.fit(
        decode.model,
        context=parse_size(decode.ctx, "--ctx"),
        gpu=decode.gpu,
        gpus=decode.gpus,
        room_bytes=decode.device_limit,
        host_bytes=nodes.host_bytes(decode.gpu, decode.gpus),
    )


def _asked(decode: DecodeFlags, ways: WayFlags, nodes: NodeFlags) -> Ask:
    token_us_max = None if decode.tpot is None else parse_duration(decode.tpot, "--tpot")
    more = {"token_us_max": token_us_max, "batch": decode.batch, "ratio": decode.ratio}
    return decode.asked(parse_size(decode.ctx, "--ctx"), ways, nodes, **more)


def _question(ask: Ask, tiers: TierFlags, node: Node, *, is_searched: bool) -> Question:
    wanted, ttft_s = None, parse_duration(tiers.ttft, "--ttft") / 1e6
    if tiers.rate is not None:
        wanted = FleetGoal(rate=tiers.rate, ttft_s=ttft_s)
    return Question(
        node=node,
        work=Work(context=ask.context, output_tokens=tiers.out, cached_share=tiers.cached),
        price=tiers.price_per_gpu_hour,
        wanted=wanted,
        is_searched=is_searched,
    )


def _asked_for(decode: DecodeFlags, setup: Setup, question: Question) -> dict[str, Any]:
    parts = {**msgspec.to_builtins(setup), **msgspec.to_builtins(question)}
    return {"model": decode.model, "stack": decode.stack, **parts}


def _document(
    asked: dict[str, Any], answer: PlanAnswer, cut: Cut | None, others: tuple[ChangedPlan, ...]
) -> dict[str, Any]:
    """The question and its answer as JSON, the plan's own fields at the top; docs/planning.md lists
    all of them."""
    whole = msgspec.to_builtins(answer)
    parts = {"pipeline": cut, "what_if": others or None}
    return {
        "schema": SCHEMA,
        "question": asked,
        **whole.pop("plan"),
        **whole,
        "sources": dict(sources_of(asked["gpu"])),
        **{name: msgspec.to_builtins(part) for name, part in parts.items() if part is not None},
    }


def _write_page(html: Path, planner: Planner, question: Question, decode: DecodeFlags) -> None:
    with console.patience("ess: computing the figures that the page interpolates ..."):
        page = planpage.page(planner, question, model=decode.model, gpu=decode.gpu)
        html.write_text(page, encoding="utf-8")
    console.note(f"written: {html}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model over the stages of a pipeline: the layers of each, and what follows from them."""

    layers: tuple[int, ...]
    explained: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        return ["", f"prefill in a pipeline of {len(self.layers)}", *self.explained]


def cut_of(model: str, ask: Ask, pp_size: int | None, given: str | None) -> Cut | None:
    """None if no flag asks for stages. MTP is part of the work if it drafts."""
    counts = None if given is None else read_partition(given)
    if pp_size is None and counts is None:
        return None
    config = parse_config(read_config(model))
    config = msgspec.structs.replace(config, mtp_layer_count=int(ask.queries_each > 1))
    layout, costs = config.layout(name=model), counted_costs(config, context=ask.context)
    stages = len(counts or ()) if pp_size is None else pp_size
    parts = partition(layout, stages, given=counts, costs=costs)
    return Cut(
        layers=tuple(len(part) for part in parts),
        explained=tuple(explained(layout, parts, costs)),
    )


def parse_duration(text: str, flag: str) -> float:
    """The duration in microseconds.

    >>> parse_duration("50ms", "--tpot")
    50000.0
    """
    match = DURATION.match(text)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"{flag} {text}: must be a time above 0, such as 50ms, 800us or 0.05s")
    return float(match[1]) * DURATION_US[match[2]]
