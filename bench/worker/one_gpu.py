"""Resident against offload on one GPU of a worker whose 32 ranks divide the experts.

Both ways get the same bytes of the device: those that 90 % of it leaves beside the whole worker's
weights and a step's memory, in equal parts for each layer. Resident keeps every row in a slot,
offload a floor of slots for each request; each decodes the largest batch that then fits. The slice
has a few of the layers, at their true dimensions, and a vocabulary cut in proportion, so its rate
times the share of layers predicts the whole. That leaves out dispatch and combine, and counts a
step's fixed cost once per slice, as if every slice of layers paid it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import torch

from ess import console
from ess.bench.engine.arms.decode_arm import STAGGER, DecodeArm, DecodeWay, DecodeWork, slots_each
from ess.bench.harness.report import Row, compare
from ess.bench.worker.drawn import DrawnArm, noise
from ess.bench.worker.random_model import (
    cut,
    layout_of,
    random_model,
    weight_bytes,
    worker_config,
)
from ess.engine.step_bytes import decode_bytes
from ess.errors import Unavailable
from ess.free_resources import memory_free
from ess.kernels.cuda import driver
from ess.kernels.cuda.adapters.choice import choose
from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.pool.device_bytes import PoolShape, pool_bytes
from ess.units import PAGE_ROWS, align_up, div_ceil

DEVICE_SHARE: Final = 0.9
HOST_SHARE: Final = 0.5
LIBRARY_BYTES: Final = 1 << 30
BATCH_MAX: Final = 256
GOAL: Final = 2.2
RESIDENT: Final = "resident"
OFFLOAD: Final = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRun:
    """`batches` of the ways; if there are none, as many as fit."""

    worker: ModelConfig
    layers: int
    context: int
    mtp: int = 2
    settle: int = 24
    steps: int = 16
    batches: tuple[int, int] | None = None

    @property
    def slice(self) -> ModelConfig:
        return cut(self.worker, self.layers)

    @property
    def scale(self) -> float:
        """Layers of the worker for each layer of the slice."""
        return self.worker.layer_total / self.slice.layer_total

    def way(self, name: str) -> DecodeWay:
        if name == RESIDENT:
            return DecodeWay(name=name, mode="resident", ratio=1.0)
        floor = layout_of(self.slice).slot_floor if self.batches is None else self.context // 4
        return DecodeWay(name=name, mode="layerwise", ratio=floor / self.context)

    def shape(self, batch: int) -> DecodeWork:
        return DecodeWork(
            context=self.context, batch=batch, mtp=self.mtp, steps=self.settle + self.steps
        )


def true_plan() -> SliceRun:
    return SliceRun(worker=worker_config(), layers=2, context=128 << 10)


def small_plan() -> SliceRun:
    """A plan for tests: no dimension is the model's, and both ways have one batch."""
    worker = msgspec.structs.replace(
        worker_config(),
        vocab_size=4096,
        hidden_dim=256,
        head_count=2,
        query_rank=128,
        top_k=64,
        expert_dim=128,
        expert_count=2,
        experts_per_token=2,
    )
    return SliceRun(worker=worker, layers=1, context=1024, settle=1, steps=3, batches=(2, 2))


def slice_benchmark(*, smoke: bool) -> Iterator[dict[str, Any]]:
    return map(msgspec.to_builtins, rows_of(small_plan() if smoke else true_plan()))


def slice_kernels() -> None:
    """Launches the kernels of both ways: the batch decides how some kernels are cut."""
    for _ in rows_of(replace(true_plan(), settle=1, steps=3)):
        pass


def rows_of(plan: SliceRun) -> Iterator[Row]:
    device = torch.device("cuda:0")
    batches = plan.batches or fitting(plan)
    for line in choose(device).lines:
        console.note(line)
    model = random_model(plan.slice, device)
    resident = measured(plan, model, RESIDENT, batches[0])
    yield rate_row(plan, resident)
    offload = measured(plan, model, OFFLOAD, batches[1])
    yield rate_row(plan, offload, resident)
    yield predicted_row(plan, offload, resident)
    yield missed_row(offload)


# ---- how much fits


def fitting(plan: SliceRun) -> tuple[int, int]:
    """Requests that each way has room for, on the device and, for the slice, on the host."""
    free_bytes, total_bytes = driver.Device().memory()
    given_bytes = min(DEVICE_SHARE * total_bytes, free_bytes - LIBRARY_BYTES)
    room = given_bytes - weight_bytes(plan.worker)
    on_host = HOST_SHARE * memory_free()
    most = int(on_host / host_bytes(plan, 1))
    resident, offload = (
        min(most, fits(plan, plan.way(name), room)) for name in (RESIDENT, OFFLOAD)
    )
    if not resident:
        raise Unavailable(
            f"a slice is not measured: one request of {plan.context:,} tokens does not fit beside"
            f" the weights of a whole worker into {given_bytes:,.0f} bytes of the device, which has"
            f" {total_bytes:,}, {free_bytes:,} of them free, or its rows of the slice into"
            f" {on_host:,.0f} bytes, half of what is free on the host"
        )
    return resident, offload


def fits(plan: SliceRun, way: DecodeWay, room: float) -> int:
    """The largest batch whose pools and step, for all layers, take at most `room`."""
    largest = min(BATCH_MAX, plan.context // STAGGER - 2)
    held = [n for n in range(1, largest + 1) if taken(plan, way, n) <= room]
    return max(held, default=0)


def host_bytes(plan: SliceRun, batch: int) -> int:
    return batch * pages_of(plan.shape(batch)) * layout_of(plan.slice).host_page_bytes


def pages_of(shape: DecodeWork) -> int:
    return div_ceil(shape.length_max, PAGE_ROWS) + 2


def taken(plan: SliceRun, way: DecodeWay, batch: int) -> float:
    shape, layout = plan.shape(batch), layout_of(plan.slice)
    each = align_up(shape.length_max + 1, PAGE_ROWS)
    if way.ratio is not None and way.ratio < 1:
        each = slots_each(shape, way.ratio)
    pools = PoolShape(
        layout=layout,
        chunks=div_ceil(each * batch, PAGE_ROWS) * layout.group_count,
        index_pages=batch * pages_of(shape),
        sequence_max=batch,
        length_max=shape.length_max + PAGE_ROWS,
        query_max=batch * plan.mtp,
    )
    step = decode_bytes(plan.worker, query_max=batch * plan.mtp, length_max=shape.length_max)
    return sum(pool_bytes(pools).values()) * plan.scale + step


# ---- what it gives


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceFigures:
    """One way: verified tokens over the time of each step, its outputs and its misses. How many
    tokens are kept depends on the draws, which differ between two batches."""

    rates: list[float]
    outputs: list[list[int]]
    misses: float
    config: dict[str, Any]


def measured(plan: SliceRun, model: Model, name: str, batch: int) -> SliceFigures:
    console.note(f"{name}: {batch} requests of {plan.context:,} tokens ...")
    shape = plan.shape(batch)
    arm = DrawnArm(noise(model, plan.context), shape, plan.way(name), model=model)
    try:
        for number in range(shape.steps):
            if number == plan.settle:
                arm.forget()
            arm.step()
        each = statistics.fmean(arm.taken.tokens)
        return SliceFigures(
            rates=[batch * plan.mtp / seconds for seconds in arm.taken.seconds],
            outputs=arm.outputs,
            misses=float(sum(missed.mean() for missed in arm.taken.misses)) / plan.steps / batch,
            config=config_of(plan, arm, each),
        )
    finally:
        arm.close()


def config_of(plan: SliceRun, arm: DecodeArm, tokens: float) -> dict[str, Any]:
    shape, slots = arm.shape, arm.offload.stats().slot_count.mean()
    return {
        "kind": "measured",
        "ctx": shape.context,
        "mtp": shape.mtp,
        "batch": shape.batch,
        "slots_each": round(float(slots) / shape.batch),
        "kept_each": round(tokens / shape.batch, 2),
        "layers": f"{plan.slice.layer_total} of {plan.worker.layer_total}",
        "experts": f"{plan.worker.expert_count} and the shared one",
        "dispatch": "local",
        "selections": "drawn",
    }


def rate_row(plan: SliceRun, ours: SliceFigures, rival: SliceFigures | None = None) -> Row:
    """Both outputs must agree for every request and token that both have."""
    if rival is None:
        value = statistics.median(ours.rates)
        return Row(
            name="slice: resident",
            value=value,
            unit="tokens/s",
            config=ours.config,
            samples=ours.rates,
        )
    pairs = list(zip(ours.outputs, rival.outputs, strict=False))
    same = sum(all(a == b for a, b in zip(*pair, strict=False)) for pair in pairs)
    return compare(
        name="slice: offload",
        unit="tokens/s",
        ours=ours.rates,
        baseline=(RESIDENT, rival.rates),
        better="higher",
        target=GOAL if plan.batches is None else None,
        config=ours.config | {"same_text": f"{same}/{len(pairs)}"},
    )


def predicted_row(plan: SliceRun, ours: SliceFigures, rival: SliceFigures) -> Row:
    host_gib = host_bytes(plan, ours.config["batch"]) * plan.scale / (1 << 30)
    rates = [[rate / plan.scale for rate in way.rates] for way in (ours, rival)]
    row = compare(
        name="one GPU of a worker of 32: offload",
        unit="tokens/s",
        ours=rates[0],
        baseline=(RESIDENT, rates[1]),
        better="higher",
        config={
            "kind": "predicted",
            "from": "slice: offload",
            "scale": f"1 / {plan.scale:.2f}",
            "left_out": "dispatch and combine",
            "on_host": f"{host_gib:.0f} GiB",
        },
    )
    return msgspec.structs.replace(row, samples=[])


def missed_row(ours: SliceFigures) -> Row:
    return Row(
        name="slice: misses of a request, layer and step",
        value=ours.misses,
        unit="rows",
        config=ours.config,
    )
