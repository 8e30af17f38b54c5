"""One request's rows: where they come from, what is known of them, and the life of their sequence.

    open --> active <--> preempted <-- open(on_device=False)        closed is final
               |  `--fork--> active
               `--> closed <-- preempted

An active sequence is on the device, with slots, active pages and a line in the page tables. A
preempted one keeps its host pages only: resuming it needs no recompute. One that waits for rows
begins so. A closed one leaves its full pages as prefix cache, as far as their rows have arrived and
their text is known.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Literal

import torch
from torch import Tensor

from ess.array_types import PageIds
from ess.door.checks import as_array, check_sets, in_range, whole
from ess.door.memory.shelf import PageLoad, Shelf
from ess.door.owner import Owner
from ess.door.sequences.holding import Holding
from ess.door.sequences.kept import kept_ends
from ess.door.sequences.progress import Progress, Start
from ess.door.sequences.shelved import Shelved, put_away
from ess.errors import BadInput, BadState, Unavailable
from ess.flashtrans.rows import scatter_rows
from ess.layout import ModelLayout
from ess.pool.disk.tier import Claim
from ess.pool.index import NONE
from ess.pool.ledger import Promise
from ess.pool.prefix import page_hashes
from ess.pool.warmup import WindowSet
from ess.units import PAGE_ROWS, div_ceil

State = Literal["active", "preempted", "closed"]


class Sequence:
    """One request's rows. Made by `Offload.open`; its attributes are for reading, its verbs change
    them.

    `number` counts the sequences that this offload has opened. `state` is "active", "preempted" or
    "closed". `salt`, `length_max` and `promise` are what it was opened with.
    """

    def __init__(
        self,
        owner: Owner,
        start: Start,
        *,
        salt: bytes,
        length_max: int | None,
        promise: Promise,
    ) -> None:
        self.owner = owner
        self.number = owner.next_number()
        self.salt = salt
        self.length_max = length_max
        self.promise = promise
        self._is_closed = False
        self.holding = Holding(owner.pools, length_max=length_max, promise=promise)
        self.progress = Progress(owner.pools, self.holding, start, self.number)
        self._load: PageLoad | None = None
        self._shelved: Shelved | None = None

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.number}: {self.state}, {self.length} rows, {len(self.tokens)} tokens>"
        )

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """An error inside the block gives the open step up, or `close` would hide the error."""
        step = self.owner.open_step
        if kind is not None and step is not None and self in step.sequences:
            if step.state == "broken":
                return
            step.abandon()
        self.close()

    # ---- what may be read

    @property
    def state(self) -> State:
        if self._is_closed:
            return "closed"
        return "preempted" if self.holding.line == NONE else "active"

    @property
    def tokens(self) -> list[int]:
        """The ids that are known, of positions 0, 1, ...: what page hashes are made of."""
        return self.progress.tokens

    @property
    def length(self) -> int:
        """How many leading positions have rows in every main layer, as far as the host has learned.
        An import counts once the sequence is used again (begin, warm, fill, preempt, fork)."""
        return self.progress.length

    @property
    def text_length(self) -> int:
        """How many tokens these rows are of: where a row is of several, also those that wait for
        their row."""
        return self.progress.text_length

    @property
    def cached_count(self) -> int:
        """How many leading tokens already had rows, in full pages from the prefix cache or, for a
        fork, from the sequence that was forked. `import_rows` starts after them."""
        return self.progress.cached_count * self.owner.pools.layout.row_tokens

    @property
    def is_loading(self) -> bool:
        """Pages of it are on their way from the disk, as far as `Offload.load` has seen."""
        return self._load is not None

    @property
    def step_numbers(self) -> tuple[int, ...]:
        """The steps of this sequence that are not learned yet."""
        return self.progress.step_numbers

    @property
    def ahead_count(self) -> int:
        """How many rows the steps in `step_numbers` may have added at most."""
        return self.progress.ahead_count

    @property
    def arrival_count(self) -> int:
        """Grows with every import that brings something."""
        return self.progress.arrival_count

    @property
    def line(self) -> int:
        """Its line in the page tables, -1 unless it is active."""
        return self.holding.line

    @property
    def page_count(self) -> int:
        """How many pages of 64 positions it has on the host."""
        return self.holding.page_count

    @property
    def length_bound(self) -> int:
        """The highest position at which the next step may start."""
        return self.progress.length + self.progress.ahead_count

    @property
    def page_table(self) -> Tensor:
        """[pages] active pages, -1 padded: for the indexer."""
        require_state(self, "active")
        return torch.from_numpy(self.owner.pools.tables.lines[self.line].copy())

    @property
    def beside(self) -> Tensor:
        """The state that its engine keeps beside its rows, uint8
        [layout.request_state_bytes(length_max)]: for the engine to write; zeros at first, the first
        layout.state_bytes of them. It is there while the sequence is active; a fork has a copy, and
        preemption takes it to the host. With a cached prefix it is what was kept there."""
        require_state(self, "active")
        if self.owner.pools.states is None:
            raise BadInput(f"{self.owner.pools.layout.name!r} keeps nothing beside its rows")
        return torch.from_numpy(self.holding.state)

    def reached(self, text_length: int) -> None:
        """Tells that rows of its first `text_length` tokens have been imported, and that what it
        has beside them is of as many tokens. Needed only where it has something beside rows, or a
        row is of several tokens: there the rows alone do not tell. A copy of what is beside them is
        kept for other prompts, at each of `kept_ends`."""
        self._require("active")
        self.progress.reached(whole("text_length", text_length))

    def kept_ends(self, start: int, stop: int) -> list[int]:
        """Where, among the lengths behind `start` up to `stop`, an engine stops for `reached`."""
        layout = self.owner.pools.layout
        if self.owner.pools.states is None:
            return []
        return kept_ends(
            start, stop, prompt_end=len(self.tokens) - 1, page_tokens=layout.page_tokens
        )

    def host_rows(self, start: int, count: int) -> Tensor:
        """Rows of `LayerMemory.host` that hold `count` positions from `start` on."""
        self._require_span(start, count)
        return torch.from_numpy(self.holding.host_rows(start, count))

    def active_rows(self, start: int, count: int) -> Tensor:
        """Row ids of these positions: page * 64 + offset in `LayerMemory.key_pages`."""
        require_state(self, "active")
        self._require_span(start, count)
        return torch.from_numpy(self.holding.row_ids(start, count))

    def _require_span(self, start: int, count: int) -> None:
        in_range("start", start, 0, self.page_count * PAGE_ROWS)
        in_range("count", count, 0, self.page_count * PAGE_ROWS - start)

    # ---- arrival: pages from the disk, rows made elsewhere, then the working set

    def load(self, claim: Claim) -> None:
        """Loads the claimed texts into the pages after the cached ones; for `open_sequence`."""
        assert self._load is None, "a sequence is loaded once"
        first = self.progress.cached_count // PAGE_ROWS
        pages = self.holding.host_pages[first : first + len(claim.contents)]
        self._load = self._shelf.load_of(claim, pages, self._loaded)
        self._shelf.bring(self._load)

    @property
    def loaded_count(self) -> int | None:
        """How many of the pages that it waits for came whole; None while some are on their way.
        With MTP a page that no page follows does not count, as of a cached prefix."""
        if self._load is None:
            return 0
        if not self._load.loading.is_done:
            return None
        count, layout = self._load.loading.count, self.owner.pools.layout
        is_cut = layout.has_mtp and count < len(self._load.pages)
        return max(0, count - is_cut)

    def land(self, page_count: int) -> None:
        """The first `page_count` of the pages that it waits for are there from now on; it waits for
        no others."""
        if self._load is not None:
            self._shelf.land(self._load, page_count)

    def wait(self) -> None:
        """Waits until all pages that it needs have come from the disk. The next `Offload.load`
        marks them."""
        if self._load is not None:
            self._load.loading.wait()

    def _loaded(self, count: int) -> None:
        self._load = None
        if count:
            self.progress.loaded(count)

    @property
    def _shelf(self) -> Shelf:
        shelf = self.owner.pools.shelf
        assert shelf is not None, "nothing comes from a disk that is not there"
        return shelf

    def import_rows(self, layer: int, start: int, rows: Any) -> None:
        """Rows made elsewhere (prefill), any layer order: uint8 [n, row_bytes] from `start` on."""
        self._require("active", "preempted")
        latent, layout = self.owner.pools.latent, self.owner.pools.layout
        layout.check_layer(layer)
        array = as_array(rows, "rows", "uint8", (None, layout.row_of(layer).row_bytes))
        to_host = self._importable(start, len(array), "rows")
        if not len(array):
            return
        stored = latent.is_stored(layer, to_host)
        if stored.any():
            raise BadInput(
                f"layer {layer}: row {start + int(stored.argmax())} was imported already"
            )
        if latent.writes:
            scatter_rows(source=array, target=latent.layers[layer], target_rows=to_host)
        latent.mark_rows(layer, to_host)
        self.progress.arrival_count += 1

    def place_keys(self, layer: int, start: int, keys: Any) -> None:
        """Puts keys that a device has made where its queries read them. `import_keys`, which is
        told that they are placed, brings them to the host later."""
        self._require("active")
        pools = self.owner.pools
        number = key_layer(pools.layout, layer)
        pools.index.write_keys(number, self.holding.row_ids(start, len(keys)), keys)

    def import_keys(self, layer: int, start: int, keys: Any, *, is_placed: bool = False) -> None:
        """Index keys of the first layer of a group, uint8 [n, layout.index.key_bytes] from `start`
        on: a record for each position, its values, then its scale (fp8)."""
        self._require("active", "preempted")
        pools = self.owner.pools
        number = key_layer(pools.layout, layer)
        array = as_array(keys, "keys", "uint8", (None, pools.latent.keys.key_bytes))
        to_host = self._importable(start, len(array), "keys")
        if not len(array):
            return
        keyed = pools.latent.is_keyed(number, to_host)
        if keyed.any():
            raise BadInput(f"layer {layer}: key {start + int(keyed.argmax())} was imported already")
        pools.latent.write_keys(number, to_host, array)
        if self.state == "active" and not is_placed:
            pools.index.write_keys(number, self.holding.row_ids(start, len(array)), array)
        self.progress.arrival_count += 1

    def mark_stored(self, layer: int, start: int, count: int) -> None:
        """Rows of this layer, and keys where it has its own, that ranks of a team have written
        where this sequence has them (`MappedRows`): from now on they count as imported."""
        self._require("active")
        latent, layout = self.owner.pools.latent, self.owner.pools.layout
        layout.check_layer(layer)
        to_host = self._importable(start, count, "rows")
        assert not latent.is_stored(layer, to_host).any(), f"layer {layer}: rows came twice"
        latent.mark_rows(layer, to_host)
        group, member = layout.place_of(layer)
        number = layout.key_layer_of(group)
        if number is not None and not member:
            assert not latent.is_keyed(number, to_host).any(), f"layer {layer}: keys came twice"
            latent.mark_keys(number, to_host)
        self.progress.arrival_count += 1

    def _importable(self, start: int, count: int, what: str) -> PageIds:
        low = self.progress.cached_count
        high = self.owner.pools.layout.rows_of(len(self.tokens))
        if not low <= whole("start", start) <= start + count <= high:
            raise BadInput(
                f"{what} {start}..{start + count - 1} of sequence {self.number}: "
                f"must lie within {low}..{high - 1} (what comes before is cached)"
            )
        return self.holding.host_rows(start, count)

    def warm(self, windows: Any) -> None:
        """Copies rows that the last prefill queries selected into slots. `windows` is int32,
        [groups, windows, k] positions, -1 padded, oldest window first, and contiguous (an expanded
        tensor is not: call its `.contiguous()`)."""
        self._require("active")
        self.progress.refresh()
        shape = (self.owner.pools.layout.group_count, None, None)
        array = as_array(windows, "windows", "int32", shape)
        if array.size and not -1 <= array.min() <= array.max() < self.length:
            raise BadInput(
                f"windows select positions {array.min()}..{array.max()}, "
                f"must be -1..{self.length - 1}"
            )
        self.owner.placement.warm(self, array)

    def warm_from(self, sets: Many[WindowSet], window_count: int) -> None:
        """`warm`, from what a handoff brings: for each group the positions that its windows select,
        ascending, and the last of the `window_count` windows that selects each, from the oldest."""
        self._require("active")
        self.progress.refresh()
        check_sets(
            sets,
            group_count=self.owner.pools.layout.group_count,
            length=self.length,
            window_count=window_count,
        )
        self.owner.placement.warm_from(self, sets, window_count)

    def fill(self, *, row_max: int | None = None) -> int:
        """Copies rows into free slots while these last, of each layer group `row_max` at most.

        Returns how many rows were started, added up over the groups; a row of a group counts once,
        however many layers share the group."""
        self._require("active")
        if row_max is not None:
            in_range("row_max", row_max, 0, 1 << 31)
        self.progress.refresh()
        return self.owner.placement.fill(self, row_max)

    # ---- life

    def preempt(self) -> None:
        """Gives up slots and index pages; the rows stay on the host."""
        self._require("active")
        self.progress.refresh()
        self.holding.save_state()
        self.holding.leave_device()

    def shelve(self, page_max: int) -> int:
        """Gives up leading host pages too, at most `page_max`, as far as they are on the disk or
        get there within a second; returns how many. `resume` brings them back."""
        self._require("preempted")
        self.owner.pools.inflight.drain()
        self.progress.refresh()
        count = self.progress.published_count
        size = self.owner.pools.layout.page_tokens
        contents = page_hashes(self.tokens[: count * size], salt=self.salt, page_tokens=size)
        before = self.page_count
        self._shelved = put_away(self.owner.pools, self.holding, contents, page_max=page_max)
        return before - self.page_count

    @property
    def is_shelved(self) -> bool:
        """Pages of it are on the disk only."""
        return self._shelved is not None

    def _bring_back(self) -> None:
        if self._shelved is not None:
            if not self._shelved.bring_back():
                raise Unavailable(f"sequence {self.number}: pages that were on disk cannot be read")
            self._shelved = None

    def resume(self) -> None:
        """Takes index pages again and reloads keys: nothing is recomputed. PoolFull if there is no
        room: then it stays preempted. Unavailable where pages that it had on disk are lost."""
        if self._load is not None:
            self._shelf.wait(self._load)
        require_state(self, "preempted")
        self._bring_back()
        self._require("preempted")
        self.owner.pools.inflight.drain()
        self.progress.refresh()
        self.holding.resume(length=self.length, text=self.text_length)

    def fork(self) -> Sequence:
        """A second sequence with the same rows so far: full pages shared, the partial one copied.
        PoolFull if there is no room for it.

        It knows the tokens of these rows only: a pending token, whose row is still to come, is not
        taken over; name it in the `tokens` of the fork's own commit. Its `cached_count` counts the
        rows of its full pages, which it shares."""
        self._require("active")
        self.owner.pools.inflight.drain()
        self.progress.refresh()
        start = Start(
            tokens=self.tokens[: self.text_length],
            length=self.length,
            text_length=self.text_length,
            text_hash=self.progress.text_hash,
            published_count=self.progress.published_count,
        )
        child = Sequence(
            self.owner, start, salt=self.salt, length_max=self.length_max, promise=self.promise
        )
        shared = self.holding.host_pages[: self.length // PAGE_ROWS]
        page_count = max(1, div_ceil(self.length, PAGE_ROWS))
        child.holding.open(shared, page_count, length=self.length, text=self.text_length)
        try:
            if self.length % PAGE_ROWS:
                self.holding.copy_page(child.holding, len(shared))
            self.holding.copy_state(child.holding)
        except BaseException:
            child.discard()
            raise
        if self.progress.is_withheld:
            child.progress.withhold()
        return child

    def close(self) -> None:
        """Its full stored pages stay as prefix cache while there is room. A second call does
        nothing.

        BadState in a step: other sequences' answers are in it too, so the caller must commit or
        abandon it."""
        if self.state == "closed":
            return
        self.owner.require_thread()
        self._require_no_step()
        if self._load is not None:
            self._shelf.give_up(self._load)
        if self._shelved is not None:
            self._shelved.let_go()
        else:
            self.progress.refresh()
        if self.state == "active":
            self.holding.leave_device()
        self._is_closed = True

        def let_go() -> None:
            if self._shelved is None:
                self.progress.publish()
            if self.owner.pools.shelf is not None:
                self.owner.pools.shelf.used(self.holding.host_pages)
            self.holding.let_go()

        self.owner.pools.inflight.after(let_go)

    def discard(self) -> None:
        """Closes it after an error; nothing that it brought stays as cached prefix."""
        if self.state != "closed":
            if self._load is not None:
                self._shelf.drop(self._load)
            self.progress.withhold()
            self.close()

    def _require(self, *states: State) -> None:
        self.owner.require()
        require_state(self, *states)
        if self._load is not None or self._shelved is not None:
            raise BadState(f"sequence {self.number} waits for pages from the disk; resume it first")
        self._require_no_step()

    def _require_no_step(self) -> None:
        if self.step_numbers:
            self.owner.require_unbroken()
            oldest, step = self.step_numbers[0], self.owner.open_step
            is_open = step is not None and step.number == oldest
            verbs = "commit or abandon" if is_open else "learn"
            raise BadState(f"sequence {self.number} is in step {oldest}; {verbs} it first")


def require_state(sequence: Sequence, *states: State) -> None:
    if sequence.state not in states:
        raise BadState(f"sequence {sequence.number} is {sequence.state}, not {' or '.join(states)}")


def key_layer(layout: ModelLayout, layer: int) -> int:
    """The number of its index keys among those of all layers."""
    group, member = layout.place_of(layer)
    number = layout.key_layer_of(group)
    if number is None or member:
        raise BadInput(f"layer {layer} of {layout.name!r} has no index keys of its own")
    return number
