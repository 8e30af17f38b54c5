"""Where offload turns a near tie: DA beside NONE, and DA again with NONE's choices put in.

    python -m tests.model.forced [--ctx 32k] [--excerpts 4] [--tokens 256] [--mode da]

Indexers choose rows and routers choose experts. Both runs read the same text in bf16 with fp8 rows
and keys. The third run is the second one, but that each choice is the one that NONE made there. If
DA were wrong in any other way than by turning near ties, it would stay apart from NONE.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ess.bench.engine.precision import SERVED, apart, excerpts_of, forced_logits, offload_for
from ess.bench.harness.lists import sizes
from ess.bench.harness.text import token_ids
from ess.bench.harness.threads import compute_threads
from ess.engine.engine import Engine, EngineConfig
from ess.engine.layers import selected
from ess.engine.layers.batch import Batch, select
from ess.engine.layers.direct import DirectLayers
from ess.engine.step import runner
from ess.kernels.cpu.stage import Routing, Stage, pack
from ess.models.decoder import DecoderLayer
from ess.models.load import load_model
from ess.models.moe import Moe

Place = tuple[int, int]
"""A layer, and the position that all lines of a step have."""


@dataclass
class Choices:
    """What a run had before it chose, and what it chose, for all lines of each place."""

    hidden: dict[Place, Tensor] = field(default_factory=dict)
    rows: dict[Place, Tensor] = field(default_factory=dict)
    row_edges: dict[Place, Tensor] = field(default_factory=dict)
    """The lowest score that was chosen, the greatest that was not."""
    gates: dict[Place, Tensor] = field(default_factory=dict)


class Routed:
    """A layer's back stage in two: up to the router's logits, and all of it with logits given."""

    def __init__(self, layer: DecoderLayer, dim: int) -> None:
        moe = layer.experts
        assert moe is not None, f"layer {layer.number} is dense"
        self.logits, self.back = Stage(), Stage()
        for stage in (self.logits, self.back):
            hidden = stage.take(dim)
            layer.mla.add_output(stage, hidden)
            normed = layer._mlp_norm.in_stage(stage, hidden)
            if stage is self.logits:
                logits = stage.linear(normed, pack(moe._gate))
                stage.give(logits, torch.float32)
                continue
            given = stage.take(len(moe._gate))
            up, down = pack(moe._gate_up[0]), pack(moe._down[0])
            stage.experts(normed, given, _routing(moe), up, down, hidden)
            if moe._shared is not None:
                moe._shared.add_to(stage, normed, hidden)
            stage.give(hidden, torch.float32)


def _routing(moe: Moe) -> Routing:
    c = moe._config
    assert moe._correction is not None, "a router without a correction"
    return Routing(
        per_token=c.experts_per_token,
        group_count=c.expert_group_count,
        groups_kept=c.expert_groups_kept,
        is_normed=c.expert_weights_normed,
        scale=c.expert_scale,
        correction=moe._correction,
    )


def chosen(moe: Moe, logits: Tensor) -> Tensor:
    """The experts of each token, by the plain router."""
    with patch("ess.models.moe.F.linear", lambda x, gate: logits):
        return moe.route(logits).experts


@contextlib.contextmanager
def watched(seen: Choices, instead: Choices | None = None) -> Iterator[None]:
    """Decode steps keep their choices in `seen`, and run with those of `instead`."""
    parts: dict[int, Routed] = {}

    def watched_select(
        batch: Batch, layer: int, queries: Tensor, weights: Tensor, which: Any, *, scored: bool
    ) -> tuple[Tensor, None]:
        assert which is None, "a batch in parts"
        assert not scored, "a pool whose rows give way by score"
        place = layer, int(batch.step.positions[0])
        seen.rows[place], _ = select(batch, layer, queries, weights, which)
        pages, k = batch.offload.memory(layer).key_pages, batch.layout.top_k
        assert batch.layout.index is not None, "no indexer"
        logits = batch.ops.index_logits(
            queries, weights, pages, batch.places.page_table, batch.lengths, batch.layout.index
        )
        seen.row_edges[place] = logits.topk(k + 1).values[:, k - 1 :]
        theirs = {} if instead is None else instead.rows
        return theirs.get(place, seen.rows[place]), None

    def watched_back(batch: Batch, layer: DecoderLayer, hidden: Tensor, attended: Tensor) -> Tensor:
        place = layer.number, int(batch.step.positions[0])
        seen.hidden[place] = hidden.clone()
        if layer.experts is None:
            return layer.compiled(batch.layout).back(hidden, attended)
        if layer.number not in parts:
            parts[layer.number] = Routed(layer, hidden.shape[1])
        routed = parts[layer.number]
        [logits] = routed.logits([hidden, attended])
        seen.gates[place] = logits
        if instead is not None and place in instead.gates:
            theirs = instead.gates[place]
            same = chosen(layer.experts, logits) == chosen(layer.experts, theirs)
            logits = logits.where(same.all(1, keepdim=True), theirs)
        [made] = routed.back([hidden, attended, logits])
        return made

    with (
        patch.object(selected, "select", watched_select),
        patch.object(runner, "back", watched_back),
        patch.object(DirectLayers, "count", lambda *args: 0),
    ):
        yield


@dataclass(frozen=True)
class Runs:
    """Logits [line, token, vocabulary] of NONE, of the other mode, and of it with NONE's choices;
    and what the first two chose."""

    none: Tensor
    other: Tensor
    forced: Tensor
    by_none: Choices
    by_other: Choices
    experts: dict[int, Moe]


def run(lines: Sequence[Sequence[int]], *, tokens: int, mode: str) -> Runs:
    model, start = load_model(form="bf16"), len(lines[0]) - tokens
    made, seen = [], (Choices(), Choices(), Choices())
    with offload_for(model, SERVED, lines) as offload:
        for way, choices, instead in (
            ("none", seen[0], None),
            (mode, seen[1], None),
            (mode, seen[2], seen[0]),
        ):
            with watched(choices, instead):
                eng = Engine(model, offload, EngineConfig(modes=way))
                made.append(torch.stack(forced_logits(eng, lines, start=start)))
    experts = {layer.number: layer.experts for layer in model.layers if layer.experts is not None}
    none, other, forced = made
    return Runs(none, other, forced, seen[0], seen[1], experts)


# ---- the report


def ulps(low: float, high: float) -> float:
    """A difference of two float32 numbers, in steps of the greater one's last place."""
    greatest = max(abs(low), abs(high))
    return (high - low) / 2.0 ** (math.floor(math.log2(greatest)) - 23)


def turned(runs: Runs, line: int) -> Iterator[tuple[Place, str]]:
    """Each choice of a line that differs, in the order of its tokens and layers."""
    for place in sorted(runs.by_none.hidden, key=lambda place: place[::-1]):
        layer, _ = place
        ours, theirs = runs.by_none.rows[place][line], runs.by_other.rows[place][line]
        count = len(set(ours.tolist()) - set(theirs.tolist()))
        if count:
            a, b = (c.row_edges[place][line].tolist() for c in (runs.by_none, runs.by_other))
            gap = f"edge {a[0]:.7g} over {a[1]:.7g} ({ulps(a[1], a[0]):.0f} ulp), there {b[0]:.7g}"
            yield place, f"{count} rows of {len(ours)}: {gap} over {b[1]:.7g}"
        if layer not in runs.experts:
            continue
        gates = [c.gates[place][line : line + 1] for c in (runs.by_none, runs.by_other)]
        picked = [chosen(runs.experts[layer], gate)[0].tolist() for gate in gates]
        if picked[0] != picked[1]:
            moved = float((gates[0] - gates[1]).abs().max())
            yield place, f"experts {picked[0]} -> {picked[1]}: logits moved by up to {moved:.4f}"


def report(runs: Runs, start: int) -> None:
    for name, other in (("as it is", runs.other), ("with NONE's choices", runs.forced)):
        gap = apart(runs.none, other)
        leads = " ".join(f"{lead:.2f}" for lead in gap.leads) or "-"
        print(f"{name}: mean KL {gap.mean:.1e}, max {float(gap.kl.max()):.1e}, leads {leads}")
    kl = apart(runs.none, runs.other).kl
    for line in range(len(kl)):
        worst = int(kl[line].argmax())
        print(
            f"line {line}: mean {float(kl[line].mean()):.1e}, worst {worst}: {kl[line, worst]:.3f}"
        )
        for (layer, position), what in turned(runs, line):
            print(f"  token {position - start}, layer {layer}: {what}")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--ctx", default="32k")
    ask.add_argument("--excerpts", type=int, default=4)
    ask.add_argument("--tokens", type=int, default=256)
    ask.add_argument("--mode", default="da")
    asked = ask.parse_args()
    [context] = sizes("--ctx", asked.ctx)
    ids = token_ids()[0]
    lines = excerpts_of(ids, context, count=asked.excerpts, tokens=asked.tokens)
    with compute_threads():
        report(run(lines, tokens=asked.tokens, mode=asked.mode), context)


if __name__ == "__main__":
    main()
