"""A guest beside llama.cpp: one prompt, from the same GGUF file, on equally many threads.

llama.cpp is the package `xllamacpp`, whose server runs in this process; ours is an engine as `ess
serve` runs it. Both get the same ids and decode greedily. One thread is timed by its processor
time, which other work on the machine hardly disturbs; several by the wall clock. Both multiply the
file's integers of 4 and 8 bits; llama.cpp rounds their inputs to 8 bits, ESS to bf16.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ess import console
from ess.bench.harness.lists import amount, size, sizes
from ess.bench.harness.prefix import offload_of_one
from ess.bench.harness.report import Row, compare
from ess.bench.harness.text import text_of
from ess.bench.harness.threads import compute_threads
from ess.bench.locality.guest_quality import random_model
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState, Unavailable
from ess.models.guest.pins import SMOLLM2, guest_named
from ess.models.guest.place import checkpoint_folder, gguf_file
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer
from ess.units import PAGE_ROWS, div_ceil

PACKAGE: Final = "xllamacpp"
REPEATS: Final = 3

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A prompt, and how many tokens are decoded after the first."""

    prompt: Sequence[int]
    tokens: int

    def rates(self, started: float, first: float, last: float) -> dict[str, float]:
        """Tokens per second of prefill and of decode."""
        return {
            "prompt": len(self.prompt) / (first - started),
            "decode": self.tokens / (last - first),
        }


class Side(Protocol):
    def turn(self, clock: Clock) -> dict[str, float]: ...


def vs_llama_benchmark(
    *,
    model: str = SMOLLM2.name,
    prompt: str = "512",
    tokens: str = "128",
    threads: str = "1",
    repeats: int = REPEATS,
    smoke: bool = False,
) -> list[Row]:
    """A guest's tokens per second beside llama.cpp's, on the same file and as many threads.

    Parameters
    ----------
    model
        The guest's name.
    prompt
        Tokens of the prompt.
    tokens
        Tokens decoded behind it.
    threads
        Compute threads of each side, a list.
    repeats
        Measured turns of each side.
    """
    library = _library()
    if smoke:
        task = Task(prompt=list(range(64)), tokens=8)
        return _rows(random_model(), task, library, Path("smoke.gguf"), [1], repeats=1)
    guest, counts = guest_named(model), sizes("--threads", threads)
    length, made = size("--prompt", prompt), size("--tokens", tokens)
    amount("--repeats", repeats)
    file, folder = gguf_file(guest), checkpoint_folder(guest)
    task = Task(prompt=Tokenizer(folder).encode(text_of()[0])[:length], tokens=made)
    return _rows(load_model(folder), task, library, file, counts, repeats=repeats)


def _library() -> Any:
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        raise Unavailable(
            f"llama.cpp is not here ({error}): pip install {PACKAGE}, a wheel of 34 MB"
        ) from None


def _rows(
    model: Model, task: Task, library: Any, file: Path, counts: Sequence[int], *, repeats: int
) -> list[Row]:
    ours = Ours(model, task)
    rows: list[Row] = []
    for threads in counts:
        console.note(f"threads: {threads} ...")
        with compute_threads(threads):
            rival = Rival(library, file, task, threads)
            rows += _compared(ours, rival, task, threads, repeats)
    ours.offload.close()
    return rows


def _compared(ours: Side, rival: Side, task: Task, threads: int, repeats: int) -> list[Row]:
    clock, name = _clock(threads)
    for side in (ours, rival):
        side.turn(clock)
    turns = [(ours.turn(clock), rival.turn(clock)) for _ in range(repeats)]
    config = {"prompt": len(task.prompt), "tokens": task.tokens, "threads": threads, "clock": name}
    return [
        compare(
            name=f"{what}, threads: {threads}",
            unit="tokens/s",
            ours=[mine[what] for mine, _ in turns],
            baseline=("llama.cpp", [theirs[what] for _, theirs in turns]),
            better="higher",
            config=config,
        )
        for what in ("prompt", "decode")
    ]


def _clock(threads: int) -> tuple[Clock, str]:
    return (time.process_time, "processor") if threads == 1 else (time.perf_counter, "wall")


class Ours:
    """An engine with room for one resident request, as long as a prompt and its answer."""

    def __init__(self, model: Model, task: Task) -> None:
        self._task, layout = task, model.config.layout()
        pages = div_ceil(len(task.prompt) + task.tokens, PAGE_ROWS) + 3
        self.offload = offload_of_one(layout, pages, is_resident=True)
        self._engine = Engine(model, self.offload, EngineConfig())

    def turn(self, clock: Clock) -> dict[str, float]:
        engine, task = self._engine, self._task
        engine.forget_prefixes()
        started = clock()
        wanted = Sampling(tokens_max=task.tokens + 1, ignore_eos=True)
        request = engine.add(task.prompt, wanted)
        while request.state in ("waiting", "prefilling"):
            engine.step()
        first = clock()
        for _ in engine.run():
            pass
        if len(request.output) != task.tokens + 1:
            raise BadState(f"{len(request.output)} tokens came, not {task.tokens + 1}")
        return task.rates(started, first, clock())


class Rival:
    """llama.cpp's server, called without HTTP."""

    def __init__(self, library: Any, file: Path, task: Task, threads: int) -> None:
        self._task, settings = task, library.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx = len(task.prompt) + task.tokens + PAGE_ROWS
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.n_gpu_layers, settings.n_parallel, settings.verbosity = 0, 1, -1
        self._server = library.Server(settings)

    def turn(self, clock: Clock) -> dict[str, float]:
        """Runs the prompt with one token; then the rest, with all but the last token cached."""
        task, started = self._task, clock()
        self._ask(tokens=1, read=len(task.prompt))
        first = clock()
        self._ask(tokens=task.tokens, read=1)
        return task.rates(started, first, clock())

    def _ask(self, *, tokens: int, read: int) -> None:
        asked = {"prompt": list(self._task.prompt), "n_predict": tokens, "temperature": 0}
        said = self._server.handle_completions(
            {**asked, "ignore_eos": True, "cache_prompt": read == 1}
        )
        timings = said.get("timings", {})
        counts = timings.get("prompt_n"), timings.get("predicted_n")
        if counts != (read, tokens):
            raise BadState(f"llama.cpp read and made {counts} tokens, not {(read, tokens)}: {said}")
