"""Data-parallel workers of one thread each, sharing all tensors.

Why not one process with many threads: a step is a thousand small operations, each ends at a
barrier of its threads, and one descheduled thread then stalls them all; on a busy machine two
threads ran slower than one. Here the workers meet three times a step, and the passes of a step are
taken from a counter, so a worker that gets less of its core simply takes fewer.

A step: everybody takes passes and adds gradients into its own flat tensor | barrier | everybody
runs its share of the optimiser's jobs, reading all gradients | barrier | gradients are cleared.
The balance of the experts is counted per worker and applied by the first one.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch import multiprocessing as mp

from ess.errors import BadInput, BadState
from ess.models.tiny.trainer.experts import Gate, balance
from ess.models.tiny.trainer.network import Network
from ess.models.tiny.trainer.optimiser import (
    Flats,
    bind,
    jobs_of,
    pieces_of,
    run_job,
    share_out,
    trained_pieces,
)
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.stages import STAGES, stage_loss

STEP_DEADLINE_S = 3600.0


def sample(
    tokens: npt.NDArray[np.uint16], *, length: int, seed: int, at: int
) -> npt.NDArray[np.int64]:
    """Sequence number `at` of an endless shuffled order: all windows once, then again, shifted."""
    count = (tokens.size - 1) // length - 1
    if count < 1:
        raise BadInput(f"{tokens.size} tokens are too few for sequences of {length}")
    epoch, rank = divmod(at, count)
    order = np.random.default_rng([seed, length, epoch])
    shift = int(order.integers(length))
    start = int(order.permutation(count)[rank]) * length + shift
    return tokens[start : start + length + 1].astype(np.int64)


@dataclass(slots=True)
class Common:
    """What every worker sees. `order` is [stage, step, first sequence, stop]; rates beside it."""

    shape: ModelShape
    tokens_path: str
    seed: int
    worker_count: int
    flats: Flats
    grads: list[Tensor]
    loads: Tensor
    biases: Tensor
    report: Tensor
    active_s: Tensor
    order: Tensor
    rates: Tensor
    taken: Any
    barrier: Any


class Worker:
    """One replica of the network over the shared tensors."""

    def __init__(self, common: Common, rank: int) -> None:
        self.common, self.rank = common, rank
        device = common.flats.read.device
        self.network = Network(common.shape).to(device)
        self.network.bfloat16()
        self.network.cos, self.network.sin = self.network.cos.float(), self.network.sin.float()
        bind(self.network, common.flats, common.grads[rank])
        gates = [part for part in self.network.modules() if isinstance(part, Gate)]
        for gate, bias, load in zip(gates, common.biases, common.loads[rank], strict=True):
            gate.e_score_correction_bias, gate.load = bias, load
        self.tokens = np.load(common.tokens_path, mmap_mode="r")
        self.stage_at = -1

    def _enter(self, stage_at: int) -> None:
        """Freeze what this stage does not train, and share the rest's optimiser jobs out."""
        stage, pieces = STAGES[stage_at], pieces_of(self.network)
        trained = trained_pieces(self.common.shape, pieces, stage.trains)
        names = {piece.name for piece in trained}
        for name, weight in self.network.named_parameters():
            weight.requires_grad_(name in names)
        self.jobs = share_out(jobs_of(trained), self.common.worker_count)[self.rank]
        self.stage_at = stage_at

    def _take(self) -> int:
        with self.common.taken.get_lock():
            self.common.taken.value += 1
            return int(self.common.taken.value) - 1

    def step(self) -> None:
        start = time.process_time()
        stage_at, step, first, _ = self.common.order.tolist()
        if stage_at != self.stage_at:
            self._enter(stage_at)
        stage = STAGES[stage_at]
        while (part := self._take()) < stage.parts:
            rows = [
                sample(self.tokens, length=stage.length, seed=self.common.seed, at=at)
                for at in range(first + part * stage.rows, first + (part + 1) * stage.rows)
            ]
            tokens = torch.from_numpy(np.stack(rows)).to(self.common.flats.read.device)
            loss, number = stage_loss(self.network, stage, tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            self.common.report[self.rank] += number / stage.parts
        self.common.barrier.wait(STEP_DEADLINE_S)
        if self.rank == 0:
            balance(self.common.biases, self.common.loads.sum(0))
            self.common.loads.zero_()
        muon_rate, adam_rate = self.common.rates.tolist()
        for job in self.jobs:
            run_job(
                job,
                self.common.flats,
                self.common.grads,
                muon_rate=muon_rate,
                adam_rate=adam_rate,
                step=step + 1,
                scale=1.0 / stage.parts,
            )
        self.common.active_s[self.rank] = time.process_time() - start
        self.common.barrier.wait(STEP_DEADLINE_S)
        self.common.grads[self.rank].zero_()


def _end_with_parent() -> None:
    """A worker whose team was killed would wait at a barrier for ever."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(common: Common, rank: int) -> None:
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(common, rank)
    while True:
        common.barrier.wait(STEP_DEADLINE_S)
        if common.order[3]:
            return
        worker.step()


class Team:
    """All workers; this process is the first of them."""

    def __init__(self, common: Common) -> None:
        context = mp.get_context("spawn")
        self.common = common
        self.helpers: list[SpawnProcess] = [
            context.Process(target=_work, args=(common, rank), daemon=True)
            for rank in range(1, common.worker_count)
        ]
        for helper in self.helpers:
            helper.start()
        self.worker = Worker(common, 0)
        self.active_s = 0.0

    def step(self, *, stage_at: int, step: int, first: int, rates: tuple[float, float]) -> float:
        """One optimiser step; the mean of the stage's reported number."""
        if any(not helper.is_alive() for helper in self.helpers):
            raise BadState("a training worker has died; start again, the checkpoint is resumed")
        common = self.common
        common.order.copy_(torch.tensor([stage_at, step, first, 0]))
        common.rates.copy_(torch.tensor(rates))
        common.taken.value = 0
        common.report.zero_()
        common.barrier.wait(STEP_DEADLINE_S)
        self.worker.step()
        self.active_s = float(common.active_s.mean())
        return float(common.report.sum())

    def close(self) -> None:
        self.common.order[3] = 1
        self.common.barrier.wait(STEP_DEADLINE_S)
        for helper in self.helpers:
            helper.join()


def gather_common(
    *, shape: ModelShape, tokens_path: str, seed: int, worker_count: int, device: torch.device
) -> Common:
    """Fresh shared tensors for a team; a checkpoint may then be copied into them."""
    if worker_count < 1 or (device.type != "cpu" and worker_count > 1):
        raise BadInput(f"{worker_count} workers on {device.type}: need 1, or more on cpu")
    torch.manual_seed(seed)
    network = Network(shape)
    flats = Flats.like(network, device)
    gates = sum(isinstance(part, Gate) for part in network.modules())
    context = mp.get_context("spawn")
    common = Common(
        shape=shape,
        tokens_path=tokens_path,
        seed=seed,
        worker_count=worker_count,
        flats=flats,
        grads=[torch.zeros_like(flats.read) for _ in range(worker_count)],
        loads=torch.zeros(worker_count, gates, shape.expert_count, device=device),
        biases=torch.zeros(gates, shape.expert_count, device=device),
        report=torch.zeros(worker_count),
        active_s=torch.zeros(worker_count),
        order=torch.zeros(4, dtype=torch.int64),
        rates=torch.zeros(2),
        taken=context.Value("q", 0),
        barrier=context.Barrier(worker_count),
    )
    if worker_count > 1:
        for tensor in (*flats.tensors(), *common.grads, common.loads, common.biases):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        for tensor in (common.report, common.active_s, common.order, common.rates):
            tensor.share_memory_()  # type: ignore[no-untyped-call]
    return common
