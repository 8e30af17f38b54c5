"""The engine: continuous batching over an offload, one step at a time.

    step: plan (who runs) -> run (model, door, kernels) -> commit (tokens, states, endings)

A request waits until the ledger admits it, is prefilled chunk by chunk beside the decode batch,
decodes, may be preempted and resumed, and ends. Nothing here is concurrent: copies run on the
offload's lane, everything else in the caller's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ess.door import Offload
from ess.engine import mtp, prompt, scheduler
from ess.engine.batch import Chunk, Line, Made, StepPlan, StepResult
from ess.engine.choice import choose
from ess.engine.request import Request
from ess.engine.runner import Runner
from ess.engine.sampling import Sampling
from ess.engine.tuning import Tuning
from ess.engine.verify import Verifier
from ess.errors import BadInput, BadState, PoolFull
from ess.kernels.backend import BackendName, ops
from ess.models.model import Model
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`mtp` is how many tokens a step verifies per request; 1 means no drafts.

    `modes` is "layerwise" (per layer from live counters, from `calibration` on if there is one),
    "resident", "none", "da", "dba", or a list with one of these four per layer. `tbo` runs steps
    in two halves: "off", "on", "auto", or the least tokens of a step for it; `sbo` says what the
    experts' communication runs beside.
    `verify_every` n checks one layer of every n-th step against the host's rows.
    """

    modes: str | Sequence[str] = "layerwise"
    calibration: str | Path | None = None
    tbo: Tbo = "off"
    sbo: Sbo = "off"
    mtp: int = 1
    batch_max: int = 16
    query_max: int = 64
    chunk_tokens: int = 512
    warm: bool = True
    backend: BackendName = "cpu"
    verify_every: int = 0
    verify_fatal: bool = False


class Engine:
    def __init__(self, model: Model, offload: Offload, config: EngineConfig) -> None:
        if config.mtp > 1 and not (model.mtp and offload.layout.mtp_layer_count):
            raise BadInput(f"mtp is {config.mtp}, but the model or the layout has no MTP layer")
        if not 1 <= config.mtp <= 8:
            raise BadInput(f"mtp is {config.mtp}, must be 1..8")
        self.offload = offload
        self.refusal: PoolFull | None = None
        self.step_count = 0
        self._config = config
        self.verifier = Verifier(every=config.verify_every, is_fatal=config.verify_fatal)
        self.tuning = Tuning(
            offload,
            config.modes,
            calibration=config.calibration,
            tbo=config.tbo,
            sbo=config.sbo,
        )
        self._runner = Runner(
            model, offload, ops(config.backend), tuning=self.tuning, verifier=self.verifier
        )
        self._requests: list[Request] = []
        self._added_count = 0

    # ---- requests

    def add(self, prompt: Sequence[int], sampling: Sampling | None = None) -> Request:
        request = Request(
            number=self._added_count, prompt=list(prompt), sampling=sampling or Sampling()
        )
        vocabulary = self._runner.model.config.vocab_size
        if not 0 <= min(request.prompt) <= max(request.prompt) < vocabulary:
            raise BadInput(f"prompt ids must be 0..{vocabulary - 1}")
        longest = self.offload.length_max
        if request.length_max > longest:
            raise BadInput(
                f"prompt and max_tokens make {request.length_max} positions, at most {longest}"
            )
        self._added_count += 1
        self._requests.append(request)
        return request

    def cancel(self, request: Request) -> None:
        if request.state != "finished":
            request.reason = "cancelled"
            self._finish(request)

    def preempt(self, request: Request) -> None:
        """Give its slots and index pages to others; `resume` needs no recompute."""
        if request.state != "decoding" or request.sequence is None:
            raise BadState(f"request {request.number} is {request.state}, not decoding")
        self.offload.preempt(request.sequence)
        request.move("preempted")

    def resume(self, request: Request) -> None:
        if request.state != "preempted" or request.sequence is None:
            raise BadState(f"request {request.number} is {request.state}, not preempted")
        self.offload.resume(request.sequence)
        request.move("decoding")

    @property
    def is_idle(self) -> bool:
        return all(request.state == "preempted" for request in self._requests)

    # ---- the step

    @torch.inference_mode()
    def step(self) -> StepResult:
        self._admit()
        plan = scheduler.plan(
            self._requests,
            batch_max=self._config.batch_max,
            query_max=self._config.query_max,
            chunk_tokens=self._config.chunk_tokens,
        )
        result = self._run(plan)
        self._commit(result)
        self.step_count += 1
        return result

    def run(self) -> Iterable[StepResult]:
        """Steps until nothing can run: all is done, preempted, or waits for room."""
        while not self.is_idle:
            result = self.step()
            if not result.made and result.chunk is None:
                return
            yield result

    def _admit(self) -> None:
        """Waiting requests enter in order while the ledger admits them.

        `refusal` says what the first one that has to wait is short of; a request that can never
        fit ends as refused.
        """
        self.refusal = None
        for request in [one for one in self._requests if one.state == "waiting"]:
            try:
                opened = self.offload.open(request.prompt, length_max=request.length_max)
            except PoolFull as refusal:
                self.refusal = refusal
                if refusal.retry_after_s is not None:
                    return
                request.reason = "refused"
                self._finish(request)
                continue
            request.sequence = opened
            request.prefilled_count = opened.cached_count
            request.move("prefilling")
            if request.prefilled_count == len(request.prompt) - 1:
                request.move("decoding")

    def _run(self, plan: StepPlan) -> StepResult:
        if plan.chunk is not None:
            self._run_chunk(plan.chunk)
        made = self._decode(plan.lines) if plan.lines else ()
        return StepResult(made, plan.chunk)

    def _run_chunk(self, chunk: Chunk) -> None:
        request, sequence = chunk.request, chunk.request.sequence
        assert sequence is not None
        windows = prompt.run_chunk(
            self._runner,
            sequence,
            request.prompt[chunk.start : chunk.stop],
            chunk.start,
            request.prompt[chunk.start + 1 : chunk.stop + 1],
        )
        if chunk.is_last and self._config.warm:
            self.offload.warm(sequence, windows.int().contiguous())
            self.offload.fill(sequence)

    def _decode(self, lines: tuple[Line, ...]) -> tuple[Made, ...]:
        sequences = [line.request.sequence for line in lines if line.request.sequence is not None]
        counts = [len(line.tokens) for line in lines]
        step = self.offload.begin(sequences, query_counts=counts)
        batch = self._runner.batch(step)
        forward = self._runner.decode(batch, [token for line in lines for token in line.tokens])
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        targets = [
            choose(line, forward.logits[at : at + len(line.tokens)])
            for line, at in zip(lines, firsts, strict=True)
        ]
        drafts: list[list[int]] = [[] for _ in lines]
        if self._config.mtp > 1:
            following = [0] * step.query_count
            for at, target in zip(firsts, targets, strict=True):
                following[at : at + len(target)] = target
            last = [at + len(target) - 1 for at, target in zip(firsts, targets, strict=True)]
            drafts = mtp.draft(
                self._runner, batch, forward.hidden, following, last, self._config.mtp - 1
            )
        accepted = [len(target) for target in targets]
        kept = [line.tokens[:count] for line, count in zip(lines, accepted, strict=True)]
        self.offload.commit(step, accepted=accepted, tokens=kept)
        return tuple(
            Made(line.request, tuple(target), tuple(guesses))
            for line, target, guesses in zip(lines, targets, drafts, strict=True)
        )

    def _commit(self, result: StepResult) -> None:
        if result.chunk is not None:
            result.chunk.request.prefilled_count = result.chunk.stop
            if result.chunk.is_last:
                result.chunk.request.move("decoding")
        for made in result.made:
            made.request.take(list(made.tokens))
            made.request.drafts = list(made.drafts)
            if made.request.reason is not None:
                self._finish(made.request)

    def _finish(self, request: Request) -> None:
        request.move("finished")
        self._requests.remove(request)
        if request.sequence is not None:
            request.sequence.close()
            request.sequence = None
