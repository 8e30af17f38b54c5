"""How far low precision is from float32, and offload from no offload, while reading a text.

The embedded model reads a real text: at every position it is given the true next token, whatever
its own choice, so that all ways to compute get the same input. Their logits are compared: the
divergence KL(exact, other) in nats, and the tokens that flip (another greedy choice) with the lead
that the exact choice had over its next (difference of logits).

Excerpts are spread evenly over the text. All but the last tokens of each are prefilled, the others
decoded token by token, all excerpts in one batch. NONE gives the bits that RESIDENT gives
(`tests/model/test_exactness.py`), so it stands for an engine without offload; the arena holds two
selections of every excerpt, so that DA and DBA have rows to fetch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ess import console
from ess.bench.harness.lists import amount, modes, sizes
from ess.bench.harness.report import Row
from ess.bench.harness.text import token_ids
from ess.bench.harness.threads import compute_threads
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import run_chunks
from ess.errors import BadInput
from ess.models.load import load_model
from ess.models.model import Model
from ess.units import PAGE_ROWS, div_ceil

CHUNK: Final = 512
LEADS_SHOWN: Final = 5
TARGET: Final = 100.0
"""Offload should add at most a hundredth of the form's own distance from float32."""

Float = Literal["f32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The type of weights and activations, and the codecs of rows and keys."""

    name: str
    weights: Float
    row: Literal["f32", "bf16", "fp8"]
    index: Literal["f32", "fp8"]


EXACT: Final = Form(name="float32", weights="f32", row="f32", index="f32")
FP8_ROWS: Final = Form(name="fp8 rows", weights="f32", row="fp8", index="f32")
FP8: Final = Form(name="fp8 rows and keys", weights="f32", row="fp8", index="fp8")
SERVED: Final = Form(name="bf16, fp8 rows and keys", weights="bf16", row="fp8", index="fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionRun:
    contexts: Sequence[int] = (2048, 8192)
    excerpts: int = 4
    tokens: int = 256
    modes: Sequence[str] = ("da", "dba")


SMOKE: Final = PrecisionRun(contexts=(512,), excerpts=1, tokens=8, modes=("da",))


def precision_benchmark(
    *,
    ctx: str = "2k,8k",
    excerpts: int = 4,
    tokens: int = 256,
    mode: str = "da,dba",
    text: Path | None = None,
    smoke: bool = False,
) -> list[Row]:
    """How far bf16 and fp8 are from float32, and DA and DBA from no offload, on real text.

    Parameters
    ----------
    ctx
        Contexts, a list; 32k takes minutes for each excerpt.
    excerpts
        Places of the text that are read at every context.
    tokens
        Tokens that are compared behind every context.
    mode
        Ways to fetch that are compared with NONE, a list.
    text
        Read this text; by default Python's own reference.
    """
    if smoke:
        return rows_of(SMOKE, text=text)
    plan = PrecisionRun(
        contexts=sizes("--ctx", ctx),
        excerpts=amount("--excerpts", excerpts),
        tokens=amount("--tokens", tokens),
        modes=modes("--mode", mode),
    )
    return rows_of(plan, text=text)


@compute_threads()
def rows_of(plan: PrecisionRun, *, text: Path | None = None) -> list[Row]:
    ids, name = token_ids(text)
    models: Models = {"f32": load_model(form="f32"), "bf16": load_model(form="bf16")}
    both = ("none", *plan.modes)
    ways = {EXACT: both, FP8_ROWS: ("none",), FP8: ("none",), SERVED: both}
    rows = []
    for context in plan.contexts:
        lines = excerpts_of(ids, context, count=plan.excerpts, tokens=plan.tokens)
        logits = read(models, ways, lines, tokens=plan.tokens)
        rows += context_rows(logits, plan, context, name)
    return rows


# ---- reading

Models = Mapping[Float, Model]
Logits = Mapping[tuple[Form, str], Tensor]
"""Logits of a form and a mode: [excerpt, token, vocabulary]."""


def read(
    models: Models,
    ways: Mapping[Form, Sequence[str]],
    lines: Sequence[Sequence[int]],
    *,
    tokens: int,
) -> Logits:
    """Logits of the last `tokens` of every line, by every form under its modes."""
    logits: dict[tuple[Form, str], Tensor] = {}
    start = len(lines[0]) - tokens
    for form, modes_of_form in ways.items():
        console.note(f"{len(lines)} x {start:,} tokens, {form.name} ...")
        model = models[form.weights]
        with offload_for(model, form, lines) as offload:
            for mode in modes_of_form:
                eng = Engine(model, offload, EngineConfig(modes=mode))
                logits[form, mode] = torch.stack(forced_logits(eng, lines, start=start))
    return logits


def excerpts_of(
    ids: Sequence[int], context: int, *, count: int, tokens: int
) -> list[Sequence[int]]:
    """Excerpts of `context` tokens and those to compare; they overlap in a short text."""
    length = context + tokens
    if count < 1 or tokens < 1:
        raise BadInput(f"{count} excerpts of {tokens} tokens: at least one of each")
    if len(ids) < length:
        raise BadInput(f"the text has {len(ids):,} tokens, an excerpt needs {length:,}")
    step = (len(ids) - length) // max(1, count - 1)
    return [ids[at * step : at * step + length] for at in range(count)]


def offload_for(model: Model, form: Form, lines: Sequence[Sequence[int]]) -> Offload:
    """Pools for these lines, with an arena of two selections of each in every group."""
    layout = model.config.layout(row=form.row, index=form.index, has_mtp=False)
    pages = div_ceil(len(lines[0]), PAGE_ROWS) + 1
    slot_pages = len(lines) * 2 * layout.top_k // PAGE_ROWS
    return Offload.create(
        layout,
        device="cpu" if model.device.type == "cpu" else f"cuda:{model.device.index or 0}",
        slot_bytes=layout.group_count * layout.chunk_bytes * slot_pages,
        host_bytes=len(lines) * 2 * pages * layout.host_page_bytes,
        length_max=pages * PAGE_ROWS,
        slot_floor=PAGE_ROWS,
    )


@torch.inference_mode()
def forced_logits(eng: Engine, lines: Sequence[Sequence[int]], *, start: int) -> list[Tensor]:
    """Prefill `start` tokens of each line, then decode the rest of all lines as one batch.

    Returns logits [tokens, vocabulary] per line. `eng` serves nothing else and is used up; another
    engine over the same offload finds the prompts there, as cached prefixes.
    """
    runner, offload = eng.runner, eng.offload
    sequences = []
    for line in lines:
        sequence = offload.open(line[: start + 1], length_max=len(line))
        for low in range(sequence.cached_count, start, CHUNK):
            stop = min(start, low + CHUNK)
            span = Span(
                sequence=sequence,
                start=low,
                tokens=line[low:stop],
                following=line[low + 1 : stop + 1],
            )
            [chunk] = run_chunks(runner, [span])
            if stop == start:
                sequence.warm(chunk.windows)
        sequences.append(sequence)
    made: list[Tensor] = []
    for at in range(start, len(lines[0])):
        step = offload.begin(sequences, query_counts=[1] * len(lines))
        now = [line[at] for line in lines]
        ids = torch.tensor(now).to(runner.model.device)
        made.append(runner.decode(runner.batch(step), ids).logits)
        step.commit(accepted=[1] * len(lines), tokens=[[token] for token in now])
    for sequence in sequences:
        sequence.close()
    return list(torch.stack(made, dim=1))


# ---- comparing


@dataclass(frozen=True, slots=True)
class Distance:
    """How far one way is from the exact one: KL by position [excerpt, token], in nats, and the
    leads of the tokens that flipped, greatest first."""

    kl: Tensor
    leads: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(self.kl.mean())

    @property
    def flipped(self) -> float:
        """The share of all positions that flipped."""
        return len(self.leads) / self.kl.numel()


def apart(exact: Tensor, other: Tensor) -> Distance:
    """Compares logits [..., token, vocabulary]; float64 rounding must not make a KL negative."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0)
    best = exact.topk(2, -1).values
    flips = other.argmax(-1) != exact.argmax(-1)
    leads = (best[..., 0] - best[..., 1])[flips].tolist()
    return Distance(kl, tuple(sorted(leads, reverse=True)))


def context_rows(logits: Logits, plan: PrecisionRun, context: int, text: str) -> list[Row]:
    config = {"ctx": context, "text": text}
    rows: list[Row] = []
    before: tuple[str, float] | None = None
    for form in (FP8_ROWS, FP8, SERVED):
        distance = apart(logits[EXACT, "none"], logits[form, "none"])
        name = f"{form.name}, against float32"
        rows += apart_rows(name, distance, config, before)
        before = (name, distance.mean)
    for form, form_before in ((SERVED, before), (EXACT, None)):
        for mode in plan.modes:
            distance = apart(logits[form, "none"], logits[form, mode])
            name = f"{mode.upper()} against NONE, {form.name}"
            target = TARGET if form is SERVED else None
            rows += apart_rows(name, distance, config, form_before, target=target)
    return rows


def apart_rows(
    name: str,
    distance: Distance,
    config: Mapping[str, Any],
    baseline: tuple[str, float] | None,
    *,
    target: float | None = None,
) -> list[Row]:
    """Two rows: the mean divergence, and the share of flipped tokens with their greatest leads."""
    ratio = baseline[1] / distance.mean if baseline and distance.mean else None
    count = f"{len(distance.leads):,} of {distance.kl.numel():,}"
    leads = " ".join(f"{lead:.2f}" for lead in distance.leads[:LEADS_SHOWN])
    divergence = Row(
        name=f"mean KL, {name}",
        value=distance.mean,
        unit="nats",
        baseline=baseline[0] if baseline else None,
        baseline_value=baseline[1] if baseline else None,
        ratio=ratio,
        target=target if ratio else None,
        met=ratio >= target if ratio and target else None,
        config={**config, "median": f"{float(distance.kl.median()):.1e}"},
        samples=[float(excerpt) for excerpt in distance.kl.mean(-1)],
    )
    flips = Row(
        name=f"flipped tokens, {name}",
        value=100 * distance.flipped,
        unit="%",
        config={**config, "flipped": count, "leads": leads or "-"},
    )
    return [divergence, flips]
