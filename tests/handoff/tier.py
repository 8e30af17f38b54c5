"""Stages of one model that hand prompts over together, and the worker that they go to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np

from ess.door import Sequence as Opened
from ess.door.handoff.endings import Landed, Lapsed, Missed, Sent
from ess.door.handoff.outgoing.pages import StagePages
from ess.door.handoff.port import Port
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.pool.warmup import WindowSet
from ess.transfer.transport import Transport
from ess.transfer.windows import packed_windows, unpacked_windows
from tests.handoff.layout import LAYOUT
from tests.handoff.receiving import GUARD_S, SEAL, Ends, content, offload_of
from tests.support.manual_clock import ManualClock

WIDE = ModelLayout(
    name="w",
    layer_count=7,
    groups=((0,), (1, 2), (3, 4, 5), (6,), (7,)),
    row=RowCodec(form="opaque", opaque_bytes=16),
    index=IndexCodec(key_dim=8, head_count=1),
    mtp_layer_count=1,
    top_k=8,
    slot_floor=8,
)
"""Seven layers in groups of one to three, and an MTP layer."""

SPLITS = {
    "two": (LAYOUT, (0, 2, 3)),
    "two wide": (WIDE, (0, 3, 7)),
    "four": (WIDE, (0, 1, 3, 6, 7)),
}
UID = 5
TOKENS = tuple(range(300))
Wrap = Callable[[Transport, ManualClock, int], Transport]


def drawn(seed: tuple[int, ...], count: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (count, size), np.uint8)


def fill_part(sequence: Opened, first: int, stop: int, *, layers: range | None = None) -> None:
    """Rows and keys as they are in the whole model: the text and the number of the layer say."""
    layout, seed = sequence.owner.pools.layout, sequence.tokens[0]
    first = max(first, sequence.cached_count)
    count = len(sequence.tokens) - 1
    for layer in layers or range(layout.layer_total):
        rows = drawn((seed, 0, layer + layout.first_layer), count, layout.row_bytes)
        sequence.import_rows(layer, first, rows[first:stop])
        group, member = layout.place_of(layer)
        if member == 0:
            keys = drawn((seed, 1, group + layout.first_group), count, layout.index.key_bytes)
            sequence.import_keys(layer, first, keys[first:stop])


def windows_of(tokens: Sequence[int], layout: ModelLayout, *, window_count: int = 4) -> np.ndarray:
    """Of the whole model."""
    draw = np.random.default_rng(tokens[0])
    shape = (layout.group_count, window_count, layout.top_k)
    return draw.integers(-1, len(tokens) - 1, shape, dtype=np.int32)


def same_windows(given: tuple[list[WindowSet], int], windows: np.ndarray, length: int) -> bool:
    sets, count = unpacked_windows(
        packed_windows(windows, length), group_count=len(windows), length=length
    )
    pairs = zip(sets, given[0], strict=True)
    return count == given[1] and all(
        np.array_equal(mine, theirs) for a, b in pairs for mine, theirs in zip(a, b, strict=True)
    )


class Stage:
    """A worker with a part of the layers. The test decides when it acts on each prompt: `left` has
    the outcomes, `closed` the prompts whose pages are no longer read."""

    def __init__(
        self,
        whole: ModelLayout,
        layers: range,
        transport: Transport,
        clock: ManualClock,
        *,
        shared: bool,
        **more,
    ) -> None:
        self.part = whole.part(layers.start, layers.stop)
        self.layers = range(layers.start, layers.start + self.part.layer_total)
        self.groups = slice(self.part.first_group, self.part.first_group + self.part.group_count)
        self.offload = offload_of(self.part, shared=shared)
        self.transport = transport
        self.port = Port(self.offload, transport, SEAL, clock=clock, **more)
        self.opened: dict[int, Opened] = {}
        self.left: list[Sent | Lapsed] = []
        self.closed: list[int] = []
        self.is_alive = True

    @property
    def epoch(self) -> int:
        return self.port.epoch

    def offer(self, uid: int = UID, tokens: Sequence[int] = TOKENS) -> Opened:
        sequence = self.offload.open(list(tokens))
        pages = StagePages(
            sequence, token_count=len(tokens) - 1, on_close=lambda: self.closed.append(uid)
        )
        self.port.sender.offer_pages(uid, pages, prompt=list(tokens), salt=b"")
        self.opened[uid] = sequence
        return sequence

    def made(self, uid: int, first: int, stop: int, *, layers: range | None = None) -> None:
        fill_part(self.opened[uid], first, stop, layers=layers)
        for layer in layers or range(self.part.layer_total):
            self.port.sender.made(uid, layer, stop)

    def finish(self, uid: int, windows: np.ndarray | None) -> None:
        self.port.sender.finish(uid, None if windows is None else windows[self.groups])

    def give(self, uid: int = UID, tokens: Sequence[int] = TOKENS, *, whole: ModelLayout) -> None:
        """The whole of the prompt, in two chunks."""
        self.offer(uid, tokens)
        last = len(tokens) - 1
        for first, stop in pairwise(sorted({0, min(100, last), last})):
            self.made(uid, first, stop)
            self.pump()
        self.finish(uid, windows_of(tokens, whole))

    def close(self, uid: int) -> None:
        """Closes as the lead does when all stages have reported."""
        self.opened.pop(uid).close()

    def pump(self) -> None:
        if self.is_alive:
            self.port.pump()
            self.port.check()
            self.left += self.port.sender.outcomes()

    def kill(self) -> None:
        self.is_alive = False
        self.port.close()

    @property
    def free_count(self) -> int:
        return self.offload._pools.latent.free_count


class Tier:
    def __init__(self, kind: str, split: str = "two", *, wrap: Wrap | None = None, **more) -> None:
        self.clock = ManualClock()
        self.ends = Ends(kind, self.clock)
        self.layout, edges = SPLITS[split]
        self.ranges = [range(a, b) for a, b in pairwise(edges)]
        self.wrap = wrap
        self.more = more
        self.offload = offload_of(self.layout, page_count=48, shared=kind == "shared")
        settings = {"arrivals_max": 4, **more}
        self.port = Port(self.offload, self.ends.end(), SEAL, clock=self.clock, **settings)
        self.came: list[Landed | Missed] = []
        self.stages: list[Stage] = []
        self.start()

    def start(self) -> None:
        """All stages, with new epochs, and the meeting."""
        self.stages = [self._stage(number) for number in range(len(self.ranges))]
        self.meet()

    def _stage(self, number: int) -> Stage:
        end = self.ends.end()
        if self.wrap is not None:
            end = self.wrap(end, self.clock, number)
        shared = self.ends.kind == "shared"
        return Stage(self.layout, self.ranges[number], end, self.clock, shared=shared, **self.more)

    def metadata(self) -> bytes:
        listed = [(stage.port.metadata(), stage.layers) for stage in self.stages]
        return self.stages[0].port.metadata(listed)

    def meet(self) -> None:
        for stage in self.stages:
            stage.port.meet(self.port.metadata())
        assert self.port.meet(self.metadata()) == self.lead

    @property
    def lead(self) -> int:
        return self.stages[0].epoch

    def want(self, uid: int = UID, tokens: Sequence[int] = TOKENS) -> Opened:
        sequence = self.offload.open(list(tokens), on_device=False)
        self.port.receiver.expect(sequence, uid=uid, peer=self.lead)
        return sequence

    def give(self, uid: int = UID, tokens: Sequence[int] = TOKENS) -> None:
        for stage in self.stages:
            stage.give(uid, tokens, whole=self.layout)

    def step(self) -> None:
        for stage in self.stages:
            stage.pump()
        self.pump()

    def pump(self) -> None:
        self.port.pump()
        self.port.check()
        self.came += self.port.receiver.outcomes()

    def turn(self, until: Callable[[], bool], *, advance_s: float = 0.0) -> None:
        guard_s = time.monotonic() + GUARD_S
        while not until():
            assert time.monotonic() < guard_s, (self.port.counts, self.came)
            self.clock.advance(advance_s)
            self.step()

    def settle(self) -> None:
        for _ in range(20):
            self.step()

    @property
    def is_idle(self) -> bool:
        ports = [self.port, *(stage.port for stage in self.stages if stage.is_alive)]
        return not any(port.is_busy for port in ports)

    def expected(self, tokens: Sequence[int] = TOKENS) -> tuple[bytes, bytes]:
        sequence = offload_of(self.layout).open(list(tokens))
        fill_part(sequence, 0, len(tokens) - 1)
        return content(sequence)

    def is_blank(self, sequence: Opened) -> bool:
        """None of its rows are marked, and no other prompt matches its pages."""
        latent, pages = self.offload._pools.latent, sequence.holding.host_pages
        return not latent.stored[:, pages].any() and sequence.length == sequence.cached_count

    @property
    def free_count(self) -> int:
        return self.offload._pools.latent.free_count

    def check(self) -> None:
        self.port.check()
        self.offload.check()
        for stage in self.stages:
            stage.port.check()
            stage.offload.check()

    def close(self) -> None:
        for stage in self.stages:
            stage.port.close()
        self.port.close()
        self.check()


@contextmanager
def tier(kind: str, split: str = "two", **more) -> Iterator[Tier]:
    made = Tier(kind, split, **more)
    try:
        yield made
    finally:
        made.close()
