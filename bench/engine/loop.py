"""`ess-bench loop`: what a step costs the engine's process beside the model.

The engine's own loop runs: it reads messages, admits requests, plans a step, takes pages, accepts
drafts and tells a server process what was made. Only the layers do nothing, so the time is what the
host spends while a device would compute. The rows are on the CPU's side of the door: the time that
it takes to store them is not counted, and the time to launch a device's work is missing. All
requests share a prompt of invented rows, so that long contexts fit. Times are of the thread, on
which other processes of a busy machine have little effect.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from typing import Final

import msgspec
import torch
import zmq

from ess.bench.engine.arms.around import WrappedPlacement
from ess.bench.engine.entries import drawn
from ess.bench.harness.lists import amount, sizes
from ess.bench.harness.prefix import check_memory
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.clock import RealClock
from ess.door import Offload, Step
from ess.door.steps.placement import Kept
from ess.engine.engine import Engine, EngineConfig
from ess.engine.layers.batch import Batch
from ess.engine.layers.heads import AllHeads
from ess.engine.process.lifeline import keep_objects
from ess.engine.process.messages import Add, Handoff, Packer, Progress
from ess.engine.process.wire import SocketWire
from ess.engine.process.worker import EngineLoop
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Prefilled
from ess.engine.step.feeding import StepInput, StepOutput
from ess.engine.step.runner import Runner
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState
from ess.models.config import ModelConfig
from ess.models.model import Model
from ess.models.registry import build
from ess.models.registry import read_config as typed
from ess.models.weights.expected.dry_run import read_config
from ess.units import PAGE_ROWS, div_ceil

TARGET_MS: Final = 5.0
STEPS: Final = 64
SETTLE_STEPS: Final = 16
ENDPOINT: Final = "inproc://front"
TOKEN: Final = 7
ROWS: Final = "bf16"
SLOTS_EACH: Final = 256
SMALL: Final[Mapping[str, int]] = {
    **dict.fromkeys(("nope_dim", "rope_dim", "value_dim"), 8),
    **dict.fromkeys(("query_rank", "latent_dim", "index_dim", "expert_dim"), 16),
    **dict.fromkeys(("hidden_dim", "dense_dim"), 32),
    **dict.fromkeys(("vocab_size", "top_k"), 64),
    **dict.fromkeys(("head_count", "index_head_count"), 4),
    "expert_count": 8,
    "expert_group_count": 1,
    "expert_groups_kept": 1,
    "experts_per_token": 1,
    "dense_layer_count": 1,
}


class DeviceWork(WrappedPlacement):
    """Adds up the thread time of work that a device's own queue would do: new rows, and the seal of
    a step."""

    def __init__(self) -> None:
        self.spent_ns = 0

    def appended(self, step: Step, layers: range) -> None:
        with self._counted():
            for layer in layers:
                step.wrote(layer, keys=True)

    def seal(self, step: Step, accepted: Kept) -> None:
        with self._counted():
            self.slots.seal(step, accepted)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        started_ns = time.thread_time_ns()
        yield
        self.spent_ns += time.thread_time_ns() - started_ns


class NoLayers:
    """A way through a model that computes nothing: all tokens are equal, and all drafts right."""

    def __init__(self, config: ModelConfig, query_max: int) -> None:
        self.heads = AllHeads()
        self.device = DeviceWork()
        self._logits = torch.zeros(query_max, config.vocab_size)
        self._logits[:, TOKEN] = 1.0

    def decoded(self, runner: Runner, batch: Batch, fed: StepInput, draft_count: int) -> StepOutput:
        step = batch.step
        self.device.appended(step, range(runner.offload.layout.layer_total))
        chosen = fed.choose(self._logits[: step.query_count])
        shape = len(step.sequences), draft_count
        return chosen.with_drafts(torch.full(shape, TOKEN) if draft_count else None)

    def prefilled(
        self, runner: Runner, spans: Sequence[Span], on_layer: Callable[[int], None] | None
    ) -> list[Prefilled]:
        raise BadState(f"{len(spans)} prompts were to be computed, and their rows are invented")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopWork:
    """`batch` requests behind the same `ctx` tokens decode `steps` times `mtp` tokens."""

    ctx: int
    batch: int
    mtp: int
    steps: int

    @property
    def tokens_max(self) -> int:
        return self.mtp * (self.steps + SETTLE_STEPS + 2)


class LoopArm:
    """An engine's loop and its only front, which has sent all requests."""

    def __init__(self, model: Model, work: LoopWork) -> None:
        self.made_count = 0
        self._packer = Packer()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._front = self._context.socket(zmq.DEALER)
        self._front.bind(ENDPOINT)
        self._wire = SocketWire(self._context, [ENDPOINT])
        way = NoLayers(model.config, work.batch * work.mtp)
        self._device = way.device
        self.loop = EngineLoop(_engine(model, way, work), self._wire, RealClock())
        sampling = Sampling(tokens_max=work.tokens_max, ignore_eos=True)
        prompt = [1 + place % 50 for place in range(work.ctx)]
        for number in range(work.batch):
            invented = Handoff(number, kind="fake")
            asked = Add(number, prompt, sampling, leader=0, handoff=invented)
            self._front.send(self._packer.pack(asked))
        keep_objects()

    def turn_ms(self) -> float:
        """Thread time of a turn, without the device's work, and without the front's reading."""
        started_ns, device_ns = time.thread_time_ns(), self._device.spent_ns
        self.loop.turn()
        spent_ns = time.thread_time_ns() - started_ns - (self._device.spent_ns - device_ns)
        self._read()
        return spent_ns / 1e6

    def close(self) -> None:
        gc.unfreeze()
        self.loop.close()
        self._wire.close()
        self._front.close()
        self._context.term()

    def _read(self) -> None:
        while self._front.poll(0):
            told = self._packer.for_server(self._front.recv())
            for piece in told.pieces if isinstance(told, Progress) else ():
                if piece.reason is not None:
                    raise BadState(f"request {piece.number} {piece.reason}: {piece.sentence}")
                self.made_count += len(piece.tokens)


def _engine(model: Model, way: NoLayers, work: LoopWork) -> Engine:
    layout = model.config.layout(row=ROWS, has_mtp=work.mtp > 1)
    own_pages = div_ceil(work.tokens_max + work.mtp, PAGE_ROWS) + 2
    slot_pages = div_ceil(work.batch * SLOTS_EACH, PAGE_ROWS)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.page_bytes * slot_pages,
        host_bytes=(work.ctx // PAGE_ROWS + work.batch * own_pages) * layout.host_page_bytes,
        length_max=work.ctx + own_pages * PAGE_ROWS,
        sequence_max=work.batch,
        query_max=work.batch * work.mtp,
        slot_floor=SLOTS_EACH,
        placement=way.device.over,
    )
    config = EngineConfig(
        mtp=work.mtp,
        max_running=work.batch,
        query_max=work.batch * work.mtp,
        depth=1,
        fake_prefill=True,
    )
    return Engine(model, offload, config, way=way)


@compute_threads(1)
def loop_benchmark(
    *,
    ctx: str = "4k,32k,128k",
    batch: str = "1,16,64,160",
    layers: str = "4,61",
    mtp: str = "1,2",
    steps: int = STEPS,
    smoke: bool = False,
) -> list[Row]:
    """What a step costs the engine's process beside the model.

    Parameters
    ----------
    ctx
        Tokens of the prompt that all requests share, a list.
    batch
        Requests that decode together, a list.
    layers
        Layers of the model, a list.
    mtp
        Tokens of each request that a step verifies, a list.
    steps
        Measured steps of each.
    """
    if smoke:
        ctx, batch, layers, mtp, steps = "256", "2", "4", "2", 4
    count = amount("--steps", steps)
    contexts, batches, widths = sizes("--ctx", ctx), sizes("--batch", batch), sizes("--mtp", mtp)
    works = [
        LoopWork(ctx=context, batch=requests, mtp=width, steps=count)
        for context, width, requests in product(contexts, widths, batches)
    ]
    whole, rows = typed(read_config("deepseek-v3.2")), list[Row]()
    for layer_count in sizes("--layers", layers):
        config = msgspec.structs.replace(whole, layer_count=layer_count, **SMALL)
        check_memory(max(contexts), config.layout(row=ROWS))
        model = build(config, drawn(config).__getitem__)
        rows += [_row(model, work, layer_count) for work in works]
    return rows


def _row(model: Model, work: LoopWork, layer_count: int) -> Row:
    with closing(LoopArm(model, work)) as arm:
        for _ in range(SETTLE_STEPS):
            arm.turn_ms()
        before = arm.made_count
        samples = [arm.turn_ms() for _ in range(work.steps)]
        made, wanted = arm.made_count - before, work.steps * work.batch * work.mtp
    if made != wanted:
        raise BadState(f"{work.steps} steps of {work.batch} requests made {made}, not {wanted}")
    return compare(
        name="a turn of the loop, thread time",
        unit="ms",
        ours=samples,
        baseline=("at most", [TARGET_MS]),
        target=1.0,
        config={**asdict(work), "layers": layer_count, "longest_ms": round(max(samples), 2)},
    )
