"""A life, lived: turn by turn, all owners checked, every token held against the truth."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from ess.door import Offload
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.plan import StepResult
from ess.engine.requests.request import Request
from ess.engine.tokens.chance import Chance
from ess.errors import PoolFull
from ess.layout import ModelLayout
from ess.overlap.policy import Mode
from ess.pool.sparse import FIRST_STEP, NOW_MAX
from tests.campaign.drafts import Drafts, made_by
from tests.campaign.lives.drift import Drift
from tests.campaign.lives.plan import OF_TEXT, TURNS, Ask, Hit, Life
from tests.campaign.lives.truth import Truth, alone, lines, model, nearest, tokenizer, truth, wish
from tests.support.manual_lane import ManualLane

LENGTH_MAX = 1024
TURNS_MAX = 6000
SALTS = (b"", b"a tenant")
CLOSE = 2e-3
TIE = 1e-6
LEAD = 0.05
"""Where rows are rounded an answer may differ behind a token that leads by less, as log chances."""


class Wrong(AssertionError):
    """What must never be."""


@dataclass(eq=False)
class Told:
    """What became of an ask: its requests, and what each of them must say."""

    ask: Ask
    request: Request
    truth: Truth
    is_cancelled: bool = False
    said: list[int] = field(default_factory=list)
    chances: list[Chance] = field(default_factory=list)
    scored: list[Chance] = field(default_factory=list)


@dataclass
class Outcome:
    seen: Counter[str] = field(default_factory=Counter)


def layout_of(life: Life) -> ModelLayout:
    config, has_mtp = model(life.family).config, life.engine["mtp"] > 1
    if life.family == "deepseek_v4" or life.form == "f32":
        return config.layout(row="f32", index="f32", has_mtp=has_mtp)
    return config.layout(row=life.form, has_mtp=has_mtp)


def offload_of(life: Life) -> Offload:
    layout = layout_of(life)
    return Offload.create(
        layout,
        slot_bytes=life.chunks * layout.group_count * layout.chunk_bytes,
        host_bytes=life.host_pages * layout.host_page_bytes,
        index_bytes=life.index_pages * layout.index_page_bytes,
        length_max=LENGTH_MAX,
        sequence_max=life.lines,
        query_max=64,
        slot_floor=life.slot_floor,
        lane=ManualLane(seed=life.seed, delay_max=life.delay_max),
        evict=life.evict,
        poison=True,
    )


class World:
    def __init__(self, life: Life) -> None:
        self.life = life
        self.outcome = Outcome()
        self.offload = offload_of(life)
        self.told: list[Told] = []
        settings = EngineConfig(**life.engine, verify_fatal=True)
        text = tokenizer() if life.family == "embedded" else None
        self.engine = Engine(model(life.family), self.offload, settings, tokenizer=text)
        self._held: list[tuple[int, Told]] = []
        vocabulary = model(life.family).config.vocab_size
        self.drafts = Drafts(self._texts, vocabulary=vocabulary, right=life.right, seed=life.seed)
        self._drift: Drift | None = None
        if life.drifts:
            self._drift = Drift(self.engine, seed=life.seed, cuts_chunks=life.form == "f32")
        self.offload._pools.sparse.step += NOW_MAX - FIRST_STEP - life.seed % 40

    def live(self) -> Outcome:
        last = max([TURNS, *(ask.at for ask in self.life.asks)])
        with made_by(self.drafts):
            for turn in range(TURNS_MAX):
                self._begin(turn)
                result = self.engine.step()
                self._note(result)
                if result.is_empty:
                    self.engine._entry.wait()
                self.engine.check()
                self._look()
                if turn > last and self.engine.is_idle and not self._held:
                    return self._settled(turn)
        raise Wrong(f"it goes on behind turn {TURNS_MAX}: {[t.request.state for t in self.told]}")

    def close(self) -> None:
        self.engine.close()
        self.offload.close()

    # ---- what happens

    def _begin(self, turn: int) -> None:
        for ask in self.life.asks:
            if ask.at == turn:
                self._add(ask)
        for hit in self.life.hits:
            if hit.at == turn:
                self._strike(hit, turn)
        if self._drift is not None:
            self._drift.turn()
        for due, told in [*self._held]:
            if due <= turn and self._resumed(told):
                self._held.remove((due, told))

    def _add(self, ask: Ask) -> None:
        leader = None
        for copy in range(1 + ask.more):
            own = msgspec.structs.replace(ask, seed=ask.seed ^ copy)
            expected = self._truth(own)
            asked = wish(own, model(self.life.family).config.vocab_size)
            said = expected.tokens[: min(ask.said, len(expected.tokens) - 1)]
            if leader is not None or asked.prompt_logprobs is not None:
                said = []
            request = self.engine.add(
                lines(self.life.family)[ask.line][: ask.length],
                asked,
                priority=ask.priority,
                salt=SALTS[ask.salt],
                leader=leader,
                prior_output=said,
            )
            leader = leader or request
            self.told.append(Told(own, request, expected))

    def _truth(self, ask: Ask) -> Truth:
        if self.life.form != "f32":
            given = msgspec.structs.replace(ask, at=0), self.life.form
            return alone(self.life.family, *given, self.life.engine["chunk_tokens"])
        family = self.life.family
        return truth(family, ask.line, ask.length, ask.tokens, ask.wish, ask.seed)

    def _strike(self, hit: Hit, turn: int) -> None:
        going = [told for told in self.told if told.request.reason is None]
        running = [t for t in going if t.request.state in ("prefilling", "decoding")]
        self.outcome.seen[hit.what] += 1
        match hit.what:
            case "cancel" if going:
                told = going[hit.which % len(going)]
                self.engine.cancel(told.request)
                told.is_cancelled = True
            case "preempt" if running:
                told = running[hit.which % len(running)]
                self.engine.preempt(told.request)
                self._held.append((turn + hit.size, told))
            case "forget" if self.engine.is_idle and not self._held:
                self.engine.forget_prefixes()
            case "verify":
                self._verify()
            case "rebalance":
                self.engine._learn(0)
                self.offload.rebalance()

    def _resumed(self, told: Told) -> bool:
        if told.request.state != "preempted":
            return True
        try:
            self.engine.resume(told.request)
        except PoolFull:
            return False
        return True

    # ---- what must hold

    def _note(self, result: StepResult) -> None:
        of = {told.request: told for told in self.told}
        for made in result.made:
            if made.request in of:
                of[made.request].chances += made.chances
                of[made.request].said += made.tokens
        for chunk, scored in zip(result.chunks, result.scored, strict=True):
            if chunk.request in of:
                of[chunk.request].scored += scored
        for request, told in of.items():
            if [*request.prior_output, *told.said] != request.output:
                raise Wrong(f"{told.ask} says {request.output}, and steps {told.said}")
        self.outcome.seen["steps"] += 1
        self.outcome.seen["parts"] += len(result.made)
        self.outcome.seen["steps of three or more"] += len(result.made) >= 3
        self.outcome.seen["tokens"] += sum(len(made.tokens) for made in result.made)

    def _look(self) -> None:
        for told in [*self.told]:
            output = told.request.output
            if output != told.truth.tokens[: len(output)]:
                self._differs(told)

    def _differs(self, told: Told) -> None:
        output, expected = told.request.output, told.truth
        at = next(n for n, token in enumerate(output) if expected.tokens[n : n + 1] != [token])
        if self._is_near(told, at):
            self.outcome.seen["near ties"] += 1
            self.told.remove(told)
            return
        raise Wrong(f"{told.ask} says {output}, not {expected.tokens}: token {at}")

    def _is_near(self, told: Told, at: int) -> bool:
        """Whether a rounding decides what is said."""
        if self.life.form != "f32":
            leads = told.truth.scores[at : at + 1].flatten().tolist()
            return not leads or leads[0] < LEAD
        ask = told.ask
        if ask.wish in OF_TEXT:
            return False
        given = (self.life.family, ask.line, ask.length, ask.tokens, ask.wish, ask.seed)
        return nearest(*given) < TIE

    def _settled(self, turn: int) -> Outcome:
        self.outcome.seen["turns"] = turn
        for told in self.told:
            self._look_at_end(told)
        self.offload.drain()
        self._verify()
        self.outcome.seen["right drafts"] = self.drafts.right_count
        self.outcome.seen["preempted"] = self.engine.preempted_count
        self.outcome.seen["moved"] = self.engine.moved_count
        for mode, count in zip(Mode, self.engine.tuning.mode_counts.sum(axis=0), strict=True):
            self.outcome.seen[f"layers {mode.name}"] = int(count)
        self.engine.forget_prefixes()
        self.offload.check()
        stats = self.offload.stats()
        free = stats.free_host_page_count, stats.free_index_page_count
        if free != (stats.host_page_count, stats.index_page_count) or stats.used_slot_count.any():
            raise Wrong(f"pages or slots leak: {stats}")
        return self.outcome

    def _look_at_end(self, told: Told) -> None:
        request, reason = told.request, told.request.reason
        self.outcome.seen[f"{reason}"] += 1
        self.outcome.seen["cached"] += bool(request.cached_count)
        if told.is_cancelled and reason == "cancelled":
            return
        if reason == "refused" and isinstance(request.refusal, PoolFull):
            self._may_refuse(told)
            return
        if (reason, request.output) != (told.truth.reason, told.truth.tokens):
            raise Wrong(f"{told.ask} ends as {reason}: {request.refusal or request.output}")
        self._look_at_chances(told)

    def _may_refuse(self, told: Told) -> None:
        """Only what could not run alone in these pools."""
        layout = self.offload.layout
        page = 256 if self.life.family == "deepseek_v4" else 64
        pages = -(-(told.request.length_max + 8) // page) + layout.mtp_layer_count
        least = min(self.life.host_pages, self.life.index_pages)
        slots = self.life.chunks * 64
        if pages <= least and self.life.slot_floor <= slots:
            raise Wrong(f"{told.ask} is refused: {told.request.refusal}")

    def _look_at_chances(self, told: Told) -> None:
        """Their count, and where the plain model says them, what they are."""
        scores, length, request = told.truth.scores, told.truth.prompt, told.request
        of_text = told.ask.wish in OF_TEXT
        if request.sampling.logprobs is not None:
            said = len(request.prior_output)
            if len(told.chances) != len(request.output) - said:
                raise Wrong(f"{told.ask}: {len(told.chances)} chances")
            for at, chance in enumerate(told.chances if not of_text else (), said):
                self._close(told, chance, scores[length - 1 + at], request.output[at])
        if request.sampling.prompt_logprobs is not None:
            start = request.sampling.prompt_start
            if len(told.scored) != max(0, length - 1 - start):
                raise Wrong(f"{told.ask}: {len(told.scored)} chances of the prompt")
            for at, chance in enumerate(told.scored if not of_text else (), start):
                self._close(told, chance, scores[at], request.prompt[at + 1])

    def _close(self, told: Told, chance: Chance, scores: Tensor, token: int) -> None:
        far = abs(chance.logprob - float(scores[token])) > CLOSE
        if far and not self._is_near(told, 0):
            raise Wrong(f"{told.ask}: {chance} of {token}, not {float(scores[token])}")

    def _verify(self) -> None:
        for layer in range(self.offload.layout.layer_total):
            if differing := self.offload.verify(layer):
                raise Wrong(f"layer {layer}: slots unlike the host's rows: {differing[:4]}")

    # ---- drafts

    def _texts(self) -> dict[Any, list[int]]:
        return {
            told.request.sequence: told.request.prompt + told.truth.tokens
            for told in self.told
            if told.request.sequence is not None
        }


def live(life: Life) -> Outcome:
    torch.set_num_threads(1)
    world = World(life)
    try:
        return world.live()
    finally:
        world.close()
