"""The steps under way: launched at a pace, and not yet learned by the host.

enter --> launch, launch, ... --> leave        of a request
             `-- learn --'                     of a step, the oldest first
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from ess.clock import Clock
from ess.engine import scheduler, tpot_control
from ess.engine.config import EngineConfig
from ess.engine.graphs.buckets import bucket_sizes, graph_count
from ess.engine.graphs.rehearsal import Progress, Rehearsal
from ess.engine.graphs.replays import Replays
from ess.engine.plan import StepPlan, Turn
from ess.engine.process.messages import GraphLine
from ess.engine.ranks.agreement import Ranks, StepNeeds
from ess.engine.requests.request import Request
from ess.engine.requests.roster import Roster
from ess.engine.step.decode import Flight, Launcher
from ess.engine.step.feeding import Future, Outcome
from ess.engine.step.laps import laps_of
from ess.engine.step.runner import Runner, pack_weights
from ess.engine.step.underway.audit import check_flights
from ess.engine.step.underway.device_future import DeviceFuture
from ess.engine.step.underway.future import FutureMap, depth_reasons
from ess.engine.step.warmth import Warmth
from ess.engine.step.way import Way
from ess.engine.step_bytes import positions_max
from ess.engine.tpot_control import Limits, SeenStep, drafts_of
from ess.units import counted, format_bytes


class Flights:
    """Counts for each request the steps under way that it is in, and what they may make. `pace`
    says how many requests run, and how many tokens of each a step verifies."""

    def __init__(
        self, runner: Runner, config: EngineConfig, *, clock: Clock, ranks: Ranks, way: Way
    ) -> None:
        self.warmth = Warmth()
        self.pace = tpot_control.start(
            target_ms=config.tpot_ms or None,
            verified_max=config.mtp,
            batch_max=config.max_running,
            chunk_max=config.chunk_tokens,
        )
        self._runner = runner
        self._config = config
        self._clock = clock
        self._ranks = ranks
        self._laps = laps_of(runner.model.device, clock)
        self._future = future_of(runner, verified_max=config.mtp)
        self.replays = replays_of(runner, config)
        self._launcher = Launcher(runner, self._future, self.replays, ranks, way)
        self._flights: deque[Flight] = deque()
        self._positions_max = positions_max(
            runner.offload.sizes.length_max, on_device=runner.model.device.type != "cpu"
        )

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def limits(self) -> Limits:
        """Those of the pace, or of rank 0's where several ranks are one engine."""
        return self._ranks.limits(self.pace.limits)

    def enter(self, request: Request) -> None:
        """The request's next step begins at its last token."""
        assert request.sequence is not None, f"request {request.number} has no rows"
        self._future.stash(request.sequence.line, [request.tokens[-1]])

    def leave(self, request: Request) -> None:
        """No step will be launched for it, unless it enters again."""
        assert request.sequence is not None, f"request {request.number} has no rows"
        assert request.flight_count == 0, f"request {request.number} is in a step under way"
        if request.sequence.line >= 0:
            self._future.forget(request.sequence.line)

    def launch(self, roster: Roster[Request]) -> StepPlan:
        """Plans a step, in which all ranks then meet, and launches what decodes of it. Its chunks
        are for the caller to run; without any, `stand_by_prompts`. PoolFull if there are no pages
        for the positions that the turns may reach: then nothing has changed and no rank was met.
        """
        limits = self.limits
        plan = scheduler.plan(
            roster,
            batch_max=self._config.max_running,
            query_max=self._config.query_max,
            verified_max=limits.verified,
            chunk_tokens=limits.chunk,
            positions_max=self._positions_max,
        )
        chunk_tokens = sum(chunk.count for chunk in plan.chunks)
        if plan.turns:
            self._launch(plan.turns, chunk_tokens, limits.verified)
        else:
            self.stand_by(StepNeeds(chunk_tokens=chunk_tokens))
        return plan

    def stand_by(self, brought: StepNeeds) -> None:
        """Meets the other ranks without turns, and joins the exchanges of what they decode."""
        assert not brought.token_count, "a rank with turns launches them"
        agreement = self._ranks.meet(brought)
        if not agreement.decodes:
            return
        if self.replays is None:
            self._runner.standby.decode(agreement)
        else:
            self.replays.stand_by(agreement)

    def stand_by_prompts(self) -> None:
        """The same for prompt chunks of the others."""
        if self._ranks.latest.has_chunks:
            has_mtp = self._runner.offload.layout.mtp_layer_count > 0
            self._runner.standby.prompts(has_mtp=has_mtp)

    def _launch(self, turns: tuple[Turn, ...], chunk_tokens: int, verified_count: int) -> None:
        assert len(self._flights) <= self._config.depth, "a step is launched too early"
        draft_count = drafts_of(verified_count, self._config.mtp)
        flight = self._launcher.launch(
            turns,
            brought=StepNeeds(draft_count=draft_count, chunk_tokens=chunk_tokens),
            lap=self._laps(),
            fit=None if self.replays is None else self.replays.fit(turns, verified_count),
        )
        self._flights.append(flight)
        for turn in turns:
            turn.request.flight_count += 1
            turn.request.ahead_count += turn.query_count
            turn.request.draft_count = flight.draft_count

    def have_landed(self) -> bool:
        """Whether the results of the oldest step are on the host."""
        return self._future.has_landed()

    def learn(self) -> tuple[Outcome, ...]:
        """Takes the results of the oldest step; its time goes into the pace."""
        flight = self._flights.popleft()
        outcomes = self._launcher.learn(flight)
        self._runner.verifier.learned(flight.step.number)
        self.warmth.stepped(flight.turns, flight.step.firsts, flight.rows)
        for outcome in outcomes:
            request = outcome.feed.request
            request.flight_count -= 1
            request.ahead_count -= len(outcome.feed.tokens)
            assert 0 <= request.flight_count <= request.ahead_count, f"request {request.number}"
        if self._config.is_paced:
            self.observe(flight.seen([outcome.verified for outcome in outcomes]))
        return outcomes

    def rehearse(self, tell: Callable[[str], None]) -> None:
        """Packs the weights; captures the usual steps, as far as graphs have room, and reports
        progress to `tell`. Ranks meet in each of these steps; a rank that has done its part stands
        by until all ranks have."""
        assert not self._flights, "a step is under way"
        runner, started_s = self._runner, self._clock.now_s()
        pack_weights(runner.model, runner.offload.layout, runner.ops)
        self._ranks.counts = False
        left_bytes = 0
        if self.replays is not None:
            left_bytes = self.replays.left_bytes
            most = counted(max(self.replays.sizes, default=0), "request")
            tell(f"graphs of steps: up to {most} a step")
        with runner.tuning.uncounted(), runner.verifier.off():
            for part in self._parts_of_rehearsal(Progress(self._clock, tell)):
                part()
                self._stand_by_until_quiet()
        if self.replays is not None:
            self.replays.rehearsed()
            runner.offload.drain()
            made, size = self.replays.captured_count, format_bytes(self.replays.byte_count)
            seconds = self._clock.now_s() - started_s
            taken = format_bytes(max(0, left_bytes - self.replays.left_bytes))
            how = f"{size} as estimated, {taken} less are free"
            tell(f"graphs of steps: {made} captured in {seconds:.1f} s, {how}")
        self._ranks.counts = True

    def _parts_of_rehearsal(self, ran: Progress) -> Sequence[Callable[[], None]]:
        """The parts of a rehearsal; every rank has the same number."""
        if self.replays is None:
            return ()
        verified, expert_ranks = self.pace.verified_count, self._runner.model.expert_ranks
        rehearsal = Rehearsal(
            launcher=self._launcher,
            replays=self.replays,
            width=verified,
            draft_count=drafts_of(verified, self._config.mtp),
            ran=ran,
        )
        return rehearsal.parts(None if expert_ranks is None else expert_ranks.team.rank)

    def _stand_by_until_quiet(self) -> None:
        while self._ranks.rest_s < math.inf:
            self.stand_by(StepNeeds())
            if self._ranks.latest.is_quiet:
                return

    def depth_reasons(self, roster: Roster[Request]) -> tuple[str, ...]:
        on_device = self._runner.model.device.type != "cpu"
        return depth_reasons(roster.of("decoding"), on_device=on_device)

    def depth(self, roster: Roster[Request]) -> int:
        return 0 if self.depth_reasons(roster) else self._config.depth

    def graph_line(self) -> GraphLine | None:
        return None if self.replays is None else self.replays.line()

    def close(self) -> None:
        if self.replays is not None:
            self.replays.close()

    def observe(self, seen: SeenStep) -> None:
        if self._config.is_paced:
            self.pace = tpot_control.advance(self.pace, seen)

    def check(self, roster: Roster[Request]) -> None:
        assert len(self) <= self._config.depth, f"{len(self)} steps are under way"
        self._future.check()
        if self.replays is not None:
            self.replays.check()
        check_flights(self._flights, self._future, roster)


def future_of(runner: Runner, *, verified_max: int) -> Future:
    """Where the tokens lie that a step hands to the next: with the weights."""
    sizes, device = runner.offload.sizes, runner.model.device
    if device.type == "cpu":
        return FutureMap(line_max=sizes.sequence_max, token_max=verified_max)
    return DeviceFuture(sizes, token_max=verified_max, device=device)


def replays_of(runner: Runner, config: EngineConfig) -> Replays | None:
    """None where no step runs as a graph."""
    if runner.model.device.type == "cpu" or not config.graphs:
        return None
    offload = runner.offload
    largest = min(config.max_running, offload.sizes.sequence_max)
    sizes = bucket_sizes(config.graph_sizes, largest=largest, splits=config.tbo != "off")
    return Replays(
        runner,
        sizes=sizes,
        verified_max=config.mtp,
        graph_max=graph_count(config.graphs, sizes, verified_max=config.mtp),
        byte_max=config.graph_byte_max,
        beside_bytes=config.beside_bytes,
    )
