"""`ess prefill --tune`: the chunks and layers with which this pipeline prefills fastest.

profile   runs prompts in chunks of several sizes: the time of every layer, and how it grows
search    simulates with these times: chunk size, smoothing, layers of each stage
confirm   runs the best two or three and the present settings, in turn, on the real pipeline
"""

from __future__ import annotations

import os
import random
import secrets
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ess import console
from ess.engine.chunking.partition import counted_costs, partition, read_partition
from ess.engine.config import EngineConfig, ProcessConfig
from ess.engine.devices import is_device
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.prefill.trial.pipe import Kind, Pipe, PipeTrial, TrialTimes, kind_for
from ess.server.commands.start.files.checkpoint import Checkpoint, read_checkpoint
from ess.server.commands.start.resolving import derived, layout_of
from ess.server.commands.start.settings import Settings, resolve
from ess.sim.prefill.measured import MeasuredChunk, Model, modelled
from ess.sim.prefill.tuning import Forecast, Setting, on_clock, search
from ess.units import PAGE_ROWS, align_up, counted, parse_size

CONFIRMED: Final = 3
PROFILE_SHARES: Final = (0.5, 1, 2, 4)
CHUNKS_MIN: Final = 4
OF_PROCESS: Final = ("form", "row", "threads")


class TriedSetting(msgspec.Struct, frozen=True, kw_only=True):
    """A setting, its simulated time, and its measured time in each round."""

    flags: str
    expected_first_token_s: float
    expected_tokens_per_s: float
    bubble_share: float
    chunk_count: int
    first_token_s: list[float]

    @property
    def middle_s(self) -> float:
        return statistics.median(self.first_token_s)

    @property
    def shown(self) -> str:
        lowest, highest = min(self.first_token_s), max(self.first_token_s)
        return (
            f"{self.middle_s:8.3f} s  ({lowest:.3f} to {highest:.3f}; expected"
            f" {self.expected_first_token_s:.3f})  {self.expected_tokens_per_s:9,.0f} tokens/s "
            f" {self.bubble_share:5.1%}  {self.flags}"
        )


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """The results; `tried` begins with the present settings."""

    prompt: int
    stages: int
    times: str
    profile: str
    flags: str
    verdict: str
    is_sure: bool
    first_token_s: float
    tokens_per_s: float
    tried: list[TriedSetting]


def tune(
    flags: Mapping[str, Any], *, config: Path | None, prompt: str, rounds: int, json: bool
) -> int:
    """Prints the flags to set; returns the exit code."""
    environment = {"ESS_PEER_SECRET": secrets.token_hex(16), **os.environ}
    resolved = resolve(flags, config=config, environment=environment)
    checkpoint = read_checkpoint(resolved.settings.model)
    settings = derived(resolved, checkpoint).settings
    tokens = _prompt_of(settings, checkpoint, prompt)
    if not 1 <= rounds <= 100:
        raise BadInput(f"tune_rounds is {rounds}, 1 to 100")
    tuner = Tuner(settings, checkpoint, layout_of(settings, checkpoint), tokens, rounds)
    tuning = tuner.run()
    if json:
        print(msgspec.json.format(msgspec.json.encode(tuning), indent=2).decode())
    else:
        print("\n".join(lines(tuning)))
    return console.OK


def _prompt_of(settings: Settings, checkpoint: Checkpoint, text: str) -> int:
    if is_device(settings.device):
        raise BadInput(
            f"device is {settings.device}: tune times layers that compute on the host; for stages"
            " on devices compare runs of a few settings"
        )
    if settings.nnodes > 1 or settings.team_size > 1:
        raise BadInput(
            f"tune runs stages of one process each on one machine; nnodes is {settings.nnodes},"
            f" tp_size {settings.tp_size} and cp_size {settings.cp_size}"
        )
    tokens, longest = parse_size(text, "--tune-prompt"), checkpoint.config.positions_max
    if not CHUNKS_MIN * PAGE_ROWS <= tokens <= longest:
        raise BadInput(
            f"tune_prompt is {text}: {CHUNKS_MIN * PAGE_ROWS} to {longest:,} tokens can be tuned"
        )
    return tokens


class Tuner:
    def __init__(
        self,
        settings: Settings,
        checkpoint: Checkpoint,
        layout: ModelLayout,
        prompt: int,
        rounds: int,
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._layout = layout
        self._prompt = prompt
        self._rounds = rounds
        self._kind: Kind = kind_for(settings.pp_size)
        self._random = random.Random(prompt)

    def run(self) -> Tuning:
        default = self._default()
        stages = counted(len(default.layers), "stage")
        console.note(f"tune: {stages}, prompts of {self._prompt:,} tokens")
        with Pipe(self._plan(default)) as pipe:
            model, longest = self._profile(pipe, default)
        forecasts = search(model, self._layout, default, self._prompt, chunk_max=longest)
        chosen = forecasts[: 1 + CONFIRMED]
        for each in chosen:
            console.note(f"tune: expected {each.first_token_s:.3f} s: {_shown(each.setting)}")
        seconds = self._confirm([each.setting for each in chosen], model)
        tried = [_tried(each, seconds[each.setting]) for each in chosen]
        return self._judged(tried, model)

    # ---- the three steps

    def _default(self) -> Setting:
        chosen, config = self._settings, self._checkpoint.config
        text = chosen.pp_layer_partition
        parts = partition(
            self._layout,
            chosen.pp_size,
            given=read_partition(text) if text else None,
            costs=counted_costs(config),
        )
        return Setting(
            first=align_up(chosen.chunk_tokens, PAGE_ROWS),
            smoothing=chosen.smooth if chosen.dynamic_chunking else 0.0,
            layers=tuple((part.start, part.stop) for part in parts),
        )

    def _plan(self, setting: Setting) -> PipeTrial:
        """A trial's plan with the engine's settings; the trial has stages of its own."""
        names = [field.name for field in fields(EngineConfig)]
        given = {name: getattr(self._settings, name) for name in (*names, *OF_PROCESS)}
        return PipeTrial(
            model=self._checkpoint.path,
            layers=setting.layers,
            context=self._prompt,
            config=ProcessConfig(**given),
        )

    def _profile(self, pipe: Pipe, default: Setting) -> tuple[Model, int]:
        """The fitted times, and the longest chunk measured: no longer chunk is tried."""
        longest = max(PAGE_ROWS, self._prompt // CHUNKS_MIN)
        wanted = [min(int(share * default.first), longest) for share in PROFILE_SHARES]
        sizes = sorted({max(PAGE_ROWS, size // PAGE_ROWS * PAGE_ROWS) for size in wanted})
        pipe.run([self._text(2 * PAGE_ROWS)], [PAGE_ROWS])
        chunks = []
        for size in sizes:
            console.note(f"tune: profile, chunks of {size} ...")
            ends = list(range(size, self._prompt + size, size))
            chunks += _measured(pipe.run([self._text(self._prompt)], ends), self._kind)
        return modelled(chunks), sizes[-1]

    def _confirm(self, settings: Sequence[Setting], model: Model) -> dict[Setting, list[float]]:
        """Runs the settings in turn; pipelines with equal layers are started once."""
        seconds: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for layers in dict.fromkeys(setting.layers for setting in settings):
            alike = [setting for setting in settings if setting.layers == layers]
            with Pipe(self._plan(alike[0])) as pipe:
                pipe.run([self._text(2 * PAGE_ROWS)], [PAGE_ROWS])
                for number in range(self._rounds):
                    console.note(f"tune: confirm, round {number + 1} of {self._rounds} ...")
                    for setting in alike:
                        ends = setting.ends(model.time, self._prompt - 1)
                        ran = pipe.run([self._text(self._prompt)], ends)
                        seconds[setting].append(_first_token_s(ran, self._kind))
        return seconds

    def _text(self, count: int) -> list[int]:
        """A new random prompt at each call, so that nothing of it is cached."""
        vocabulary = self._checkpoint.config.vocab_size
        return [self._random.randrange(vocabulary) for _ in range(count)]

    # ---- results

    def _judged(self, tried: list[TriedSetting], model: Model) -> Tuning:
        best = min(tried, key=lambda each: each.middle_s)
        best, verdict, is_sure = judged(tried[0], best, tried)
        time = model.time
        return Tuning(
            prompt=self._prompt,
            stages=self._settings.pp_size,
            times=_times(self._kind, self._settings.pp_size),
            profile=(
                f"{1e6 * time.linear:.4g} us a token, {1e9 * time.quadratic:.3g} ns a token"
                f" squared, {1e3 * model.overhead_s:.3g} ms a chunk;"
                f" chunks lie {model.error:.1%} off that"
            ),
            flags=best.flags,
            verdict=verdict,
            is_sure=is_sure,
            first_token_s=best.middle_s,
            tokens_per_s=best.expected_tokens_per_s,
            tried=tried,
        )


def _measured(ran: TrialTimes, kind: Kind) -> list[MeasuredChunk]:
    return [MeasuredChunk(chunk.done, chunk.count, chunk.layer_s(kind)) for chunk in ran.chunks]


def _first_token_s(ran: TrialTimes, kind: Kind) -> float:
    """Where stages share cores the wall clock does not show what they would take alone."""
    if kind == "wall":
        return ran.span_s
    return on_clock([chunk.stage_s(kind) for chunk in ran.chunks]).span_s


def _tried(each: Forecast, seconds: list[float]) -> TriedSetting:
    return TriedSetting(
        flags=_shown(each.setting),
        expected_first_token_s=each.first_token_s,
        expected_tokens_per_s=each.tokens_per_s,
        bubble_share=each.bubble_share,
        chunk_count=each.chunk_count,
        first_token_s=seconds,
    )


def _shown(setting: Setting) -> str:
    return shlex.join(setting.flags())


def _times(kind: Kind, stages: int) -> str:
    if kind == "wall":
        return "the pipeline's own, by the wall clock"
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return (
        f"{counted(stages, 'stage')}, {counted(cores, 'core')}, load {load:.1f}: not a core for"
        " each stage, so first tokens are those of a virtual clock, with the time that each stage"
        " was measured to take on a core"
    )


def judged(
    default: TriedSetting, best: TriedSetting, tried: Sequence[TriedSetting]
) -> tuple[TriedSetting, str, bool]:
    """Which of the two to take, a sentence that says why, and whether to trust it: only if every
    round of the best was faster than every round of the default. Takes the default if the best was
    slower in its middle round."""
    off = max(abs(each.expected_first_token_s / each.middle_s - 1) for each in tried)
    fit = f"expected times were up to {off:.0%} off those measured"
    rounds, gain = len(best.first_token_s), 1 - best.middle_s / default.middle_s
    if best is default:
        return default, f"keep the settings as they are: nothing tried is faster; {fit}", True
    if max(best.first_token_s) < min(default.first_token_s) and rounds > 1:
        sure = f"sure: {gain:.1%} sooner, and sooner in each of {rounds} rounds"
        return best, f"{sure}; {fit}", True
    more = "try on a quiet machine, or with more --tune-rounds"
    if best.middle_s < min(default.first_token_s):
        why = "but rounds overlap" if rounds > 1 else "but in a single round"
        return best, f"likely, not sure: {gain:.1%} sooner, {why}; {more}; {fit}", False
    kept = f"keep the settings as they are: {gain:.1%} sooner is less than rounds differ"
    return default, f"{kept}; {more}; {fit}", False


def lines(tuning: Tuning) -> list[str]:
    """The results as lines for people."""
    title = f"{counted(tuning.stages, 'stage')}, a prompt of {tuning.prompt:,} tokens"
    return [
        title,
        f"profile: {tuning.profile}",
        f"times: {tuning.times}",
        "",
        "first token, middle of the rounds; when prompts follow one another; bubbles; flags",
        *(f"{each.shown}{'' if at else '  (as it is)'}" for at, each in enumerate(tuning.tried)),
        "",
        tuning.verdict,
        f"set: {tuning.flags}",
        f"first token {tuning.first_token_s:.3f} s, {tuning.tokens_per_s:,.0f} tokens/s expected",
    ]
