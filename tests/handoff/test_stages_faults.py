"""Whatever the networks and workers of a group do, a prompt lands bit for bit or not at all."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from ess.door import Sequence as Opened
from ess.door.handoff.endings import Landed
from ess.transfer.runs import Region
from ess.transfer.transport import Transport
from ess.transfer.transports.faulty import Fault, FaultyTransport
from tests.handoff.receiving import content
from tests.handoff.tier import TOKENS, UID, Stage, Tier, tier, windows_of
from tests.support.few import few
from tests.support.manual_clock import ManualClock

FAULTS = [fault for fault in Fault if fault is not Fault.CUT]
UIDS = (1, 2, 3)
ODDS = {"act": 60, "pump": 40, "want": 3, "drop": 0.3, "end": 0.3, "kill": 0.3}


def unreliable(odds: dict[Fault, float], *, only: int | None = None, seed: int = 0) -> Callable:
    def wrapped(inner: Transport, clock: ManualClock, number: int) -> Transport:
        if only not in (None, number):
            return inner
        scratch = Region(99, np.zeros(1 << 20, np.uint8))
        inner.register([scratch])
        return FaultyTransport(inner, clock=clock, odds=odds, scratch=scratch, seed=seed + number)

    return wrapped


@pytest.mark.parametrize("kind", ["inprocess", "unguarded"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_leg_is_bad_and_the_prompt_lands(kind: str, fault: Fault) -> None:
    wrap = unreliable({fault: 0.4}, only=1, seed=7)
    with tier(kind, "four", wrap=wrap, lease_s=200.0, wait_s=60.0) as made:
        sequence = made.want()
        made.give()
        made.turn(lambda: bool(made.came), advance_s=0.1)
        assert isinstance(made.came[0], Landed), made.came
        assert content(sequence) == made.expected()
        assert made.stages[1].transport.injected[fault] > 0
        made.check()


def text_of(uid: int) -> tuple[int, ...]:
    return (uid, *TOKENS[1:])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["inprocess", "tcp", "shared", "unguarded"])
def test_over_bad_networks_all_lands_or_nothing_does(kind: str, seed: int) -> None:
    wrap = unreliable(dict.fromkeys(FAULTS, 0.05), seed=10 * seed)
    with tier(kind, "two wide", wrap=wrap, lease_s=200.0, wait_s=60.0) as made:
        opened = {uid: made.want(uid, text_of(uid)) for uid in UIDS}
        for uid in UIDS:
            made.give(uid, text_of(uid))
        made.turn(lambda: len(made.came) == len(UIDS), advance_s=0.1)
        for outcome in made.came:
            sequence = opened[outcome.uid]
            if isinstance(outcome, Landed):
                assert content(sequence) == made.expected(text_of(outcome.uid))
            else:
                assert made.is_blank(sequence)
        assert sum(sum(stage.transport.injected.values()) for stage in made.stages) > 3
        made.check()
        if kind in ("inprocess", "unguarded"):
            assert made.port.counts.landed_count == len(UIDS), made.came


class Script:
    """What a stage does with a prompt, in its own order; `next` does one thing."""

    def __init__(self, stage: Stage, uid: int, made: Tier, draw: random.Random) -> None:
        text = text_of(uid)
        cuts = sorted({0, 299, *draw.sample(range(1, 299), 2)})
        self.stage, self.uid = stage, uid
        self.acts: list[Callable[[], object]] = [lambda: stage.offer(uid, text)]
        for first, stop in pairwise(cuts):
            for layer in range(stage.part.layer_total):
                layers = range(layer, layer + 1)
                self.acts.append(
                    lambda a=first, b=stop, of=layers: stage.made(uid, a, b, layers=of)
                )
        self.acts.append(lambda: stage.finish(uid, windows_of(text, made.layout)))

    def next(self) -> None:
        act = self.acts.pop(0)
        if self.stage.is_alive:
            act()

    def give_up(self) -> None:
        """The stage makes no more of it, and closes what is not the sender's yet."""
        sequence = self.stage.opened.get(self.uid)
        if not self.stage.is_alive or sequence is None or sequence.state != "active":
            return
        self.stage.port.sender.give_up(self.uid)
        self.acts.clear()
        self.stage.close(self.uid)


@pytest.mark.parametrize("seed", few(range(10), all_of=range(40)))
@pytest.mark.parametrize("kind", ["inprocess", "unguarded"])
def test_any_interleaving_of_stages_endings_and_losses(kind: str, seed: int) -> None:
    """Stages make prompts, pump and die in any order, either side gives up: what lands is right,
    what does not leaves no mark, and every page, place and ticket is free at the end."""
    draw = random.Random(seed)
    with tier(kind, draw.choice(["two", "two wide", "four"]), wait_s=20.0, lease_s=20.0) as made:
        free = made.free_count
        opened: dict[int, Opened] = {}
        scripts = [Script(stage, uid, made, draw) for stage in made.stages for uid in UIDS]
        wanted = list(UIDS)
        while scripts or wanted:
            match draw.choices([*ODDS], [*ODDS.values()])[0]:
                case "act" if scripts:
                    draw.choice(scripts).next()
                case "pump":
                    draw.choice([made, *made.stages]).pump()
                case "want" if wanted and made.port.peers():
                    uid = wanted.pop()
                    opened[uid] = made.want(uid, text_of(uid))
                case "drop" if opened:
                    made.port.receiver.give_up(draw.choice(list(opened)))
                case "end" if scripts:
                    draw.choice(scripts).give_up()
                case "kill" if seed % 4 == 0:
                    draw.choice(made.stages).kill()
            if not made.port.peers():
                wanted.clear()
            scripts = [script for script in scripts if script.acts]
            made.clock.advance(draw.choice([0.0, 0.0, 0.05]))
        made.turn(lambda: made.is_idle, advance_s=0.5)
        settled(made, opened, free)


def settled(made: Tier, opened: dict[int, Opened], free: int) -> None:
    """Every prompt has at most one outcome, and is what that says."""
    came = {outcome.uid: outcome for outcome in made.came}
    assert len(came) == len(made.came)
    assert came.keys() <= opened.keys()
    for uid, sequence in opened.items():
        if isinstance(came.get(uid), Landed):
            assert content(sequence) == made.expected(text_of(uid))
        elif sequence.length == sequence.cached_count:
            assert made.is_blank(sequence)
        else:
            assert uid not in came, "it was given up after it had landed"
    for sequence in opened.values():
        sequence.close()
    made.offload.forget_prefixes()
    assert made.free_count == free
    for stage in made.stages:
        if stage.is_alive:
            kept = sorted(u for u, s in stage.opened.items() if s.state == "preempted")
            assert sorted(stage.closed) == kept
    made.check()


def test_a_landed_prompt_is_found_by_the_next_one() -> None:
    """Pages of a landed handoff are published whole, from all legs."""
    with tier("inprocess", "four") as made:
        first = made.want()
        made.give()
        made.turn(lambda: bool(made.came))
        first.close()
        again = made.offload.open(list(TOKENS), on_device=False)
        assert again.cached_count == 192, "of four full pages one is made anew, with MTP"
        latent, rows = made.offload._pools.latent, again.holding.host_rows(0, 192)
        whole = np.frombuffer(made.expected()[0], np.uint8)
        whole = whole.reshape(made.layout.layer_total, 299, -1)
        assert np.array_equal(latent.rows[:, rows], whole[:, :192])


def test_a_missed_prompt_is_found_by_none() -> None:
    with tier("unguarded") as made:
        first = made.want()
        made.stages[0].give(whole=made.layout)
        made.stages[1].offer()
        made.stages[1].made(UID, 0, 299)
        made.settle()
        made.stages[1].port.sender.give_up(UID)
        made.turn(lambda: bool(made.came))
        assert not isinstance(made.came[0], Landed)
        first.close()
        assert made.offload.open(list(TOKENS), on_device=False).cached_count == 0
