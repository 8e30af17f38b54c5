"""Lives of engines whose ranks divide a model, or its experts; each rank is a thread.

    python -m tests.campaign.lives.divided --seeds 100

Requests are those of `lives`, but for grammars and chances of prompts, which such engines refuse.
Each rank's modes change at every turn, each by a seed of its own; where ranks divide the experts so
do the tokens that a step verifies, the batch and the chunks. Every token is compared with an engine
that has one request, no drafts and all rows resident.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import pytest
from torch import Tensor

from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.errors import PoolFull
from tests.campaign.drafts import made_by
from tests.campaign.lives.drift import Drift
from tests.campaign.lives.plan import Ask, drawn_ask
from tests.campaign.lives.truth import wish
from tests.mesh import rig as mesh
from tests.model.test_engine import engine as engine_alone
from tests.ranks import rig as ranks
from tests.support.checkpoints import tokens

TURNS: Final = 40
TURNS_MAX: Final = 1500
RESUME_EVERY: Final = 5
VOCABULARY: Final = 512
LENGTHS: Final = (1, 2, 15, 16, 17, 48, 63, 64, 65, 95, 128, 130, 193)
WISHES: Final = ("greedy", "greedy", "warm", "cut", "penalised", "bound", "ended", "told")
HAPPENINGS: Final = ("cancel", "preempt", "preempt", "forget")
UNCUT: Final = ((1, 2), (2, 1), (2, 2))
"""Ranks of a stage, and stages, for a family of which two layers share a selection."""
SALTS: Final = (b"", b"a tenant")

Told = tuple[list[int], str]


@functools.cache
def line(number: int) -> list[int]:
    """The second is the first for more than a page, then another; one is a single id; the last is
    the first but for the last token of its first page."""
    first, other = (tokens(256, VOCABULARY, seed=seed) for seed in (5, 6))
    near = [*first[:63], first[63] ^ 1, *first[64:]]
    return (first, first[:70] + other, [7] * 256, other, first[1:], near)[number]


@functools.cache
def told(family: str, ask: Ask) -> Told:
    made = engine_alone(family, modes="resident", chunks=8)
    request = made.add(line(ask.line)[: ask.length], wish(ask, VOCABULARY))
    for _ in made.run():
        pass
    return request.output, str(request.reason)


def _alone(ask: Ask) -> Ask:
    return msgspec.structs.replace(ask, at=0, priority=0, salt=0, more=0, said=0)


def _copies(ask: Ask) -> list[Ask]:
    return [msgspec.structs.replace(ask, seed=ask.seed ^ copy) for copy in range(1 + ask.more)]


class Script:
    """What happens to an engine, and what its requests must say."""

    def __init__(self, family: str, seed: int) -> None:
        draw = random.Random(seed)
        self.family, self.seen = family, Counter[str]()
        asks = [drawn_ask(draw, [*LENGTHS], [*WISHES]) for _ in range(draw.randint(0, 5))]
        self.asks = [msgspec.structs.replace(each, at=draw.randrange(TURNS)) for each in asks]
        self._expected = {
            own: told(family, _alone(own)) for ask in self.asks for own in _copies(ask)
        }
        self._hits = [(draw.randrange(TURNS), draw.choice(HAPPENINGS)) for _ in range(5)]
        self._draw = draw
        self._made: list[tuple[Request, Told, Ask]] = []
        self._held: list[Request] = []
        self._cancelled: set[int] = set()

    def play(self, engine: Engine, turn: Callable[[], None]) -> None:
        for number in range(TURNS_MAX):
            self._begin(engine, number)
            turn()
            for request, (said, _), ask in self._made:
                output = request.output
                assert output == said[: len(output)], f"{ask}: {output}, not {said}"
            if number > TURNS and engine.is_idle and not self._held:
                return self._settle(engine)
        raise AssertionError(f"it goes on: {[each.state for each, _, _ in self._made]}")

    def _begin(self, engine: Engine, number: int) -> None:
        for ask in self.asks:
            if ask.at == number:
                self._add(engine, ask)
        for at, what in self._hits:
            if at == number:
                self._strike(engine, what)
        if number % RESUME_EVERY == 0:
            self._held = [each for each in self._held if not self._resumed(engine, each)]

    def texts(self, number: int) -> list[int]:
        """What a request with this number, on any rank, is to say from its prompt on."""
        of = {made.number: made.prompt + said for made, (said, _), _ in self._made}
        return of.get(number, [])

    def _add(self, engine: Engine, ask: Ask) -> None:
        leader = None
        for own in _copies(ask):
            expected = self._expected[own]
            said = expected[0][: min(ask.said, len(expected[0]) - 1)] if leader is None else []
            request = engine.add(
                line(own.line)[: own.length],
                wish(own, VOCABULARY),
                priority=own.priority,
                salt=SALTS[own.salt],
                leader=leader,
                prior_output=said,
            )
            leader = leader or request
            self._made.append((request, expected, own))

    def _strike(self, engine: Engine, what: str) -> None:
        going = [made for made, _, _ in self._made if made.reason is None]
        running = [made for made in going if made.state in ("prefilling", "decoding")]
        self.seen[what] += 1
        match what:
            case "cancel" if going:
                request = self._draw.choice(going)
                engine.cancel(request)
                self._cancelled.add(request.number)
            case "preempt" if running:
                request = self._draw.choice(running)
                engine.preempt(request)
                self._held.append(request)
            case "forget" if engine.is_idle and not self._held:
                engine.forget_prefixes()

    def _resumed(self, engine: Engine, request: Request) -> bool:
        if request.state != "preempted":
            return True
        try:
            engine.resume(request)
        except PoolFull:
            return False
        return True

    def _settle(self, engine: Engine) -> None:
        for request, expected, ask in self._made:
            self.seen[str(request.reason)] += 1
            self.seen["tokens"] += len(request.output)
            self.seen["cached"] += bool(request.cached_count)
            if request.reason == "cancelled" and request.number in self._cancelled:
                continue
            ended = request.output, request.reason
            assert ended == expected, f"{ask}: {ended} {request.refusal}, not {expected}"
        self.seen["preempted"] += engine.preempted_count
        engine.forget_prefixes()


class RightDrafts:
    """Some drafts are right: which, a position says, on all ranks the same."""

    def __init__(self, seed: int, right: float) -> None:
        self._seed, self._right = seed, right
        self._here = threading.local()
        self.right_count = 0

    def here(self, engine: Engine, script: Script) -> None:
        """The engine of this thread."""
        self._here.engine, self._here.script = engine, script

    def guess(self, sequences: Sequence[Any], behind: Sequence[int], guesses: Tensor) -> Tensor:
        roster, script = self._here.engine._roster, self._here.script
        of = {each.sequence: each.number for each in roster.of("decoding")}
        for place, (sequence, first) in enumerate(zip(sequences, behind, strict=True)):
            text = script.texts(of[sequence]) if sequence in of else []
            for at, token in enumerate(text[first : first + guesses.shape[1]], first):
                is_right = random.Random(f"{self._seed} {at}").random() < self._right
                guesses[place, at - first] = token if is_right else (token + 1) % VOCABULARY
                self.right_count += is_right
        return guesses


def settings(draw: random.Random) -> dict[str, Any]:
    return {
        "modes": draw.choice(("layerwise", "none", "da", "dba", "resident")),
        "tbo": draw.choice(("off", "on", 3)),
        "depth": draw.choice((0, 1)),
        "promise": draw.choice(("all", "some")),
        "warm": draw.choice((True, False)),
        "verify_every": draw.choice((0, 1, 3)),
        "verify_fatal": True,
        "chunk_tokens": draw.choice((16, 48, 64, 130)),
        "max_running": draw.choice((2, 5, 16)),
        "query_max": draw.choice((7, 64)),
    }


def live_divided_model(seed: int) -> Counter[str]:
    draw = random.Random(seed)
    family, mtp = draw.choice(("v32", "glm")), draw.choice((1, 2, 4))
    tp, pp = draw.choice(((1, 2), (2, 1), (2, 2), (1, 3)) if family == "v32" else UNCUT)
    shape = mesh.Shape(
        family=family,
        tp=tp,
        pp=pp,
        mtp=mtp,
        chunks=draw.choice((1, 2, 6)),
        index_pages=draw.choice((None, 8, 12)),
    )
    script, drafts = Script(family, seed), RightDrafts(seed, draw.choice((0.0, 0.5, 0.9)))
    made_in_rig = mesh.engine

    def made(shape: Any, group: Any, **config: Any) -> Any:
        engine = made_in_rig(shape, group, **config)
        Drift(engine, seed=seed + group.rank, cuts_chunks=False)
        drafts.here(engine, script)
        return engine

    def act(lead: Any) -> None:
        def turn() -> None:
            lead.step()
            lead.check()

        script.play(lead, turn)

    with pytest.MonkeyPatch.context() as patch, made_by(drafts):
        patch.setattr(mesh, "engine", made)
        mesh.run_mesh(shape, act, **settings(draw))
    return script.seen + Counter({"right drafts": drafts.right_count, f"tp {tp} pp {pp}": 1})


def live_divided_experts(seed: int) -> Counter[str]:
    draw = random.Random(seed)
    family, size = draw.choice(("v32", "glm")), draw.choice((2, 2, 4))
    scripts = [Script(family, 10 * seed + rank) for rank in range(size)]
    drafts = RightDrafts(seed, draw.choice((0.0, 0.5, 0.9)))
    orders = ("off", "combine-down", "combine-shared", "dispatch-shared")

    class Drifting(ranks.Rank):
        def run(self, tasks: Any) -> ranks.Rank:
            [script] = tasks
            drift = Drift(self.engine, seed=seed + scripts.index(script), cuts_chunks=True)
            drafts.here(self.engine, script)

            def turn() -> None:
                drift.turn()
                self._turn()

            script.play(self.engine, turn)
            self.engine.close()
            self._check_pools()
            return self

    with pytest.MonkeyPatch.context() as patch, made_by(drafts):
        patch.setattr(ranks, "Rank", Drifting)
        ranks.run_ranks(
            family,
            [(script,) for script in scripts],
            mtp=draw.choice((1, 2, 4)),
            chunks=draw.choice((1, 2, 6)),
            index_pages=draw.choice((None, 8, 12)),
            is_fixed=False,
            sbo=draw.choice(orders),
            **settings(draw),
        )
    seen = sum((script.seen for script in scripts), Counter[str]())
    return seen + Counter({"right drafts": drafts.right_count, f"{size} ranks": 1})


def live(seed: int) -> Counter[str]:
    return (live_divided_model, live_divided_experts)[seed % 2](seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    began_s, seen, failed = time.monotonic(), Counter[str](), 0
    for seed in range(asked.first, asked.first + asked.seeds):
        try:
            seen += live(seed)
        except Exception:  # a campaign reports any failure and goes on
            failed += 1
            traceback.print_exc()
            print(f"seed {seed} fails", flush=True)
    print(*(f"{name} {count:,}" for name, count in seen.most_common()), sep=", ")
    print(f"{asked.seeds:,} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
