"""For models without measured operators: how many requests GPUs hold, but no times."""

from __future__ import annotations

from typing import Any

import msgspec

from ess import console
from ess.errors import BadInput
from ess.models.config import ModelConfig
from ess.models.registry import read_config as parse_config
from ess.models.weights.expected.dry_run import PUBLISHED, make_plan, read_config, request_needs
from ess.server.commands.planning.planshow import Line, print_sides
from ess.sim.operators.families import FAMILIES
from ess.sim.operators.silicon.chip import chip_of
from ess.sim.planning.planner import RESERVED_BYTES
from ess.units import format_bytes


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU holds, and what one request takes of it."""

    schema: str = "ess.fit/1"
    model: str
    gpu: str
    gpu_count: int
    context: int
    expert_ranks: int
    weight_bytes: int
    room_bytes: int
    host_bytes: int
    request_host_bytes: int
    request_state_bytes: int
    request_offloaded_bytes: int
    request_resident_bytes: int
    batch: int
    batch_resident: int
    limiter: str
    marks: tuple[str, ...]


def is_unmeasured(model: str) -> bool:
    """Whether a model has a published configuration alone, and no operator tables."""
    return model in PUBLISHED and model not in FAMILIES


def check_planned(model: str) -> None:
    """Refuses a model that has neither operator tables nor a published configuration."""
    if model not in FAMILIES and model not in PUBLISHED:
        raise BadInput(
            f"no operator tables for {model!r}; there are {', '.join(FAMILIES)}, and for what fits,"
            f" without times, {', '.join(filter(is_unmeasured, PUBLISHED))}"
        )


def fit(
    model: str, *, context: int, gpu: str, gpus: int, room_bytes: int | None, host_bytes: int
) -> Fit:
    """Every GPU has all heads and its share of the experts. `room_bytes` is its memory for
    requests, by default what weights and reserves leave; `host_bytes` is for all GPUs."""
    raw, machine = read_config(model), chip_of(gpu).machine
    config = parse_config(raw)
    if not 0 < context <= config.positions_max:
        raise BadInput(f"--ctx {context:,} is outside 1..{config.positions_max:,} of {model}")
    ranks = _expert_ranks(config, gpus)
    weights, asked = make_plan(raw, ep=ranks).rank.bytes, request_needs(config, tokens=context)
    room = (
        int(machine.memory_bytes) - weights - RESERVED_BYTES if room_bytes is None else room_bytes
    )
    if room < asked.offloaded:
        raise BadInput(
            f"a {gpu} has {format_bytes(max(room, 0))} for requests beside"
            f" {format_bytes(weights)} of weights of {model}; a request of {context:,} tokens takes"
            f" {format_bytes(asked.offloaded)}"
        )
    by_device, by_host = room // asked.offloaded, host_bytes // gpus // asked.host
    return Fit(
        model=model,
        gpu=gpu,
        gpu_count=gpus,
        context=context,
        expert_ranks=ranks,
        weight_bytes=weights,
        room_bytes=room,
        host_bytes=host_bytes // gpus,
        request_host_bytes=asked.host,
        request_state_bytes=asked.state,
        request_offloaded_bytes=asked.offloaded,
        request_resident_bytes=asked.resident,
        batch=min(by_device, by_host),
        batch_resident=room // asked.resident,
        limiter="device memory" if by_device <= by_host else "host memory",
        marks=_marks(config),
    )


def _expert_ranks(config: ModelConfig, gpus: int) -> int:
    if gpus < 1:
        raise BadInput(f"--gpus is {gpus}, must be positive")
    if config.experts_stacked:
        return 1
    if config.expert_count % gpus:
        raise BadInput(f"--gpus {gpus} do not divide the {config.expert_count} experts")
    return gpus


def _marks(config: ModelConfig) -> tuple[str, ...]:
    return (
        f"every operator of {config.family}: so no times, and no answer whether offload pays",
        "misses: no trace of this model's selections is published",
    )


def show(fit: Fit, *, json: bool) -> None:
    if json:
        console.print_json(fit)
        return
    print_sides(_lines(fit))
    marks = ["", *(f"not measured: {mark}" for mark in fit.marks)]
    console.tables().print("\n".join(marks), highlight=False)


def _lines(fit: Fit) -> list[Line]:
    weights, room = format_bytes(fit.weight_bytes), format_bytes(fit.room_bytes)
    experts = f"all heads, experts shared by {fit.expert_ranks}, as stored"
    has_state = fit.request_state_bytes > 0
    state = f", {format_bytes(fit.request_state_bytes)} of it its state" if has_state else ""
    sides: list[tuple[str, Any, Any, str]] = [
        (f"weights per {fit.gpu}", weights, weights, experts),
        ("left for requests", room, room, f"{format_bytes(RESERVED_BYTES)} reserved beside"),
        (
            "request on the device",
            format_bytes(fit.request_offloaded_bytes),
            format_bytes(fit.request_resident_bytes),
            f"{fit.context:,} tokens, at the slot floor{state}",
        ),
        (
            "request on the host",
            format_bytes(fit.request_host_bytes),
            "0 B",
            f"of {format_bytes(fit.host_bytes)} for each GPU",
        ),
        ("batch per GPU", fit.batch, fit.batch_resident, f"limited by {fit.limiter}"),
    ]
    return [(name, f"{ours}", f"{theirs}", remark) for name, ours, theirs, remark in sides]
