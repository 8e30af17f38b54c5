"""Decode of the embedded model beside the transformers implementation of it, in one process.

Both run the same bfloat16 weights greedily with full caches, on real prompts here and on noise
there: a dense product takes as long over noise, and prefilling it there would take minutes. Before
anything is timed both answer one real prompt in float32, and must agree.

The rival runs as fast as possible: every way below is tried, the fastest is measured, and all are
printed. Both sides run with one thread in thread time, which a busy machine disturbs least, and
with their fastest number of threads in wall time.
"""

from __future__ import annotations

import functools
import importlib.util
import json as json_text
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from ess import console
from ess.bench.engine.arms.decode_arm import DecodeArm, DecodeWay, DecodeWork
from ess.bench.harness.folders import default_folder
from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.measure import machine
from ess.bench.harness.measure.timing import Arm as Turn
from ess.bench.harness.measure.timing import Samples, measure
from ess.bench.harness.prefix import Prefix, check_memory, embedded_prefix
from ess.bench.harness.report import Row, compare
from ess.bench.harness.threads import compute_threads
from ess.errors import BadState, not_installed
from ess.models.load import EMBEDDED, load_model
from ess.models.plain import Plain
from ess.models.weights.checkpoint import Checkpoint
from ess.models.weights.rank import RankWeights

TARGET: Final = 5.0
REPEATS: Final = 7
WARM_UPS: Final = 1
TRIALS: Final = 1
AGREES: Final = 1e-2

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """One way to run the rival; `kept` is the kind of its key-value store."""

    dtype: str = "bfloat16"
    attention: str = "eager"
    experts: str = "grouped_mm"
    kept: str = "dynamic"

    def __str__(self) -> str:
        return f"{self.dtype} {self.attention} {self.experts} {self.kept}"


TRIES: Final = (
    Try(),
    Try(attention="sdpa"),
    Try(experts="batched_mm"),
    Try(experts="eager"),
    Try(kept="static"),
    Try(attention="sdpa", kept="static"),
    Try(dtype="float32"),
    Try(dtype="float32", attention="sdpa"),
)


def vs_transformers_benchmark(
    *, ctx: str = "4k", batch: str = "1,8", repeats: int = REPEATS, smoke: bool = False
) -> list[Row]:
    """Decode beside the transformers implementation of the same model, both at their best.

    Parameters
    ----------
    ctx
        The context.
    batch
        Requests per step, a list.
    repeats
        Measured steps of each side, in turn.
    """
    if smoke:
        return rows_of(256, [2], repeats=1)
    context, batches = size("--ctx", ctx), sizes("--batch", batch)
    check_memory(context * max(batches))
    return rows_of(context, batches, repeats=amount("--repeats", repeats))


@compute_threads()
def rows_of(context: int, batches: Sequence[int], *, repeats: int) -> list[Row]:
    if importlib.util.find_spec("transformers") is None:
        raise not_installed("transformers", extra="oracle")
    with tempfile.TemporaryDirectory() as folder:
        export(Path(folder))
        rows = [agreement(Path(folder))]
        prefix = embedded_prefix(context, folder=default_folder())
        for batch in batches:
            rows += _batch_rows(Path(folder), prefix, context, batch, repeats)
        return rows


# ---- the rival


def export(folder: Path) -> None:
    """The embedded checkpoint without its MTP module, in the form that transformers reads."""
    with Checkpoint(EMBEDDED) as checkpoint:
        weights = RankWeights(checkpoint, form="f32")
        raw = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        kept = {
            name: weights.tensor(name).clone()
            for layer in (None, *range(raw["num_hidden_layers"]))
            for name in weights.names(layer)
        }
    (folder / "config.json").write_text(json_text.dumps(raw))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, way: Try) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, way.dtype),
        attn_implementation=way.attention,
        experts_implementation=way.experts,
    )
    return model.eval()


class Rival:
    """The model with a cache of `context` tokens per line, ready to decode."""

    def __init__(self, folder: Path, way: Try, *, context: int, batch: int, steps: int) -> None:
        from transformers import DynamicCache, StaticCache

        self._model = load(folder, way)
        self._tokens = torch.full((batch, 1), 7)
        config = self._model.config
        self._past = (
            StaticCache(config=config, max_cache_len=context + steps)
            if way.kept == "static"
            else DynamicCache(config=config)
        )
        self.step()
        for layer in self._past.layers:
            self._fill(layer, context, way.kept == "static")

    @staticmethod
    @torch.inference_mode()
    def _fill(layer: Any, context: int, is_static: bool) -> None:
        if is_static:
            for tensor in (layer.keys, layer.values, layer.indexer_keys):
                tensor.normal_()
            layer.cumulative_length.fill_(context)
            layer.indexer_cumulative_length.fill_(context)
            return
        for name, axis in (("keys", 2), ("values", 2), ("indexer_keys", 1)):
            tensor = getattr(layer, name)
            shape = list(tensor.shape)
            shape[axis] = context
            setattr(layer, name, torch.randn(shape).to(tensor.dtype))

    @torch.inference_mode()
    def step(self) -> Tensor:
        result = self._model(self._tokens, past_key_values=self._past, use_cache=True)
        self._tokens = result.logits[:, -1].argmax(-1, keepdim=True)
        return self._tokens


@torch.inference_mode()
def agreement(folder: Path) -> Row:
    """The distance of both sides' logits on one prompt, in float32."""
    tokens = [(7 * i * i + 11) % 4096 for i in range(300)]
    ours = Plain(load_model(form="f32")).run(tokens).logits
    theirs = load(folder, Try(dtype="float32"))(torch.tensor([tokens])).logits[0]
    far = float((ours - theirs).abs().max())
    if far > AGREES:
        raise BadState(f"the logits of both are {far:.2g} apart: this is not the same model")
    return Row(name="same model: logits apart in float32", value=far, unit="", config={"of": 300})


# ---- both


def _batch_rows(folder: Path, prefix: Prefix, context: int, batch: int, repeats: int) -> list[Row]:
    steps = 2 * (repeats + WARM_UPS + 2 * TRIALS) + 8
    shape = DecodeWork(context=context, batch=batch, mtp=1, steps=steps)
    mean = sum(shape.lengths()) // batch
    make = functools.partial(Rival, folder, context=mean, batch=batch, steps=steps)
    torch.set_num_threads(1)
    seconds = {way: _fastest(make(way).step, time.thread_time) for way in TRIES}
    best = min(seconds, key=lambda way: seconds[way])
    tried = ", ".join(f"{way} {1e3 * took:.0f} ms" for way, took in seconds.items())
    console.note(f"batch {batch}, the rival's ways: {tried}")
    ours = DecodeArm(prefix, shape, DecodeWay(name="ours", mode="resident", ratio=1.0))
    theirs = make(best)
    sides: tuple[Callable[[], Any], ...] = (lambda: ours.step(), theirs.step)
    config = {"context": context, "batch": batch, "rival": str(best)}
    rows = []
    for name, clock, options in (
        ("decode, one thread, thread time", time.thread_time, [1]),
        ("decode, best threads, wall time", time.perf_counter, _thread_counts()),
    ):
        counts = [_best_threads(side, options, clock) for side in sides]
        samples = _in_turn(sides, counts, repeats, clock)
        rates = [side_samples.per(batch) for side_samples in samples]
        threads = {"threads": counts[0], "rival_threads": counts[1]}
        rows.append(
            compare(
                name=name,
                unit="tokens/s",
                ours=rates[0],
                baseline=("transformers", rates[1]),
                better="higher",
                target=TARGET,
                config=config | threads,
            )
        )
    ours.offload.close()
    return rows


def _fastest(step: Callable[[], Any], clock: Clock) -> float:
    step()
    taken = []
    for _ in range(TRIALS):
        started = clock()
        step()
        taken.append(clock() - started)
    return min(taken)


def _thread_counts() -> list[int]:
    cores = machine.machine().cores
    return sorted({1, max(1, cores - 1), cores})


def _best_threads(step: Callable[[], Any], options: Sequence[int], clock: Clock) -> int:
    seconds = {}
    for count in options if len(options) > 1 else ():
        torch.set_num_threads(count)
        seconds[count] = _fastest(step, clock)
    return min(seconds, key=lambda count: seconds[count]) if seconds else options[0]


def _in_turn(
    sides: Sequence[Callable[[], Any]], counts: Sequence[int], repeats: int, clock: Clock
) -> list[Samples]:
    turns = [
        Turn(name=str(at), run=side, prepare=functools.partial(torch.set_num_threads, count))
        for at, (side, count) in enumerate(zip(sides, counts, strict=True))
    ]
    return measure(turns, repeats=repeats, warmups=WARM_UPS, clock=clock)
