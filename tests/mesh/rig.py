"""A mesh in threads: each rank has its part of a small model, and requests go to the first rank."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from typing import Literal

import torch

from ess.comm.group import Group
from ess.comm.link import Link
from ess.comm.local import local_group
from ess.comm.team import Team
from ess.door import Offload
from ess.door.memory.common_host import CommonHost
from ess.engine.config import EngineConfig
from ess.engine.mesh.engines import Follower, Lead, MeshEngine
from ess.flashtrans.patient import PatientLane
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.registry import build
from ess.models.weights.expected.split import HEAD_TENSORS
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier
from ess.prefill.team import heads_of
from tests.comm.test_local import each
from tests.ranks.rig import weights
from tests.support.manual_lane import ManualLane

PARTS = {1: ((0, 3),), 2: ((0, 1), (1, 3)), 3: ((0, 1), (1, 2), (2, 3))}
BOX_PARTS = {1: ((0, 6),), 2: ((0, 2), (2, 6))}
PATIENCE_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`chunks` of slots for each group; pages of the device, where they are not as many as on the
    host. The family "box" is the model in the box, with its own weights and rows."""

    family: str = "v32"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    mtp: int = 1
    index_pages: int | None = None

    @property
    def is_box(self) -> bool:
        return self.family == "box"

    def layers(self, rank: int) -> tuple[int, int]:
        return (BOX_PARTS if self.is_box else PARTS)[self.pp][rank // self.tp]


@dataclass
class Skew:
    """One member of each stage's team is as late as it can be without the other: `writer` writes
    when all others wait for its word; `reader` runs behind an exchange when member 0 waits in the
    next one, and has freed, written and poisoned whatever it may before that. States that go to the
    next stage count as an exchange: member 0 has another one only when that stage has answered, and
    there each member waits for its own states."""

    late: Literal["writer", "reader"] | None
    changed: threading.Condition = field(default_factory=threading.Condition)
    words: Counter[tuple[int, str]] = field(default_factory=Counter)
    exchanges: Counter[tuple[int, int]] = field(default_factory=Counter)
    has_begun: bool = False
    has_ended: bool = False

    def until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.has_ended or holds(), PATIENCE_S)

    def count(self, counter: Counter, key: tuple) -> int:
        with self.changed:
            counter[key] += 1
            self.changed.notify_all()
            return counter[key]

    def end(self) -> None:
        with self.changed:
            self.has_ended = True
            self.changed.notify_all()


class OneWay:
    """A team of two whose broadcasts only the receiver waits for, as between processes."""

    def __init__(self, team: Team, stage: int, skew: Skew, heard: Queue[bytes]) -> None:
        self.rank, self.size = team.rank, team.size
        self.stage, self.skew = stage, skew
        self._team, self._heard = team, heard

    def broadcast(self, content: bytes, root: int = 0) -> bytes:
        if self.rank != root:
            return self._heard.get(timeout=PATIENCE_S)
        self._heard.put(content)
        return content

    def all_gather(self, tensor, dim=0, *, sizes=None):
        skew, key = self.skew, (self.stage, self.rank)
        number = skew.count(skew.exchanges, key)
        made = self._team.all_gather(tensor, dim, sizes=sizes)
        if self.rank and skew.late == "reader":
            skew.until(lambda: skew.exchanges[self.stage, 0] > number)
        return made


class Handing:
    """The link to the next stage."""

    def __init__(self, link: Link, key: tuple[int, int], skew: Skew) -> None:
        self._link, self._key, self._skew = link, key, skew

    def send(self, head: bytes, tensor: torch.Tensor | None = None) -> None:
        self._link.send(head, tensor)
        self._skew.count(self._skew.exchanges, self._key)

    def __getattr__(self, name: str) -> object:
        return getattr(self._link, name)


class LateHost(CommonHost):
    def __init__(self, group: Group, whole: ModelLayout, part: ModelLayout) -> None:
        super().__init__(group, whole, part)
        self._of, self._skew = group.team, group.team.skew

    @property
    def writes(self) -> bool:
        """A writer asks this before it writes."""
        if self._of.rank == 0 and self._skew.has_begun and self._skew.late == "writer":
            words, stage = self._skew.words, self._of.stage
            self._skew.until(lambda: words[stage, "waits"] > words[stage, "said"])
        return super().writes

    def written(self) -> None:
        words, stage = self._skew.words, self._of.stage
        self._skew.count(words, (stage, "waits" if self._of.rank else "said"))
        super().written()


def part_of(shape: Shape, group: Group) -> Model:
    layers = range(*shape.layers(group.rank))
    if shape.is_box:
        return load_model(layers=layers, heads=heads_of("tp", group.team))
    config, whole = weights(shape.family)

    def own(name: str) -> torch.Tensor:
        if not name.endswith(HEAD_TENSORS):
            return whole[name]
        return torch.chunk(whole[name], shape.tp)[group.team.rank].contiguous()

    return build(config, own, layers=layers, tp=shape.tp)


def engine(
    shape: Shape,
    group: Group,
    *,
    port_of=None,
    tokenizer=None,
    clock_of=None,
    disk: Path | None = None,
    host_pages: int = 60,
    **config,
) -> MeshEngine:
    """On rank 0 `port_of` makes a port of the offload and of all rows. `clock_of` gives a rank its
    clock. Each stage has a folder of its own in `disk`."""
    made = _made(shape, group, port_of, tokenizer, (disk, host_pages), config)
    if clock_of is not None:
        clock_of(group.rank).watch(made)
    return made


def _made(
    shape: Shape, group: Group, port_of, tokenizer, host: tuple[Path | None, int], config: dict
) -> MeshEngine:
    disk, host_pages = host
    model = part_of(shape, group)
    form = {} if shape.is_box else {"row": "f32", "index": "f32"}
    whole = model.config.layout(**form, has_mtp=shape.mtp > 1)
    layout = whole.part(*shape.layers(group.rank))
    pages = shape.index_pages
    common = _common(group, whole, layout)
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * layout.chunk_bytes * shape.chunks,
        host_bytes=host_pages * layout.host_page_bytes,
        index_bytes=None if pages is None else pages * layout.index_page_bytes,
        length_max=1024,
        slot_floor=24,
        lane=PatientLane(ManualLane(seed=shape.chunks + group.rank, delay_max=3)),
        common=common,
        poison=True,
        disk=None if disk is None else _disk(disk, group, layout),
    )
    settings = EngineConfig(**{"mtp": shape.mtp, "chunk_tokens": 48, "budget_every": 0, **config})
    if group.rank:
        return MeshEngine(model, offload, settings, group, tokenizer=tokenizer)
    port = None if port_of is None else port_of(offload, common.whole())
    return Lead(model, offload, settings, group, tokenizer=tokenizer, port=port)


class StageDisk(DiskTier):
    def __init__(self, folder: Path, stage: int, page_bytes: int) -> None:
        self.stage = stage
        super().__init__(
            folder / f"stage {stage}",
            identity=b"these",
            page_bytes=page_bytes,
            capacity_bytes=80 * (page_bytes + 4096),
        )


def _disk(folder: Path, group: Group, layout: ModelLayout) -> StageDisk | Elsewhere:
    stage, member = divmod(group.rank, group.team.size)
    if member:
        return Elsewhere(layout.host_page_bytes)
    return StageDisk(folder, stage, layout.host_page_bytes)


def _common(group: Group, whole: ModelLayout, part: ModelLayout) -> CommonHost:
    kind = LateHost if isinstance(group.team, OneWay) else CommonHost
    return kind(group, whole, part)


def run_mesh(
    shape: Shape, act: Callable[[Lead], object], *, late: str | None = None, **config
) -> object:
    """What `act` makes of the lead; then all ranks close, and their pools must be empty."""

    def run(group: Group) -> object:
        try:
            return _ran(engine(shape, group, **config), act, skew)
        except BaseException as wrong:
            skew.end()
            group.fail(f"{type(wrong).__name__}: {wrong}")
            raise

    if not shape.is_box:
        weights(shape.family)  # read once, before there are threads
    groups = local_group(shape.tp * shape.pp, team=shape.tp, patience_s=PATIENCE_S)
    skew = Skew(late)
    for stage in range(shape.pp if late else 0):
        heard = Queue[bytes]()
        for group in groups[2 * stage : 2 * stage + 2]:
            group.team = OneWay(group.team, stage, skew, heard)
            if group.next is not None:
                group.next = Handing(group.next, (stage, group.team.rank), skew)
    results = each(groups, run)
    wrong = [result for result in results if isinstance(result, BaseException)]
    if wrong:
        raise ExceptionGroup("ranks", wrong)
    return results[0]


def _ran(made: MeshEngine, act: Callable[[Lead], object], skew: Skew) -> object:
    result = None
    if isinstance(made, Lead):
        skew.has_begun = True
        result = act(made)
        skew.end()
        made.close()
    else:
        Follower(made).run()
    made.check()
    made.offload.drain()
    stats = made.offload.stats()
    assert stats.used_slot_count.sum() == 0
    assert stats.free_host_page_count == stats.host_page_count
    made.offload.close()
    return result
