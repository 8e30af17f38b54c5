"""`python -m ess.models.tiny.trainer.train --folder FOLDER --minutes 75`: train the embedded model.

FOLDER holds train.npy and held_out.npy (corpus.py, then vocabulary.py). State goes to
FOLDER/state.safetensors by atomic rename, a line per report to FOLDER/log.jsonl. Start again with
the same arguments and the run goes on where the state was written.

The schedule runs on the workers' processor time (on a GPU, on step time), so a run that is starved
or stopped for a while loses nothing of it; the first steps of a stage compile and do not count.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import save_file

from ess.errors import BadInput
from ess.models.tiny.trainer.losses import token_nats
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.stages import STAGES, rate_factor
from ess.models.tiny.trainer.team import Common, Team, gather_common

STATE_FORMAT: Final = "ess-tiny-state-2"
REPORT_S: Final = 20.0
STATE_S: Final = 180.0
HELD_OUT_S: Final = 300.0
COMPILING_STEPS: Final = 3
HELD_OUT_WINDOWS: Final = 24
HELD_OUT_LENGTH: Final = 512


@dataclass(slots=True)
class TrainingPlace:
    """Where a run is. `active_s` counts within the stage; `sequences` is what it has consumed."""

    stage_at: int = 0
    step: int = 0
    sequences: int = 0
    active_s: float = 0.0
    total_steps: int = 0
    tokens: int = 0

    def enter_next(self) -> None:
        self.stage_at += 1
        self.step, self.sequences, self.active_s = 0, 0, 0.0


def save_state(path: Path, common: Common, place: TrainingPlace) -> None:
    """Everything a run needs to go on, renamed into place when it is complete."""
    flats = common.flats
    tensors = {
        "truth": flats.truth,
        "first": flats.first,
        "second": flats.second,
        "biases": common.biases,
    }
    note = {"format": STATE_FORMAT, "place": json.dumps(_fields(place))}
    fresh = path.with_suffix(".partial")
    save_file({name: tensor.cpu().clone() for name, tensor in tensors.items()}, fresh, note)
    os.replace(fresh, path)


def _fields(place: TrainingPlace) -> dict[str, Any]:
    return {name: getattr(place, name) for name in TrainingPlace.__slots__}


def load_state(path: Path, common: Common) -> TrainingPlace:
    with safe_open(path, framework="pt") as held:
        note = held.metadata() or {}
        if note.get("format") != STATE_FORMAT:
            raise BadInput(f"{path} is not a training state of format {STATE_FORMAT}")
        truth = held.get_tensor("truth")
        if truth.shape != common.flats.truth.shape:
            raise BadInput(f"{path} has {truth.numel()} weights, need {common.flats.truth.numel()}")
        common.flats.truth.copy_(truth)
        common.flats.read.copy_(truth)
        common.flats.first.copy_(held.get_tensor("first"))
        common.flats.second.copy_(held.get_tensor("second"))
        common.biases.copy_(held.get_tensor("biases"))
    return TrainingPlace(**json.loads(note["place"]))


@torch.no_grad()
def held_out_nats(team: Team, path: Path, *, sparse: bool) -> float:
    """Nats per token over evenly spread windows, the first half of each only as context."""
    tokens = np.load(path, mmap_mode="r")
    network, total = team.worker.network, 0.0
    for at in np.linspace(0, tokens.size - HELD_OUT_LENGTH - 1, HELD_OUT_WINDOWS).astype(int):
        window = torch.from_numpy(tokens[at : at + HELD_OUT_LENGTH + 1].astype(np.int64))[None]
        window = window.to(team.common.flats.read.device)
        hidden = network(window[:, :-1], mode="sparse" if sparse else "dense")
        total += token_nats(hidden, network.lm_head.weight, window[:, 1:]).mean().item()
    return total / HELD_OUT_WINDOWS


class Run:
    """One training run: steps until the stages' time is used up, reporting as it goes."""

    def __init__(
        self,
        *,
        folder: Path,
        minutes: float,
        seed: int,
        workers: int,
        device: str,
        start: Path | None,
    ) -> None:
        self.folder, self.minutes = folder, minutes
        self.common = gather_common(
            shape=ModelShape(),
            tokens_path=str(folder / "train.npy"),
            seed=seed,
            worker_count=workers,
            device=torch.device(device),
        )
        self.state = folder / "state.safetensors"
        self.place = self._begin(start)
        self.team = Team(self.common)
        self.said_at = self.saved_at = self.weighed_at = time.monotonic()
        self.recent: deque[float] = deque(maxlen=50)

    def _begin(self, start: Path | None) -> TrainingPlace:
        """The point where an interrupted run stopped; else the beginning, perhaps with another
        run's weights."""
        if self.state.exists():
            return load_state(self.state, self.common)
        if start is None:
            return TrainingPlace()
        before = load_state(start, self.common)
        self.common.flats.first.zero_()
        self.common.flats.second.zero_()
        return TrainingPlace(tokens=before.tokens)

    def say(self, **words: Any) -> None:
        line = {"time": round(time.time(), 1), **_fields(self.place), **words}
        line |= {"minutes": self.minutes, "workers": self.common.worker_count}
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def step(self, progress: float) -> None:
        place, stage = self.place, STAGES[self.place.stage_at]
        factor = rate_factor(STAGES, place.stage_at, progress, place.step)
        start = time.monotonic()
        number = self.team.step(
            stage_at=place.stage_at,
            step=place.total_steps,
            first=place.sequences,
            rates=(stage.muon_rate * factor, stage.adam_rate * factor),
        )
        if not math.isfinite(number):
            raise BadInput(f"the loss became {number} at step {place.step} of stage {stage.name}")
        wall_s = time.monotonic() - start
        if place.step >= COMPILING_STEPS:
            on_cpu = self.common.flats.read.device.type == "cpu"
            place.active_s += self.team.active_s if on_cpu else wall_s
        place.step += 1
        place.total_steps += 1
        place.sequences += stage.rows * stage.parts
        place.tokens += stage.rows * stage.parts * stage.length
        self.recent.append(number)
        self._report(stage.rows * stage.parts * stage.length / wall_s)

    def _report(self, tokens_per_s: float) -> None:
        now = time.monotonic()
        if now - self.said_at >= REPORT_S:
            self.said_at = now
            mean = statistics.fmean(self.recent)
            self.say(number=round(mean, 4), tokens_per_s=round(tokens_per_s))
        if now - self.saved_at >= STATE_S:
            self.saved_at = now
            save_state(self.state, self.common, self.place)
        if now - self.weighed_at >= HELD_OUT_S and STAGES[self.place.stage_at].kind != "mtp":
            self.weigh()
            self.weighed_at = time.monotonic()

    def weigh(self) -> None:
        sparse = STAGES[self.place.stage_at].kind in ("sparse", "mtp")
        nats = held_out_nats(self.team, self.folder / "held_out.npy", sparse=sparse)
        self.say(held_out_nats=round(nats, 4))

    def stage(self, progress: Progress) -> None:
        stage = STAGES[self.place.stage_at]
        limit_s = self.minutes * 60 * stage.share
        bar = progress.add_task(
            stage.name, total=limit_s, completed=int(self.place.active_s), number=0.0
        )
        while self.place.active_s < limit_s:
            self.step(self.place.active_s / limit_s)
            progress.update(bar, completed=self.place.active_s, number=self.recent[-1])
        self.weigh()
        self.recent.clear()
        self.place.enter_next()
        save_state(self.state, self.common, self.place)

    def run(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[number]:.3f}")) as progress:
            while self.place.stage_at < len(STAGES):
                self.stage(progress)
        self.team.close()


def main(
    *,
    folder: Path,
    minutes: float = 75.0,
    seed: int = 0,
    workers: int | None = None,
    device: str = "cpu",
    start: Path | None = None,
) -> None:
    """Train all stages, or go on with a run that was interrupted.

    Parameters
    ----------
    folder: token files, and where state and log go.
    minutes: processor time of each worker; the learning rate reaches zero at its end.
    seed: of the first weights and of the order of the text.
    workers: processes of one thread each; default: one per core on cpu.
    device: cpu, or cuda for one GPU.
    start: the state of an earlier run whose weights a new run begins with.
    """
    if minutes <= 0:
        raise BadInput(f"minutes is {minutes}, must be positive")
    count = workers or (1 if device != "cpu" else os.cpu_count() or 1)
    torch.set_num_threads(1)
    Run(folder=folder, minutes=minutes, seed=seed, workers=count, device=device, start=start).run()


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
