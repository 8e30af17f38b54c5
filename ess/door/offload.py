"""The library door: everything that an engine of your own calls."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from ess.clock import Clock, RealClock
from ess.door.checks import counts, in_range, token_ids
from ess.door.memory.pools import PoolSizes, build_pools
from ess.door.owner import Owner
from ess.door.sequences.opening import Opening, count_on_disk, open_sequence
from ess.door.sequences.sequence import Sequence
from ess.door.side import Differing, HostSide, MakePlacement, Side
from ess.door.stats import Stats
from ess.door.steps.beginning import begin
from ess.door.steps.direct import Direct
from ess.door.steps.placement import LayerMemory
from ess.door.steps.step import Step
from ess.errors import BadInput, BadState, Unavailable
from ess.flashtrans.lanes import open_lane
from ess.kernels.streams import Lane
from ess.layout import ModelLayout
from ess.pool.device_bytes import check_on_device
from ess.pool.disk.elsewhere import Elsewhere
from ess.pool.disk.tier import DiskTier
from ess.pool.latent import Common
from ess.pool.ledger import Promise
from ess.pool.lru.eviction import PolicyName, check_policy
from ess.pool.prefix import PrefixListener
from ess.units import parse_size


class Offload:
    """Sparse residency for an engine of your own, in plain tensors.

    Rows live on the host, a working set of them in slots on the device. `open` a `Sequence` and
    bring its rows; `begin` a `Step`, append its new rows layer by layer, resolve selections, attend
    hits and places at once and misses after `wait()`, `ess.merge` them, commit. A context manager.

    One thread makes all calls: that of the first one after `create` (see `ess.door.owner`).
    """

    def __init__(self, side: Side, clock: Clock) -> None:
        pools = side.pools
        self.layout = pools.layout
        self.sizes = pools.sizes
        self.clock = clock
        self.timings = side.timings
        self.stopwatch = side.stopwatch
        self.owner = Owner(pools, side.placement)
        self._side = side
        self._direct = side.placement.direct
        self._pools = pools
        self._is_followed = False

    @classmethod
    def create(
        cls,
        layout: ModelLayout,
        *,
        slot_bytes: int | str,
        host_bytes: int | str,
        index_bytes: int | str | None = None,
        device: str | torch.device = "cpu",
        sequence_max: int = 64,
        length_max: int | str = "128k",
        query_max: int = 256,
        slot_floor: int | None = None,
        lane: Lane | None = None,
        clock: Clock | None = None,
        poison: bool = False,
        shared: bool = False,
        common: Common | None = None,
        evict: PolicyName = "lru",
        placement: MakePlacement | None = None,
        disk: DiskTier | Elsewhere | None = None,
    ) -> Offload:
        """Allocates everything it will ever use.

        slot_bytes    room for rows on the device; `host_bytes` for rows and index keys on the host
        index_bytes   index keys and row maps of active pages; by default room for all host pages
        query_max     the most queries of a step
        slot_floor    slots reserved in every group for each active sequence, or its `length_max`
                      where that is less; by default the layout's. A step that needs more reads the
                      rest in place (`Resolution.place`). Where there are fewer slots than the
                      floor, `open` admits only a `length_max` of at most as many
        lane          makes the copies, by default beside compute; `clock` times the waits for them
        poison        fills freed and unwritten rows with 0xFF, which is NaN: for tests
        shared        puts the host's rows and keys into memory that other processes can map
        common        host memory with one copy of rows and keys for processes that call alike
        evict         the row that gives way: the longest unused (lru), that of SIEVE's walk, or the
                      indexer's lowest (score), which needs `Step.observe` before each `resolve`
        placement     is given the slots and returns what a step uses in their place
        disk          keeps pages of the prefix cache beyond the host's memory and beyond this
                      process; its pages have `layout.host_page_bytes`, and `close` closes it too
        """
        _check_layout(layout)
        device = str(device)
        floor = layout.slot_floor if slot_floor is None else slot_floor
        _check_eviction(evict, device)
        _check_lane(lane)
        sizes = PoolSizes(
            slot_bytes=_bytes("slot_bytes", slot_bytes),
            host_bytes=_bytes("host_bytes", host_bytes),
            index_bytes=None if index_bytes is None else _bytes("index_bytes", index_bytes),
            sequence_max=_count("sequence_max", sequence_max),
            length_max=_count("length_max", parse_size(length_max, "length_max")),
            query_max=_count("query_max", query_max),
            slot_floor=_count("slot_floor", floor),
            poison=poison,
            shared=shared,
            evict=evict,
        )
        _check_disk(disk, layout, common)
        clock = clock or RealClock()
        if device != "cpu":
            _check_device(layout, device, lane=lane, placement=placement, common=common)
            from ess.door.device.device_side import open_device_side

            return cls(open_device_side(layout, sizes, device, clock, disk), clock)
        try:
            lane = lane or open_lane()
            pools = build_pools(layout, sizes, lane, disk, common)
            return cls(HostSide(pools, lane, clock, placement), clock)
        except MemoryError as error:
            raise Unavailable(f"no memory for these pools: {error}") from error

    # ---- what may be read

    @property
    def direct(self) -> Direct | None:
        """For an engine whose layers run in one native call; None where they cannot."""
        return self._direct

    def memory(self, layer: int) -> LayerMemory:
        """Where this layer's slots, host rows and index keys lie."""
        self.layout.check_layer(layer)
        return self.owner.placement.memory(layer)

    @property
    def beside(self) -> Tensor:
        """What all active sequences keep beside their rows, uint8 [sequence_max, bytes], by
        `Sequence.line`."""
        if self._pools.states is None:
            raise BadInput(f"{self.layout.name!r} keeps nothing beside its rows")
        return torch.from_numpy(self._pools.states.lines)

    def stats(self) -> Stats:
        return self._side.stats()

    def all_resident(self, sequences: Many[Sequence]) -> bool:
        """Whether every row of these sequences has a slot, in every layer of the main model."""
        self.owner.require()
        return self._side.all_resident(self.owner.own(sequences))

    @property
    def wants_scores(self) -> bool:
        """Whether rows give way by their score: then `Step.observe` needs the indexer's logits."""
        return self.sizes.evict == "score"

    @property
    def is_scarce(self) -> bool:
        """Whether slots are running out. Then selections must be stamped: call `resolve`, since
        `locate` stamps nothing."""
        return self._side.is_scarce()

    def verify(self, layer: int) -> list[tuple[int, int]]:
        """(slot, row id) of every clean slot whose bytes are not those of its row on the host."""
        self.layout.check_layer(layer)
        most = self._pools.sparse.slot_count(self.layout.group_of(layer))
        return self._side.compare(layer, most=most).read().listed

    def compare(self, layer: int, *, most: int) -> Differing:
        """As `verify`, for the slots after all work that is queued now; `read` waits for that.
        Counts all slots that differ and lists the first `most`."""
        self.layout.check_layer(layer)
        return self._side.compare(layer, most=in_range("most", most, 1, 1 << 31))

    def check(self) -> None:
        """Audits every pool; raises AssertionError with coordinates."""
        for part in (self._pools, self.owner, self._side):
            part.check()

    # ---- sequences

    def open(
        self,
        tokens: Many[int],
        *,
        length_max: int | None = None,
        promise: Promise = "all",
        salt: bytes = b"",
        reuse_max: int | None = None,
        publishes: bool = True,
        on_device: bool = True,
        from_disk: bool = False,
        load_max: int | None = None,
    ) -> Sequence:
        """Room for a sequence, or PoolFull with the limiter and the numbers.

        Rows of the longest cached prefix are there already (`cached_count`); import the rest. A
        page of 64 rows becomes cached prefix when its tokens are known and the host has its rows
        and index keys of all layers; the sequence takes notice of imports when it is next used, at
        the latest when it is closed.

        length_max  all growth up to it is promised now; without it growth may meet PoolFull later
        promise     "some" promises the growth on the host only: device pages may meet PoolFull
        salt        sequences with different salt never share rows
        reuse_max   the most tokens of cached prefix that it takes
        publishes   False: its rows never become cached prefix
        on_device   False: it begins preempted, with host pages only, all of its growth promised
                    there: for rows that are still to come. `resume` takes it onto the device. What
                    is kept beside rows comes with them in a handoff: without it `resume` refuses
                    cached rows
        from_disk   if the disk has more of the prefix than the host, it also begins preempted and
                    `is_loading`, until `load` finds that the pages have come; `resume` waits for
                    them
        load_max    for a part of a model, whose pools must stay like those of the other parts,
                    whatever its disk has: at most that many pages come from the disk, after the
                    prefix that the host has; the sequence begins preempted, and `land` says how
                    many of them count
        """
        self.owner.require()
        ids, longest = token_ids("tokens", tokens), self.sizes.length_max
        if promise not in ("all", "some"):
            raise BadInput(f"promise is {promise!r}, must be 'all' or 'some'")
        if not isinstance(salt, bytes):
            raise BadInput(f"salt is a {type(salt).__name__}, must be bytes")
        if reuse_max is not None:
            in_range("reuse_max", reuse_max, 0, longest)
        wanted = longest if length_max is None else in_range("length_max", length_max, 1, longest)
        if not 0 < len(ids) <= wanted:
            whose = "the offload" if length_max is None else "this sequence"
            raise BadInput(f"tokens has {len(ids)} ids, {whose} takes 1 to {wanted} (length_max)")
        how = Opening(
            length_max=length_max,
            salt=salt,
            promise=promise,
            reuse_max=reuse_max,
            on_device=on_device,
            from_disk=from_disk,
            load_max=load_max,
        )
        sequence = open_sequence(self.owner, ids, how)
        if not publishes:
            sequence.progress.withhold()
        return sequence

    def count_on_disk(self, tokens: Many[int], *, salt: bytes = b"") -> int:
        """How many pages of the prompt `open` with `load_max` finds on the disk now."""
        self.owner.require()
        return count_on_disk(self.owner, token_ids("tokens", tokens), salt=salt)

    def load(self) -> None:
        """Marks pages that have come from the disk: sequences that still wait for some are
        `is_loading`. A prompt is computed from the first page on that could not be read."""
        self.owner.require()
        if self._pools.shelf is not None:
            self._pools.shelf.settle()

    def forget_prefixes(self) -> int:
        """Empties the prefix cache, on the host and on the disk; returns how many pages the host
        had. It waits for the disk.

        BadState while a sequence holds a cached page: it reads these rows.
        """
        self.owner.require()
        self.drain()
        latent = self._pools.latent
        if latent.prefix.held_count:
            raise BadState(f"{latent.prefix.held_count} cached pages are held by open sequences")
        count = latent.forget()
        if self._pools.shelf is not None:
            self._pools.shelf.forget()
        return count

    def follow_prefixes(self, listener: PrefixListener) -> None:
        """From now on `listener` is called for every page that enters or leaves the prefix
        cache."""
        self.owner.require()
        if self._is_followed:
            raise BadState("the prefix cache is followed already; it has one listener")
        self._is_followed = True
        self._pools.latent.prefix.listeners.append(listener)

    # ---- steps, and what happens between them

    def begin(
        self,
        sequences: Many[Sequence],
        *,
        query_counts: Many[int],
        starts: Many[int] | None = None,
        room: int | None = None,
    ) -> Step:
        """Each sequence brings `query_counts` new rows; PoolFull if their pages do not fit.

        Where a row is of several tokens, each query is of one token behind `text_length`, and
        brings a row if it is that row's last token. It may select that one and all before it, and
        verbs that take new rows count rows.

        A step starts at `sequence.length`: import n - 1 rows of n known tokens, and the step brings
        the row of the last. With nothing imported it starts at 0, or behind the cached prefix:
        that is prefill by steps, and `append` brings every row. So does a step whose import was
        forgotten: positions that its queries select are refused as outside of their context, and
        `commit` refuses ids that are not those of its positions. Without ids its rows count as
        those of the first positions.
        An earlier step may be sealed and not learned: pages are provided for the most that it can
        have accepted, and positions follow the device's own lengths. `starts` says where the new
        rows begin; where rows were imported for a part of the known tokens only, a step without it
        is refused.
        On a device `room` pads the step to so many queries, which select nothing and whose rows are
        nowhere: a graph of that size can be replayed for it.
        """
        self.owner.require_between_steps()
        if len(self.owner.sealed) > 1:
            raise BadState(f"learn step {self.owner.sealed[0].number} first")
        batch = self.owner.own(sequences)
        listed = counts("query_counts", query_counts, len(batch))
        first = None if starts is None else counts("starts", starts, len(batch))
        step = begin(self.owner, batch, listed, first, room)
        self._side.step_begun()
        return step

    def refill(self, sequences: Many[Sequence]) -> int:
        """Called after a step: copies some absent rows of one of these sequences into free slots;
        returns how many."""
        self.owner.require_between_steps()
        return self._side.refill(self.owner.own(sequences))

    def rebalance(self) -> int:
        """Moves some slots to the groups whose misses they save most; returns how many chunks.

        It goes by what has happened since the last call, so call it every few dozen steps.
        """
        self.owner.require_between_steps()
        if self.owner.sealed:
            raise BadState(f"learn step {self.owner.sealed[0].number} before budgets move")
        self._pools.inflight.settle()
        return self._side.rebalance()

    def drain(self) -> None:
        """Waits until every copy under way has landed."""
        self.owner.require_thread()
        self._side.drain()

    def close(self) -> None:
        """Ends the lane after the copies under way, and the disk after what it can store within
        seconds. A second call does nothing. In a forked child it leaves the parent's lane and disk
        alone."""
        if self.owner.is_forked:
            self.owner.is_open = False
        if self.owner.is_open:
            self.owner.require_thread()
            self.owner.is_open = False
            self._side.drain()
            if self._pools.shelf is not None:
                self._pools.shelf.close()
            self._side.close()

    def __enter__(self) -> Offload:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_device(layout: ModelLayout, device: str, **own: object) -> None:
    """A device has a lane of its `own`, and so on: none may be given."""
    for name, value in own.items():
        if value is not None:
            raise BadInput(f"{name} is given, but {device!r} has its own")
    check_on_device(layout, device)


def _check_layout(layout: ModelLayout) -> None:
    if not isinstance(layout, ModelLayout):
        raise BadInput(
            f"layout is {layout!r:.40}, must be a ModelLayout: ModelLayout.deepseek_v32()"
        )


def _check_lane(lane: Lane | None) -> None:
    if lane is not None and not hasattr(lane, "submit"):
        raise BadInput(f"lane is {lane!r}, must be a lane of ess.flashtrans")


def _count(name: str, count: int) -> int:
    return in_range(name, count, 1, 1 << 31)


def _bytes(name: str, size: int | str) -> int:
    """The size in bytes; BadInput where it is beyond any address space."""
    return in_range(name, parse_size(size, name), 0, 1 << 62)


def _check_eviction(evict: str, device: str) -> None:
    check_policy(evict)
    if device != "cpu" and evict == "sieve":
        raise BadInput(f"evict is 'sieve': on {device} rows give way by lru or score")


def _check_disk(
    disk: DiskTier | Elsewhere | None, layout: ModelLayout, common: Common | None
) -> None:
    if not isinstance(disk, DiskTier | Elsewhere | None):
        raise BadInput(f"disk is {disk!r:.80}, must be a DiskTier of ess.pool.disk.tier")
    writes = common is None or common.writes
    if disk is not None and writes != isinstance(disk, DiskTier):
        raise BadInput(
            f"disk is {type(disk).__name__}: a process that writes the host's rows has a DiskTier,"
            " every other process Elsewhere"
        )
    if disk is not None and layout.has_states:
        raise BadInput(f"{layout.name!r} keeps states beside its rows: not on a disk yet")
    if disk is not None and disk.page_bytes != layout.host_page_bytes:
        raise BadInput(
            f"disk has pages of {disk.page_bytes} bytes, {layout.name!r} has "
            f"{layout.host_page_bytes}"
        )
