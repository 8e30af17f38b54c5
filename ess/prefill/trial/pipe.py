"""Starts the processes of a timed pipeline, gives them prompts, and gathers their times.

Nothing is handed over, and there is no server. Needs no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ess.engine.config import ProcessConfig
from ess.engine.process.messages import Launch, Rank
from ess.errors import BadState
from ess.models.config import ModelConfig
from ess.models.registry import read_config
from ess.models.weights.files.folder import Folder
from ess.ports import kept_port
from ess.prefill.trial.pipe_messages import Ask, Line, Opened, PipeAnswer, Slow, Timed, Trial
from ess.units import PAGE_ROWS, div_ceil

Kind = Literal["wall", "core"]
"""Elapsed time, or time on a core: where stages share cores only the latter is their own."""
MODULE: Final = "ess.prefill.trial.rank"
HERE: Final = "127.0.0.1"
END_S: Final = 20.0
BUSY_SHARE: Final = 0.5
ENDED: Final = "A timed pipeline has ended; its processes have said why above"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeTrial:
    """`layers` are those of each stage; `prompts` prompts of up to `context` tokens fit at once."""

    model: str
    layers: tuple[tuple[int, int], ...]
    context: int
    prompts: int = 1
    config: ProcessConfig
    links: Slow | None = None

    @property
    def launch(self) -> Launch:
        layout = model_config(self.model).layout(row=self.config.row)
        pages = self.prompts * (div_ceil(self.context + 1, PAGE_ROWS) + 1)
        return Launch(
            model=self.model,
            config=replace(self.config, max_running=self.prompts),
            length_max=(self.context // PAGE_ROWS + 1) * PAGE_ROWS,
            slot_bytes=0,
            host_bytes=pages * layout.host_page_bytes,
            index_bytes=pages * layout.index_page_bytes,
        )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch through all stages: for each stage the seconds of its layers, and last those
    of the work behind the layers."""

    chunks: tuple[tuple[int, int], ...]
    wall_s: tuple[tuple[float, ...], ...]
    core_s: tuple[tuple[float, ...], ...]

    @property
    def done(self) -> int:
        return self.chunks[0][0]

    @property
    def count(self) -> int:
        return sum(stop - start for start, stop in self.chunks)

    def stage_s(self, kind: Kind) -> tuple[float, ...]:
        return tuple(map(sum, self._times(kind)))

    def layer_s(self, kind: Kind) -> tuple[float, ...]:
        """Seconds of every layer of the model, MTP's last. The work behind the layers of a stage
        counts with its last layer."""
        return tuple(
            seconds
            for *layers, last, behind in self._times(kind)
            for seconds in (*layers, last + behind)
        )

    def _times(self, kind: Kind) -> tuple[tuple[float, ...], ...]:
        return self.core_s if kind == "core" else self.wall_s


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """The result of an Ask: `answer.made_s[-1]` is the time of the whole."""

    answer: PipeAnswer
    chunks: tuple[Chunk, ...]

    @property
    def span_s(self) -> float:
        return max(self.answer.made_s)


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a stage's process has had, and what its pools may have of it."""

    bytes: int
    pool_bytes: int


def kind_for(stage_count: int) -> Kind:
    """The clock to time by: "wall" only where every stage has an idle core of its own."""
    free = len(os.sched_getaffinity(0)) - os.getloadavg()[0]
    return "wall" if free > stage_count - BUSY_SHARE else "core"


def model_config(path: str) -> ModelConfig:
    folder = Folder(Path(path))
    try:
        return read_config(folder.read_json("config.json"))
    finally:
        folder.close()


class Pipe:
    """A context manager: its processes end with the block."""

    def __init__(self, plan: PipeTrial) -> None:
        self.plan = plan
        self._folder = Path(tempfile.mkdtemp(prefix="ess-trial-"))
        self._kept = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._read = [0] * len(plan.layers)

    def __enter__(self) -> Pipe:
        try:
            self._start()
            self._hear()
            self.pool_bytes = [self._opened(stage) for stage in range(len(self.plan.layers))]
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(END_S if kind is None else 0.0)

    def _start(self) -> None:
        layers, secret = self.plan.layers, secrets.token_hex(16)
        address = f"tcp://{HERE}:{self._kept.enter_context(kept_port(HERE))}"
        for number in range(len(layers)):
            rank = Rank(rank=number, size=len(layers), init=address, layers=layers)
            launch = msgspec.structs.replace(self.plan.launch, rank=rank)
            log = self._log(number)
            trial = Trial(launch=launch, secret=secret, log=str(log), links=self.plan.links)
            process = subprocess.Popen(
                [sys.executable, "-m", MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL if number else subprocess.PIPE,
                bufsize=0,
            )
            self._processes.append(process)
            self._say(number, trial)

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"

    def _say(self, number: int, message: Any) -> None:
        stdin = self._processes[number].stdin
        assert stdin is not None, "stdin is a pipe"
        try:
            stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:
            raise BadState(ENDED) from None

    def _hear(self) -> PipeAnswer:
        stdout = self._processes[0].stdout
        assert stdout is not None, "stdout is a pipe"
        line = stdout.readline()
        if not line:
            raise BadState(ENDED)
        return msgspec.json.decode(line, type=PipeAnswer)

    def _end(self, within_s: float) -> None:
        for process in self._processes:
            assert process.stdin is not None, "stdin is a pipe"
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._kept.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- what it is asked

    def run(
        self, prompts: Sequence[list[int]], ends: Sequence[int], *, forgets: bool = True
    ) -> TrialTimes:
        self._say(0, Ask(prompts=list(prompts), ends=list(ends), forgets=forgets))
        answer = self._hear()
        stages = [self._timed(stage) for stage in range(len(self.plan.layers))]
        return TrialTimes(answer, tuple(itertools.starmap(_joined, zip(*stages, strict=True))))

    def peaks(self) -> list[Peak]:
        return [
            Peak(_peak_bytes(process.pid), pools)
            for process, pools in zip(self._processes, self.pool_bytes, strict=True)
        ]

    def _opened(self, stage: int) -> int:
        [opened] = self._lines(stage)
        assert isinstance(opened, Opened), "the first line of a stage"
        return opened.pool_bytes

    def _timed(self, stage: int) -> list[Timed]:
        return [line for line in self._lines(stage) if isinstance(line, Timed)]

    def _lines(self, stage: int) -> list[Line]:
        """The lines that were written since the last call."""
        with self._log(stage).open("rb") as log:
            log.seek(self._read[stage])
            text = log.read()
        self._read[stage] += len(text)
        decoder = msgspec.json.Decoder(Line)
        return [decoder.decode(line) for line in text.splitlines()]


def _joined(*stages: Timed) -> Chunk:
    """The times of one micro-batch from all stages; all run the same ones in the same order."""
    assert all(stage.chunks == stages[0].chunks for stage in stages), "stages disagree"
    return Chunk(
        tuple(stages[0].chunks),
        tuple(tuple(stage.wall_s) for stage in stages),
        tuple(tuple(stage.core_s) for stage in stages),
    )


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise BadState(f"the system does not say how much memory process {pid} ever had")
