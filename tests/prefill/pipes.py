"""Pipelines in one process: stages of a small model, stepped in any order a test likes.

`Shelf` stands where a stage's port stands. It keeps what was handed over, byte for byte, as it was
when the prompt was made, and lets go of it when the test says so.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from ess.clock import RealClock
from ess.comm.link import AHEAD_MAX, HELD_MAX
from ess.comm.local import local_group
from ess.comm.processes.staged import StagedGroup
from ess.door import Offload
from ess.door.handoff.endings import Lapsed, Sent, Timeline
from ess.door.handoff.outgoing.pages import SequencePages
from ess.door.handoff.port import Port
from ess.engine.config import EngineConfig
from ess.engine.devices import backend_of
from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.step.runner import made_runner
from ess.engine.tokens.sampling import Sampling
from ess.layout import ModelLayout
from ess.models.model import Model
from ess.models.registry import build, read_config
from ess.pool.disk.slab import ALIGN
from ess.pool.disk.tier import DiskTier
from ess.prefill.follower import Follower
from ess.prefill.lead import Lead
from ess.prefill.rooms import stage_offload
from ess.prefill.stage import Stage
from ess.transfer.messages import Reason
from tests.support.checkpoints import SMALL, V32, tensors, tokens

CONFIG = {**V32, **SMALL, "index_topk": 80}
LAYER_COUNT = 4
CHUNK = 128
TOP_K = 80
DIGEST = bytes(32)
LINK_MAX = HELD_MAX + AHEAD_MAX
CUTS = {1: (0, 4), 2: (0, 2, 4), 3: (0, 1, 2, 4), 4: (0, 1, 2, 3, 4)}


@functools.cache
def weights() -> dict[str, torch.Tensor]:
    return tensors(read_config(CONFIG))


@functools.cache
def model_of(layers: range | None = None, device: str = "cpu") -> Model:
    return build(read_config(CONFIG), lambda name: weights()[name].to(device), layers=layers)


def text(length: int, *, seed: int = 0) -> list[int]:
    return tokens(length, CONFIG["vocab_size"], seed=seed * 1000 + length)


@dataclass(eq=False)
class Given:
    """What a stage has made of a prompt, in bytes: rows by layer, keys by group, windows."""

    rows: list[bytes]
    keys: list[bytes]
    windows: list[bytes]


def given(pages: SequencePages, windows: np.ndarray | None) -> Given:
    sequence = pages._sequence
    latent, count = pages._latent, pages._row_count
    at = sequence.holding.host_rows(0, count)
    groups = range(latent.layout.group_count)
    return Given(
        rows=[latent.rows[layer][at].tobytes() for layer in range(latent.layout.layer_total)],
        keys=[latent.keys.read(group, at).tobytes() for group in groups],
        windows=[] if windows is None else [np.array(group).tobytes() for group in windows],
    )


class Shelf:
    """A port, its sender and its receiver: handoffs stay until `let_go`."""

    def __init__(self) -> None:
        self.sender = self.receiver = self
        self.open: dict[int, SequencePages] = {}
        self.finished: dict[int, SequencePages] = {}
        self.given: dict[int, Given] = {}
        self.told: dict[int, list[tuple[int, int]]] = {}
        self.met: list[bytes] = []
        self._ended: list[Sent | Lapsed] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.open or self.finished)

    def metadata(self) -> bytes:
        return b"shelf"

    def meet(self, metadata: bytes) -> int:
        self.met.append(metadata)
        return 1

    def pump(self) -> None: ...

    def offer(self, uid: int, sequence, *, prompt: Sequence[int], salt: bytes) -> None:
        self.offer_pages(uid, SequencePages(sequence, token_count=len(prompt) - 1), prompt=prompt)

    def offer_pages(self, uid: int, pages: SequencePages, *, prompt, salt: bytes = b"") -> None:
        assert uid not in self.open, "an uid is open twice"
        self.open[uid], self.told[uid] = pages, []

    def made(self, uid: int, layer: int, stop: int) -> None:
        assert uid in self.open, "of what is over nothing is made"
        self.told[uid].append((layer, stop))

    def finish(self, uid: int, windows: np.ndarray | None) -> None:
        pages = self.finished[uid] = self.open.pop(uid)
        pages.keep()
        self.given[uid] = given(pages, windows)

    def give_up(self, uid: int) -> None:
        if self.open.pop(uid, None) is None and uid in self.finished:
            self.let_go(uid, reason=Reason.ABORTED)

    def let_go(self, uid: int, *, reason: Reason = Reason.DONE) -> None:
        timeline = Timeline(0.0, ())
        is_sent = reason is Reason.DONE
        end = Sent(uid, timeline) if is_sent else Lapsed(uid, reason, reason.name, timeline)
        self._ended.append(end)
        self.finished.pop(uid).close()

    def outcomes(self) -> list[Sent | Lapsed]:
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None: ...


@dataclass
class Sizes:
    """Chunks of one size, and what was observed of them."""

    first: int = CHUNK
    seen: list[tuple[int, int, float]] = field(default_factory=list)

    def next(self, done: int, left: int) -> int:
        return self.first

    def observe(self, done: int, count: int, seconds: float) -> None:
        self.seen.append((done, count, seconds))


@dataclass
class Ragged(Sizes):
    """Chunks of any size."""

    def next(self, done: int, left: int) -> int:
        return 1 + 37 * (done + 5) % self.first


def room_of(
    layers: tuple[int, int],
    *,
    row: str = "f32",
    page_count: int = 64,
    sequence_max: int = 8,
    mtp: bool = True,
    disk: Path | None = None,
    disk_pages: int = 100,
    device: str = "cpu",
) -> Offload:
    config = msgspec.structs.replace(model_of().config, mtp_layer_count=int(mtp))
    whole = config.layout(row=row, index="f32" if row == "f32" else "fp8")
    return stage_offload(
        whole,
        layers,
        host_bytes=page_count * whole.host_page_bytes,
        index_bytes=page_count * whole.index_page_bytes,
        length_max=1024,
        sequence_max=sequence_max,
        poison=True,
        device=device,
        disk=None if disk is None else disk_of(disk, whole.part(*layers), disk_pages),
    )


def folder_of(disk: Path, layers: tuple[int, int]) -> Path:
    return disk / f"layers-{layers[0]}-{layers[1] - 1}"


def disk_of(disk: Path, layout: ModelLayout, page_count: int) -> DiskTier:
    first, page_bytes = layout.first_layer, layout.host_page_bytes
    return DiskTier(
        folder_of(disk, (first, first + layout.layer_count)),
        identity=b"these",
        page_bytes=page_bytes,
        capacity_bytes=page_count * (page_bytes + -page_bytes % ALIGN),
    )


def stage_of(
    layers: tuple[int, int],
    *,
    deterministic: bool = False,
    port_of: Callable[[Offload], Port] = lambda _: Shelf(),
    device: str = "cpu",
    **room,
) -> Stage:
    offload = room_of(layers, device=device, **room)
    config = EngineConfig(deterministic=deterministic, backend=backend_of(device))
    runner = made_runner(model_of(range(*layers), device), offload, config)
    return Stage(runner, port=port_of(offload), clock=RealClock())


class Pipe:
    """A lead and its followers, none of which goes on by itself. Stages of a device share it."""

    def __init__(
        self,
        stage_count: int,
        *,
        deterministic: bool = False,
        sequence_max: int = 8,
        sizes: Sizes | None = None,
        device: str = "cpu",
        **room,
    ) -> None:
        layers = list(itertools.pairwise(CUTS[stage_count]))
        self.sizes = sizes or Sizes()
        self.links = local_group(stage_count, patience_s=1.0)
        self.groups = self.links
        if device != "cpu":
            self.groups = [StagedGroup(group, torch.device(device)) for group in self.links]
        self.stages = [
            stage_of(
                part,
                deterministic=deterministic,
                sequence_max=sequence_max,
                device=device,
                **room,
            )
            for part in layers
        ]
        self.followers = [
            Follower(stage, group, stage.hello(DIGEST))
            for stage, group in zip(self.stages[1:], self.groups[1:], strict=True)
        ]
        self.lead = Lead(
            self.stages[0],
            self.groups[0],
            EngineConfig(max_running=sequence_max, deterministic=deterministic),
            layers=layers,
            sizer=self.sizes,
            clock=RealClock(),
            stage_timeout_s=60.0,
        )
        self.hellos = self.lead.stages.gather(self.stages[0].hello(DIGEST), 1.0)
        self._uid = 0

    @property
    def shelves(self) -> list[Shelf]:
        return [stage.port for stage in self.stages]

    def add(self, prompt: Sequence[int], *, uid: int | None = None, **wishes) -> Request:
        self._uid += 1
        give = self._uid if uid is None else uid
        return self.lead.add(prompt, Sampling(tokens_max=1), give=give, **wishes)

    @property
    def turns(self) -> list[Callable[[], object]]:
        return [self.lead.step, *(self._turn_of(rank) for rank in range(1, len(self.stages)))]

    def _turn_of(self, rank: int) -> Callable[[], object]:
        """Nothing while it would wait for another rank, of which none has a thread here."""
        group = self.links[rank]

        def turn() -> None:
            is_full = group.next is not None and len(group.next._out.frames) >= LINK_MAX
            if not is_full:
                self.followers[rank - 1].turn()

        return turn

    def run(self, *, until: Callable[[], bool] | None = None, shuffle: random.Random | None = None):
        """All ranks in turn, or any rank at a time, until nothing runs."""
        for _ in range(5000):
            if (until or self.is_quiet)():
                return
            self.wait_for_disks()
            for turn in self.turns if shuffle is None else [shuffle.choice(self.turns)]:
                turn()
        raise AssertionError("it goes on and on")

    def wait_for_disks(self) -> None:
        """What is being read has come, and no report says so yet."""
        for stage in self.stages:
            for held in stage._held.values():
                if held.sequence._load is not None:
                    held.sequence._load.loading.wait()

    def close(self) -> None:
        """What was to be stored is on the disk."""
        for stage in self.stages:
            stage.offload.close()

    def is_quiet(self) -> bool:
        return self.lead.is_idle and not len(self.lead._batches) and self.lead.stages.is_clear

    def settle(self) -> None:
        """Every stage has obeyed every order, and the lead knows."""
        for _ in range(6 * len(self.stages)):
            for turn in self.turns:
                turn()
        self.check()

    def release(self, uid: int, *, stages: Iterable[int] | None = None, **reason) -> None:
        for stage in range(len(self.stages)) if stages is None else stages:
            self.shelves[stage].let_go(uid, **reason)

    def release_all(self) -> None:
        for shelf in self.shelves:
            for uid in list(shelf.finished):
                shelf.let_go(uid)
        self.settle()

    def check(self) -> None:
        self.lead.check()
        for follower in self.followers:
            follower.check()

    def given(self, uid: int) -> Given:
        """By all stages together."""
        parts = [shelf.given[uid] for shelf in self.shelves]
        return Given(
            *([item for part in parts for item in getattr(part, name)] for name in KINDS_OF_BYTES)
        )


KINDS_OF_BYTES = ("rows", "keys", "windows")


def pools(stage: Stage) -> dict[str, object]:
    """What must be alike on all stages: pages, prefixes, tables; not the rows themselves."""
    pools = stage.offload.owner.pools
    latent, index, tables = pools.latent, pools.index, pools.tables
    return {
        "free": [pool.pages._free[: pool.pages.free_count].tolist() for pool in (latent, index)],
        "prefix": dict(latent.prefix._page_of),
        "idle": list(latent.prefix._idle),
        "lines": tables.lines.tolist(),
        "lengths": tables.lengths.tolist(),
        "held": [latent.pages.hold_count(page) for page in range(latent.pages.page_count)],
        "active": [index.pages.hold_count(page) for page in range(index.pages.page_count)],
    }


def engine_given(prompts: Sequence[Sequence[int]], **given) -> list[Given]:
    """What one engine makes of the prompts, added at once. Cases in turn ask for the same."""
    return _engine_given(tuple(map(tuple, prompts)), **given)


@functools.lru_cache(maxsize=8)
def _engine_given(
    prompts: tuple[tuple[int, ...], ...],
    *,
    deterministic: bool = False,
    chunk: int = CHUNK,
    **room,
) -> list[Given]:
    shelf = Shelf()
    offload = room_of((0, LAYER_COUNT), **room)
    config = EngineConfig(max_running=8, chunk_tokens=chunk, deterministic=deterministic)
    engine = Engine(model_of(), offload, config, port=shelf)
    uids = range(1, len(prompts) + 1)
    for uid, prompt in zip(uids, prompts, strict=True):
        engine.add(list(prompt), Sampling(tokens_max=1), give=uid)
    while not engine.is_idle:
        engine.step()
    engine.check()
    return [shelf.given[uid] for uid in uids]
