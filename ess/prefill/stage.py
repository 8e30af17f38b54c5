"""One stage: a part of the model, the rows of its layers, and the handoffs of these rows.

A stage obeys orders, in the caller's thread. Events of a handoff are reported and change no pool:
the rows stay until the lead, which has reports from all stages, orders Close. Pages from disk count
when the lead orders Load.

On a device a micro-batch is queued layer by layer, and its state leaves when its last layer is
queued: a link orders the send behind what makes the state. It has landed when the device has made
all of it and the host has its rows: so what it took is the host's time.

A micro-batch that ends no prompt may land later than it is obeyed: when the first layer of the next
one is queued, so that the device has work while the host takes the last rows and reports. Only the
rows of its last layer are then missing on the host. Why nothing sees that:
- A chunk copies a layer's rows of its own prompt from the host when the layer before is queued, its
  first two layers at once. So a stage of one or two layers lets a chunk land before the next one of
  the same prompt is queued; in any other stage it has landed long before its last layer's turn.
- All other orders but Text, which changes no pool, find it landed: what is published, free, closed
  or opened does not depend on whether the next micro-batch was here in time. Stages must agree on
  that.
- What the device reads, the state from the stage before too, is kept until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ess.clock import Clock
from ess.door import Sequence as Opened
from ess.door.handoff.endings import Lapsed, Sent
from ess.door.handoff.outgoing.pages import StagePages
from ess.door.handoff.port import Port
from ess.engine.prompt.pack import Span
from ess.engine.prompt.run import Hooks, Queued
from ess.engine.step.runner import Runner
from ess.engine.step_bytes import SIDES
from ess.errors import BadInput, EssError, PoolFull
from ess.prefill.orders import (
    Close,
    Enter,
    Forget,
    GiveUp,
    Load,
    Meet,
    Open,
    Order,
    Part,
    Profile,
    Run,
    Stop,
    Text,
)
from ess.prefill.reports import Counted, Free, Hello, Ran, Released, Report
from ess.prefill.team import OneRank, Ranks
from ess.transfer.messages import Reason

PROFILE_SALT: Final = b"\xffprofile"
LAYERS_AT_ONCE: Final = SIDES
"""How many layers' rows a chunk copies from the host when it begins."""


class Disagreement(EssError):
    """This stage cannot obey an order that the lead has obeyed: the group must end."""


@dataclass(slots=True, eq=False)
class Held:
    """A prompt with rows here. It has entered when it is on the device and its handoff has begun:
    at once, or after its pages came from disk, whose count the lead must know. It is free when
    it is complete and no handoff reads it any more."""

    number: int
    uid: int
    sequence: Opened
    has_entered: bool = True
    is_counted: bool = True
    is_made: bool = False
    is_free: bool = False
    outcome: Sent | Lapsed | None = None

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens

    def released(self) -> Released:
        match self.outcome:
            case Lapsed(_, reason, sentence):
                return Released(self.number, reason, sentence)
        return Released(self.number, Reason.DONE)


@dataclass(frozen=True, slots=True, eq=False)
class Underway:
    """A micro-batch that is queued and has not landed. `leaving_s` it waited for the next stage."""

    order: Run
    helds: dict[int, Held]
    queued: Queued
    began_s: float
    leaving_s: float

    @property
    def parts(self) -> list[Part]:
        return [part for part in self.order.parts if part.stop > part.start]

    @property
    def ends_prompts(self) -> bool:
        return any(part.is_last for part in self.order.parts)


def ignore(*_: Tensor) -> None:
    """Does nothing: the default of `between` and `leaves`."""


class Stage:
    """`between` is called between layers, `leaves` with the state of each micro-batch for the next
    stage, which does not change any more; `ranks` are its team, if it has one."""

    def __init__(
        self,
        runner: Runner,
        *,
        port: Port | None,
        clock: Clock,
        between: Callable[[], None] = ignore,
        leaves: Callable[[Tensor], None] = ignore,
        ranks: Ranks | None = None,
    ) -> None:
        self.runner = runner
        self.ranks = OneRank(runner) if ranks is None else ranks
        self.offload = runner.offload
        self.port = port
        self.between = between
        self.leaves = leaves
        self._clock = clock
        self._leaving_s = self._landed_s = 0.0
        self._underway: Underway | None = None
        self._texts: dict[int, list[int]] = {}
        self._held: dict[int, Held] = {}
        self._freed: list[Held] = []
        self._ran: list[Ran] = []
        self.is_stopped = False

    @property
    def is_busy(self) -> bool:
        """Whether handoffs or a micro-batch are under way: then `pump` should come soon."""
        if self._freed or self._underway is not None:
            return True
        is_loading = any(not held.is_counted for held in self._held.values())
        return is_loading or (self.port is not None and self.port.is_busy)

    def hello(self, model: bytes) -> Hello:
        layout, stats = self.offload.layout, self.offload.stats()
        return Hello(
            first_layer=layout.first_layer,
            stop_layer=layout.first_layer + layout.layer_count,
            host_pages=stats.host_page_count,
            index_pages=stats.index_page_count,
            model=model,
            metadata=b"" if self.port is None else self.port.metadata(),
        )

    def free(self) -> Free:
        pools = self.offload.owner.pools
        latent = pools.latent
        return Free(
            host_pages=latent.pages.free_count,
            index_pages=pools.index.pages.free_count,
            idle_pages=latent.prefix.idle_count,
            lines=pools.tables.free_count,
        )

    # ---- orders

    @torch.inference_mode()
    def obey(self, order: Order, hidden: Tensor | None = None) -> None:
        """`hidden` is the previous stage's output for a micro-batch."""
        if not isinstance(order, Text | Run):
            self._land_run()
        match order:
            case Text(number, tokens):
                self._texts.setdefault(number, []).extend(tokens)
            case Open():
                self._open_alike(order)
            case Load(number, page_count):
                self._land(self._held_of(number), page_count)
            case Enter(number):
                self._enter_alike(self._held_of(number))
            case Run():
                self._run(order, hidden)
            case GiveUp(number):
                self._give_up(self._held_of(number))
            case Close(number):
                self._close(self._held_of(number))
            case Meet(metadata):
                self._meet(metadata)
            case Forget():
                self.offload.forget_prefixes()
            case Profile():
                self._profile(order, hidden)
            case Stop():
                self.is_stopped = True
                self.between = self.leaves = ignore  # they are of the stage's owner
                self.ranks.stop()

    def open(
        self, number: int, tokens: Sequence[int], *, uid: int, salt: bytes, load_max: int = 0
    ) -> int:
        """Opens a prompt; returns how many rows are cached. With `load_max` pages come from disk,
        and the prompt enters afterwards. Where it raises, nothing has changed."""
        assert number not in self._held, f"prompt {number} was opened twice"
        self._land_run()
        opened = self.offload.open(
            tokens, length_max=len(tokens), salt=salt, load_max=load_max or None
        )
        held = Held(number, uid, opened, has_entered=not load_max, is_counted=not load_max)
        if held.has_entered:
            self._offer(held, undo=opened.close)
        self._held[number] = held
        return opened.cached_count

    def enter(self, number: int) -> None:
        """Enters a prompt that has loaded. Where it raises, nothing has changed."""
        held = self._held_of(number)
        self._land_run()
        held.sequence.resume()
        self._offer(held, undo=held.sequence.preempt)
        held.has_entered = True

    def _offer(self, held: Held, *, undo: Callable[[], None]) -> None:
        if self.port is None:
            return
        sequence, tokens = held.sequence, held.tokens
        with ExitStack() as undoing:
            undoing.callback(undo)
            pages = StagePages(
                sequence, token_count=len(tokens) - 1, on_close=lambda: self._freed_of(held)
            )
            self.port.sender.offer_pages(held.uid, pages, prompt=tokens, salt=sequence.salt)
            undoing.pop_all()

    def _land(self, held: Held, page_count: int) -> None:
        came_count = held.sequence.loaded_count
        if not held.is_counted or came_count is None or came_count < page_count:
            raise Disagreement(
                f"prompt {held.number}: {came_count} pages have come from the disk here, "
                f"{page_count} are to count"
            )
        held.sequence.land(page_count)

    def _enter_alike(self, held: Held) -> None:
        try:
            self.enter(held.number)
        except (BadInput, PoolFull) as error:
            raise Disagreement(f"prompt {held.number} has entered, and here: {error}") from None

    def _open_alike(self, order: Open) -> None:
        tokens = [*self._texts.pop(order.number, ()), *order.tokens]
        try:
            count = self.open(
                order.number, tokens, uid=order.uid, salt=order.salt, load_max=order.load_max
            )
        except (BadInput, PoolFull) as error:
            raise Disagreement(f"prompt {order.number} was admitted, and here: {error}") from None
        if count != order.cached_count:
            raise Disagreement(
                f"prompt {order.number}: {count} rows are cached here, {order.cached_count} there"
            )

    def _meet(self, metadata: bytes) -> None:
        """A worker that cannot connect here gets no rows from here; its own deadlines tell it."""
        if self.port is not None:
            try:
                self.port.meet(metadata)
            except EssError:
                return

    def _held_of(self, number: int) -> Held:
        if number not in self._held:
            raise Disagreement(f"prompt {number} is not open here")
        return self._held[number]

    # ---- chunks

    def _run(self, order: Run, given: Tensor | None) -> None:
        began_s, self._leaving_s = self._clock.now_s(), 0.0
        helds = {part.number: self._held_of(part.number) for part in order.parts}
        parts = [part for part in order.parts if part.stop > part.start]
        if not parts or not self._may_be_behind(helds):
            self._land_run()
        if not parts:
            self._end_prompts(order, helds, {})
            self._report_run(order.batch, began_s, 0.0)
            return
        self._check_given(given, order.token_count)
        queued = self.ranks.queue_part(
            [_span(helds[part.number], part) for part in parts],
            given=given,
            hooks=Hooks(
                on_layer=self._while_made([(helds[p.number].uid, p.stop) for p in parts]),
                begun=self._land_run,
                leaves=self._leave,
            ),
        )
        self._underway = Underway(order, helds, queued, began_s, self._leaving_s)
        if self._underway.ends_prompts or not self.ranks.may_go_on:
            self._land_run()

    def _may_be_behind(self, helds: Mapping[int, Held]) -> bool:
        """Whether a micro-batch of these prompts may be queued while one is under way."""
        if self._underway is None or not self._underway.helds.keys() & helds.keys():
            return True
        return self.offload.layout.layer_total > LAYERS_AT_ONCE

    def _land_run(self) -> None:
        """Waits for the micro-batch that is under way, if there is one."""
        underway, self._underway = self._underway, None
        if underway is None:
            return
        windows: dict[int, Tensor] = {}
        if underway.ends_prompts or not self.ranks.may_go_on:
            pairs = zip(underway.parts, underway.queued.made(), strict=True)
            windows = {part.number: made.windows for part, made in pairs}
        else:
            underway.queued.land()
        self._end_prompts(underway.order, underway.helds, windows)
        self._report_run(underway.order.batch, underway.began_s, underway.leaving_s)

    def _end_prompts(
        self, order: Run, helds: Mapping[int, Held], windows: Mapping[int, Tensor]
    ) -> None:
        for part in order.parts:
            if part.is_last:
                self._finish(helds[part.number], windows.get(part.number))

    def _leave(self, hidden: Tensor) -> None:
        """Waiting for the next stage does not count as this stage's work."""
        if not self.runner.model.is_last:
            began_s = self._clock.now_s()
            self.leaves(hidden)
            self._leaving_s = self._clock.now_s() - began_s

    def _report_run(self, batch: int, began_s: float, leaving_s: float) -> None:
        """The time of a micro-batch that was queued earlier begins when the micro-batch before it
        has landed."""
        began_s, self._landed_s = max(began_s, self._landed_s), self._clock.now_s()
        self._ran.append(Ran(batch, max(0.0, self._landed_s - began_s - leaving_s)))

    def _check_given(self, given: Tensor | None, count: int) -> None:
        model = self.runner.model
        shape = None if given is None else (tuple(given.shape), given.dtype, given.device)
        size = self.ranks.own_count(count), model.config.residual_dim
        wanted = (size, torch.float32, model.device)
        if shape != (None if model.is_first else wanted):
            raise Disagreement(f"a batch of {count} tokens came with a state of {shape}")

    def _while_made(self, given: Sequence[tuple[int, int]]) -> Callable[[int], None]:
        """The function to call with each layer whose rows, up to these positions, are stored."""

        def stored(layer: int) -> None:
            if self.port is not None:
                for uid, stop in given:
                    self.port.sender.made(uid, layer, stop)
                self.port.pump()
            self.between()

        return stored

    def _profile(self, order: Profile, given: Tensor | None) -> None:
        self._check_given(given, order.count)
        vocabulary = self.runner.model.config.vocab_size
        tokens = [(7 * i + order.count) % vocabulary for i in range(order.count + 1)]
        opened = self.offload.open(tokens, length_max=len(tokens), salt=PROFILE_SALT)
        began_s, self._leaving_s = self._clock.now_s(), 0.0
        span = Span(sequence=opened, start=0, tokens=tokens[:-1], following=tokens[1:])
        hooks = Hooks(on_layer=lambda _: self.between(), leaves=self._leave)
        try:
            self.ranks.queue_part([span], given=given, hooks=hooks).made()
        finally:
            opened.discard()
        self._report_run(order.batch, began_s, self._leaving_s)

    # ---- the end of a prompt

    def _finish(self, held: Held, windows: Tensor | None) -> None:
        """The prompt is complete: frees its device pages; its full pages may be reused."""
        assert not held.is_made, f"prompt {held.number} was made before"
        held.is_made = True
        if self.port is None:
            held.sequence.preempt()
            self._freed_of(held)
        else:
            self.port.sender.finish(held.uid, None if windows is None else windows.numpy())
        assert held.sequence.state == "preempted", f"prompt {held.number} is on the device"

    def _freed_of(self, held: Held) -> None:
        assert held.is_made, f"prompt {held.number} is let go of before it is made"
        assert not held.is_free, f"prompt {held.number} is let go of twice"
        held.is_free = True
        self._freed.append(held)

    def _give_up(self, held: Held) -> None:
        if self.port is not None and held.has_entered:
            self.port.sender.give_up(held.uid)
        if not held.is_made:
            held.sequence.land(0)
            held.sequence.close()
            del self._held[held.number]

    def _close(self, held: Held) -> None:
        if not held.is_free:
            raise Disagreement(f"prompt {held.number} is to be closed, and its rows are read")
        held.sequence.close()
        del self._held[held.number]

    def pump(self) -> list[Report]:
        """Moves handoffs on; returns the reports for the lead."""
        self.ranks.rest()
        if self._underway is not None and self._underway.queued.has_landed:
            self._land_run()
        if self.port is not None:
            self.port.pump()
            helds = {held.uid: held for held in self._held.values()}
            for outcome in self.port.sender.outcomes():
                if outcome.uid in helds:
                    helds[outcome.uid].outcome = outcome
        freed, self._freed = self._freed, []
        return [*self.ran(), *self._counted(), *(held.released() for held in freed)]

    def ran(self) -> list[Report]:
        """Takes the reports of micro-batches that have landed."""
        ran, self._ran = list[Report](self._ran), []
        return ran

    def _counted(self) -> list[Report]:
        """Reports prompts whose pages have come from disk since the last call."""
        counted: list[Report] = []
        for held in self._held.values():
            if not held.is_counted and (count := held.sequence.loaded_count) is not None:
                held.is_counted = True
                counted.append(Counted(held.number, count))
        return counted

    def check(self) -> None:
        self.offload.check()
        assert self._underway is None or not self._underway.ends_prompts, "an end has not landed"
        if self.port is not None:
            self.port.check()
        for number, held in self._held.items():
            assert held.number == number, f"prompt {held.number} is held as {number}"
            wanted = "preempted" if held.is_made or not held.has_entered else "active"
            assert held.sequence.state == wanted, f"prompt {number} is {held.sequence.state}"
            assert held.is_made or not held.is_free, f"prompt {number} is free before it is made"
            assert held.is_counted or not held.has_entered, f"prompt {number} enters too early"
        assert all(self._held.get(held.number) is held for held in self._freed), "closed too early"


def _span(held: Held, part: Part) -> Span:
    return Span(
        sequence=held.sequence,
        start=part.start,
        tokens=held.tokens[part.start : part.stop],
        following=held.tokens[part.start + 1 : part.stop + 1],
    )
