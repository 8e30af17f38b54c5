"""`ess plan`: what fits, how fast, what limits, before a GPU is bought."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from cyclopts import Parameter
from rich.table import Table

from ess import console
from ess.console import MaybeWhole, Whole
from ess.engine.chunking.partition import counted_costs, explained, partition, read_partition
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.registry import read_config as parse_config
from ess.models.weights.dry_run import read_config
from ess.server.commands import planpage
from ess.sim.locality import misses
from ess.sim.operators.gpus import GPUS, MODELS, check_planned, operators_of
from ess.sim.planning.advice import advice
from ess.sim.planning.ask import Ask
from ess.sim.planning.batches import Point
from ess.sim.planning.node import GIGABYTE_US, SOURCES, Node, Numa
from ess.sim.planning.planner import Plan, Planner
from ess.units import format_bytes, parse_size

DURATION: Final = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(us|ms|s)\s*$")
DURATION_US: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFlags:
    """What decodes, and how fast it must."""

    ctx: str = "128k"
    "Context length, such as 32k."
    model: str = "deepseek-v3.2"
    "A model with operator tables: deepseek-v3.2."
    gpu: str = "h200"
    "A GPU with operator tables: h100 or h200."
    gpus: Whole = 32
    "GPUs that share the experts: 8, 16, 32, 64, 128 or 256."
    mtp: Whole = 2
    "Tokens verified per step, up to 8."
    accepted: float | None = None
    "Tokens accepted per step; by default 70 % of each draft in turn."
    tpot: str | None = None
    "The most time per token and user, such as 50ms."
    device_bytes: str | None = None
    "Memory per GPU for slots and index. By default what weights and reserves leave."
    batch: MaybeWhole = None
    "Requests per GPU: plans the slots for it."
    ratio: float | None = None
    "Slots over context: plans the batch for it. It cannot leave a layer less than its floor."
    perf_db: Path | None = None
    "An unpacked measurement package to use in place of the tables that ship."


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFlags:
    """The nodes that the GPUs are in."""

    ram: str | None = None
    "Host memory of all nodes together, such as 8TiB, in place of --node-ram."
    node_ram: str = "2TiB"
    "Host memory per node for rows; the default is all that a DGX H200 has."
    node_gpus: Whole = 8
    "GPUs of a node."
    link_rate: float | None = None
    "GB/s at which a GPU gathers rows from host memory; by default 39.7, published for PCIe 5."
    dram_rate: float = 491.5
    "GB/s of host memory per node: by default four fifths of 16 channels of DDR5-4800."
    numa: Numa = "local"
    "Rows lie on the socket of their GPU, or interleaved over both."
    socket_rate: float = 153.6
    "GB/s between sockets, each way: by default four fifths of four UPI links at 16 GT/s."
    nic_rate: float = 400.0
    "GB/s of network per node, shared by its GPUs: by default eight ports of 400 Gbit/s."

    @property
    def node(self) -> Node:
        return Node(
            gpu_count=self.node_gpus,
            host_bytes=parse_size(self.node_ram),
            link_rate=None if self.link_rate is None else self.link_rate * GIGABYTE_US,
            dram_rate=self.dram_rate * GIGABYTE_US,
            numa=self.numa,
            socket_rate=self.socket_rate * GIGABYTE_US,
            nic_rate=self.nic_rate * GIGABYTE_US,
        )

    def host_bytes(self, gpus: int) -> int:
        """Of all nodes."""
        if self.ram is not None:
            return parse_size(self.ram)
        return self.node.host_bytes * self.node.count(max(gpus, 1))


def plan(
    *,
    decode: DecodeFlags | None = None,
    nodes: NodeFlags | None = None,
    html: Path | None = None,
    pp_size: MaybeWhole = None,
    pp_layer_partition: str | None = None,
    json: bool = False,
) -> None:
    """Batch, slots and time for a model on given GPUs, and what limits them.

    Parameters
    ----------
    html
        Also write a page that plans in a browser, without a server, to this file.
    pp_size
        Stages of a prefill tier's pipeline: says which layers each of them has, and why.
    pp_layer_partition
        Layers of each stage, such as 15,15,15,16, in place of the choice.
    json
        Print one JSON document.
    """
    decode, nodes = decode or DecodeFlags(), nodes or NodeFlags()
    console.check_folder("--html", html)
    check_planned(decode.model, decode.gpu)
    ask = _asked(decode, nodes)
    cut = cut_of(decode.model, ask, pp_size, pp_layer_partition)
    planner = planner_of(ask, decode.gpu, decode.perf_db, nodes.node)
    if html is not None:
        _write_page(html, planner, decode.model, decode.gpu)
    answer = planner.plan()
    _present(answer, ask, advice(planner, answer, nodes.node), cut, json=json)


def _asked(decode: DecodeFlags, nodes: NodeFlags) -> Ask:
    device_bytes, tpot = decode.device_bytes, decode.tpot
    return Ask(
        context=parse_size(decode.ctx),
        queries_each=decode.mtp,
        accepted=decode.accepted,
        gpu_count=decode.gpus,
        device_bytes=None if device_bytes is None else parse_size(device_bytes),
        host_bytes=nodes.host_bytes(decode.gpus),
        token_us_max=None if tpot is None else parse_duration(tpot),
        batch=decode.batch,
        ratio=decode.ratio,
    )


def _write_page(html: Path, planner: Planner, model: str, gpu: str) -> None:
    html.write_text(planpage.page(planner, model=model, gpu=gpu), encoding="utf-8")
    console.note(f"written: {html}")


def _present(plan: Plan, ask: Ask, sentences: list[str], cut: Cut | None, *, json: bool) -> None:
    if json:
        stages = {} if cut is None else {"pipeline": msgspec.to_builtins(cut)}
        said = {"advice": sentences, "sources": dict(SOURCES)}
        console.print_json({**msgspec.to_builtins(plan), **said, **stages})
        return
    _print(plan, ask)
    lines = [f"\n{sentence}" for sentence in sentences]
    if cut is not None:
        lines += [f"\nprefill in a pipeline of {len(cut.layers)}", *cut.explained]
    if lines:
        console.tables().print("\n".join(lines), highlight=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A model over the stages of a pipeline: how many layers each has, and what that means."""

    layers: tuple[int, ...]
    explained: tuple[str, ...]


def cut_of(model: str, ask: Ask, pp_size: int | None, given: str | None) -> Cut | None:
    """None where neither says that there are stages. MTP is part of the work where it drafts."""
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


def planner_of(ask: Ask, gpu: str, perf_db: Path | None, node: Node) -> Planner:
    check_planned(MODELS[0], gpu)
    limits = node.fetch_limits(GPUS[gpu].machine, gpus=ask.gpu_count)
    link_name = min(limits, key=lambda name: limits[name])
    return Planner(
        operators=operators_of(gpu, package=perf_db, link_rate=limits[link_name]),
        curves=misses.published(),
        ask=ask,
        layout=ModelLayout.deepseek_v32(),
        link_name=link_name,
    )


def parse_duration(text: str) -> float:
    """Microseconds.

    >>> parse_duration("50ms")
    50000.0
    """
    match = DURATION.match(text)
    if match is None or float(match[1]) <= 0:
        raise BadInput(f"{text!r} is not a time; write 50ms, 800us or 0.05s")
    return float(match[1]) * DURATION_US[match[2]]


def _print(plan: Plan, ask: Ask) -> None:
    table = Table.grid(padding=(0, 3))
    for justify in ("left", "right", "right", "left"):
        table.add_column(justify=justify)
    table.add_row("", "with offload", "resident", "")
    for line in _lines(plan, ask):
        table.add_row(*line)
    console.tables().print(table)


def _lines(plan: Plan, ask: Ask) -> list[tuple[str, str, str, str]]:
    chosen, resident = plan.chosen, plan.resident

    def both(name: str, of: str, remark: str = "") -> tuple[str, str, str, str]:
        return name, _show(chosen, of), "-" if resident is None else _show(resident, of), remark

    gain = "" if plan.gain is None else f"x{plan.gain:.2f}"
    even = "-" if plan.break_even_batch is None else f"{plan.break_even_batch}"
    wall = f"index keys alone fill {format_bytes(plan.device_bytes)}"
    return [
        both("batch per GPU", "batch", f"limited by {plan.limiter}"),
        both("slots per layer", "slots_each", f"floor {plan.slot_floor:,}"),
        both("of the context", "ratio"),
        both(
            "step", "step_us", f"{ask.queries_each} tokens verified, {plan.accepted:.2f} accepted"
        ),
        both("time per token", "token_us"),
        both("waits for the link", "exposed_us", _modes(chosen)),
        both("tokens/s per GPU", "tokens_per_s", gain),
        both("host memory per GPU", "host_bytes", f"{ask.gpu_count} GPUs"),
        ("break-even batch", even, "", "the least that beats resident"),
        ("floor batch", f"{plan.floor_batch}", "", "every request at the slot floor"),
        ("index wall", f"{plan.index_wall}", "", wall),
    ]


def _modes(point: Point) -> str:
    halves = "two halves" if point.tbo else "one batch"
    return ", ".join([*(f"{count} layers {name}" for name, count in point.modes.items()), halves])


def _show(point: Point, of: str) -> str:
    value: float = getattr(point, of)
    match of:
        case "step_us" | "token_us" | "exposed_us":
            return f"{value / 1e3:.1f} ms"
        case "host_bytes":
            return format_bytes(int(value))
        case "ratio":
            return f"{value:.1%}"
    return f"{value:,.0f}"
