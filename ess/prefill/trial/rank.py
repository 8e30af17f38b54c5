"""`python -m ess.prefill.trial.rank`: a process of a timed pipeline.

It loads, opens and runs as a worker's process does. Rank 0 leads, and takes Asks on stdin until it
is closed; then all ranks end.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from select import select
from typing import Final

import msgspec

from ess.clock import RealClock
from ess.comm.delayed import Delayed
from ess.comm.group import Group, WrappedGroup
from ess.comm.link import Link, LinkLost
from ess.engine.process.lifeline import die_with_parent
from ess.engine.process.member import join, rank_of
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadState
from ess.prefill import worker
from ess.prefill.follower import Follower
from ess.prefill.lead import Lead
from ess.prefill.trial.pipe_messages import Ask, Opened, PipeAnswer, Slow, Trial
from ess.prefill.trial.timed import TimedStage

WAIT_S: Final = 0.002
END_S: Final = 1.0


class Ends:
    """A sizer that cuts chunks at the ends that an Ask names."""

    def __init__(self) -> None:
        self.ends: Sequence[int] = ()

    def next(self, done: int, left: int) -> int:
        place = bisect.bisect_right(self.ends, done)
        return self.ends[place] - done if place < len(self.ends) else left

    def observe(self, done: int, count: int, seconds: float) -> None:
        """Learns nothing: chunks follow the Ask."""


class SlowGroup(WrappedGroup):
    """The group over a slow link to the next stage."""

    def __init__(self, group: Group, link: Link) -> None:
        super().__init__(group)
        self.next = link


@contextlib.contextmanager
def slowed(group: Group, links: Slow | None) -> Iterator[Group]:
    """The group over slow links; on exit, waits until everything under way has arrived."""
    if links is None or group.next is None:
        yield group
        return
    link = Delayed(group.next, links.latency_s, links.bytes_per_s, is_async=links.is_async)
    yield SlowGroup(group, link)
    link.restore()


def loaded(trial: Trial, group: Group) -> tuple[TimedStage, worker.Loaded]:
    launch = trial.launch
    stage_parts = worker.load(launch, rank_of(launch), group.team, RealClock())
    log = open(trial.log, "wb", buffering=0)  # noqa: SIM115
    stage = TimedStage(stage_parts.stage.runner, log)
    stage.write(Opened(pool_bytes=pool_bytes(stage)))
    return stage, stage_parts


def pool_bytes(stage: TimedStage) -> int:
    layout, stats = stage.offload.layout, stage.offload.stats()
    hosted = stats.host_page_count * layout.host_page_bytes
    return hosted + stats.index_page_count * layout.index_page_bytes


def follow(trial: Trial, group: Group) -> None:
    stage, made = loaded(trial, group)
    follower = Follower(stage, group, made.hello)
    stage.follow()
    follower.run()


def lead(trial: Trial, group: Group) -> None:
    stage, made = loaded(trial, group)
    launch, rank, ends = trial.launch, rank_of(trial.launch), Ends()
    leading = Lead(
        stage,
        group,
        launch.config,
        layers=rank.layers,
        sizer=ends,
        clock=RealClock(),
        stage_timeout_s=rank.stage_timeout_s,
    )
    stage.follow()
    leading.stages.gather(made.hello, worker.LOAD_S)
    say(PipeAnswer(made_s=[], cached_counts=[]))
    uids = itertools.count(1)
    for line in sys.stdin.buffer:
        ask = msgspec.json.decode(line, type=Ask)
        ends.ends = ask.ends
        say(answered(leading, ask, uids))
    leading.close()


def answered(leading: Lead, ask: Ask, uids: Iterator[int]) -> PipeAnswer:
    clock = RealClock()
    if ask.forgets:
        leading.forget_prefixes()
    began_s, wish = clock.now_s(), Sampling(tokens_max=1)
    requests = [leading.add(prompt, wish, give=next(uids)) for prompt in ask.prompts]
    ended: dict[int, float] = {}
    while len(ended) < len(requests) or leading.is_handing_over:
        if not leading.step().chunks:
            leading.stages.listen(wait_s=WAIT_S)
        for request in requests:
            if request.reason is not None and request.number not in ended:
                ended[request.number] = clock.now_s() - began_s
    check_sent(requests)
    return PipeAnswer(
        made_s=[ended[request.number] for request in requests],
        cached_counts=[request.cached_count or 0 for request in requests],
    )


def check_sent(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.reason != "sent":
            why = f": {request.refusal}" if request.refusal else ""
            raise BadState(f"a prompt of {len(request.prompt)} tokens is {request.reason}{why}")


def say(answer: PipeAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def run(trial: Trial) -> None:
    rank = rank_of(trial.launch)
    group = join(rank, trial.secret)
    try:
        with slowed(group, trial.links) as slow:
            (lead if rank.rank == 0 else follow)(trial, slow)
    except LinkLost:
        if not is_over():
            raise
    except Exception as error:
        group.fail(f"{type(error).__name__}: {error}")
        raise
    group.close()


def is_over() -> bool:
    """Whether the trial is over: the other ranks then leave on their own."""
    return bool(select([sys.stdin], [], [], END_S)[0]) and not sys.stdin.buffer.read(1)


def main() -> int:
    """After a failure the group is not left in order: its ranks would wait for one another."""
    die_with_parent()
    try:
        run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Trial))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
