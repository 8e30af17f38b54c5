"""Ranks that run in any order, requests that come and go at any moment: the pools stay alike."""

from __future__ import annotations

import random

import pytest

from ess.errors import EssError
from ess.prefill.follower import Follower
from ess.prefill.stage import Stage
from ess.transfer.messages import Reason
from tests.prefill.pipes import Pipe, engine_given, pools, text
from tests.support.few import few


class World:
    """`texts` share prefixes, so that pages are found again, kept and forgotten."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pipe = Pipe(
            self.random.choice([2, 3, 4]),
            page_count=self.random.choice([6, 12, 24]),
            sequence_max=self.random.choice([2, 4]),
            row=self.random.choice(["f32", "fp8"]),
            mtp=self.random.random() < 0.5,
        )
        self.requests: list = []
        self.texts = [text(350, seed=seed + at) for at in range(2)]
        self.count = 0

    def act(self) -> None:
        actions = (
            [self.turn] * 12 + [self.add] * 2 + [self.release] * 4 + [self.cancel, self.forget]
        )
        self.random.choice(actions)()

    def turn(self) -> None:
        self.random.choice(self.pipe.turns)()

    def add(self) -> None:
        if len(self.requests) < 30:
            known = self.random.choice(self.texts)
            prompt = known[: self.random.randint(1, 340)] + text(self.random.choice([0, 3, 40]))
            priority = self.random.choice([0, 0, 1])
            self.requests.append(self.pipe.add(prompt, priority=priority))

    def cancel(self) -> None:
        if self.requests:
            self.pipe.lead.cancel(self.random.choice(self.requests))

    def release(self) -> None:
        """One stage lets go of a handoff, sent or not, whatever the others do."""
        shelf = self.random.choice(self.pipe.shelves)
        if shelf.finished:
            reason = self.random.choice([Reason.DONE, Reason.DONE, Reason.DEADLINE])
            shelf.let_go(self.random.choice(list(shelf.finished)), reason=reason)

    def forget(self) -> None:
        if not len(self.pipe.lead._prompts):
            self.pipe.lead.forget_prefixes()

    def end(self) -> None:
        """All that was asked for is done, and nothing is left of it but cached prefixes."""
        for _ in range(400):
            self.pipe.settle()
            for shelf in self.pipe.shelves:
                for uid in list(shelf.finished):
                    shelf.let_go(uid)
            if not len(self.pipe.lead._prompts) and self.pipe.is_quiet():
                return
        raise AssertionError("it never ends")

    def assert_alike(self) -> None:
        first, *others = map(pools, self.pipe.stages)
        assert all(other == first for other in others), "pools differ"
        assert not any(first["held"])
        assert not any(first["active"])


def run(seed: int, *, steps: int = 250) -> World:
    world = World(seed)
    for _ in range(steps):
        world.act()
    world.end()
    world.assert_alike()
    return world


@pytest.mark.parametrize("seed", few(range(3), all_of=range(12)))
def test_any_schedule_leaves_all_pools_alike_and_every_request_ended(seed):
    world = run(seed)
    reasons = {request.reason for request in world.requests}
    assert reasons <= {"sent", "cancelled", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(101, 103), all_of=range(100, 200)))
def test_many_more_schedules(seed):
    run(seed, steps=600)


@pytest.mark.parametrize("seed", few((20, 21), all_of=range(20, 24)))
def test_what_was_sent_is_what_one_engine_makes(seed):
    world = run(seed)
    layout = world.pipe.stages[-1].offload.layout
    row, mtp = layout.row.form, bool(layout.mtp_layer_count)
    sent = [request for request in world.requests if request.reason == "sent"]
    for request in sent[:6]:
        alone = engine_given([request.prompt], row=row, mtp=mtp)[0]
        made = world.pipe.given(request.gives)
        assert made.rows == alone.rows, f"request {request.number}"
        assert made.keys == alone.keys


def run_all(seeds) -> None:
    for seed in seeds:
        run(seed)


def closing_early(self: Stage, held) -> None:
    """The bug: a stage closes a prompt as soon as its own handoff is over."""
    held.is_free = True
    self._freed.append(held)
    held.sequence.close()


def skipping_prefixes(self: Stage, number, tokens, *, uid, salt, load_max) -> int:
    """The bug: the last stage has another idea of what is cached."""
    salt = salt if self.runner.model.is_first else bytes([number % 256])
    return OPEN(self, number, tokens, uid=uid, salt=salt, load_max=load_max)


def losing_give_ups(self: Stage, held) -> None:
    """The bug: a stage behind the first forgets to close what was given up."""
    if self.runner.model.is_first:
        GIVE_UP(self, held)
    else:
        del self._held[held.number]


OPEN, GIVE_UP = Stage.open, Stage._give_up


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("_freed_of", closing_early),
        ("open", skipping_prefixes),
        ("_give_up", losing_give_ups),
    ],
)
def test_schedules_catch_a_stage_that_goes_its_own_way(monkeypatch, name, bug):
    monkeypatch.setattr(Stage, name, bug)
    with pytest.raises((AssertionError, EssError)):
        run_all(range(12))


def test_a_report_that_is_lost_is_seen(monkeypatch):
    """The bug: a follower that obeys a frame and does not say so."""
    monkeypatch.setattr(Follower, "_report", lambda self, said: None)
    with pytest.raises((AssertionError, EssError)):
        run(0)
