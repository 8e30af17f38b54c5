"""One request's rows: where they come from, what is known of them, and the life of their sequence.

    open --> active <--> preempted        closed is final
               |  `--fork--> active
               `--> closed <-- preempted

An active sequence is on the device, with slots, active pages and a line in the page tables. A
preempted one keeps its host pages only: resuming it needs no recompute. A closed one leaves its
full pages as prefix cache, as far as their rows have arrived and their text is known.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ess.door.checks import as_array, in_range, whole
from ess.door.holding import Holding
from ess.door.owner import Owner
from ess.errors import BadInput, BadState
from ess.flashtrans.rows import scatter_rows
from ess.layout import ModelLayout
from ess.pool.ledger import Promise
from ess.pool.pages import PageIds
from ess.pool.prefix import page_hash, page_hashes, root_hash
from ess.units import PAGE_ROWS, div_ceil

State = Literal["active", "preempted", "closed"]


class Sequence:
    """Made by `Offload.open`. Its attributes are for reading; its verbs change them.

    `length` counts the leading positions whose rows every main layer has, as far as the host has
    learned; `cached_count` of them came from the prefix cache. `tokens` are what page hashes are
    made of, as far as known. Steps in `step_numbers` are not learned yet; they may have added up to
    `ahead_count` rows more. `arrival_count` grows with every import.
    """

    def __init__(
        self,
        owner: Owner,
        tokens: list[int],
        *,
        text_hash: bytes,
        length: int,
        length_max: int | None,
        promise: Promise,
        published_count: int,
    ) -> None:
        self.owner = owner
        self.number = owner.next_number()
        self.tokens = tokens
        self.length = length
        self.cached_count = length // PAGE_ROWS * PAGE_ROWS
        self.length_max = length_max
        self.promise = promise
        self.state: State = "active"
        self.step_numbers: tuple[int, ...] = ()
        self.ahead_count = 0
        self.arrival_count = 0
        self.holding = Holding(owner.pools, length_max=length_max, promise=promise)
        self._noticed_count = 0
        self._begun_count = 0
        self._text_hash = text_hash
        self._published_count = published_count

    def __repr__(self) -> str:
        return (
            f"<Sequence {self.number}: {self.state}, {self.length} rows, {len(self.tokens)} tokens>"
        )

    def __enter__(self) -> Sequence:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """An error inside the block gives the open step up, or `close` would hide the error."""
        if self.state == "closed":
            return
        step = self.owner.open_step
        if kind is not None and step is not None and self in step.sequences:
            step.abandon()
        self.close()

    # ---- what may be read

    @property
    def line(self) -> int:
        """Its line in the page tables, -1 unless it is active."""
        return self.holding.line

    @property
    def page_count(self) -> int:
        return self.holding.page_count

    @property
    def length_bound(self) -> int:
        """Where the next step starts at most."""
        return self.length + self.ahead_count

    @property
    def page_table(self) -> Tensor:
        """[pages] active pages, -1 padded: for the indexer."""
        self.require_state("active")
        return torch.from_numpy(self.owner.pools.tables.lines[self.line].copy())

    def host_rows(self, start: int, count: int) -> Tensor:
        """Rows of `LayerMemory.host` that hold `count` positions from `start` on."""
        self._require_span(start, count)
        return torch.from_numpy(self.holding.host_rows(start, count))

    def active_rows(self, start: int, count: int) -> Tensor:
        """Row ids of these positions: page * 64 + offset in `LayerMemory.key_pages`."""
        self.require_state("active")
        self._require_span(start, count)
        return torch.from_numpy(self.holding.row_ids(start, count))

    def _require_span(self, start: int, count: int) -> None:
        in_range("start", start, 0, self.page_count * PAGE_ROWS)
        in_range("count", count, 0, self.page_count * PAGE_ROWS - start)

    # ---- arrival: rows made elsewhere, then the working set

    def import_rows(self, layer: int, start: int, rows: Any) -> None:
        """Rows made elsewhere (prefill), any layer order: uint8 [n, row_bytes] from `start` on."""
        self._require("active", "preempted")
        latent, layout = self.owner.pools.latent, self.owner.pools.layout
        layout.check_layer(layer)
        array = as_array(rows, "rows", "uint8", (None, layout.row_bytes))
        to_host = self._importable(start, len(array), "rows")
        if not len(array):
            return
        stored = latent.is_stored(layer, to_host)
        if stored.any():
            raise BadInput(
                f"layer {layer}: row {start + int(stored.argmax())} was imported already"
            )
        scatter_rows(source=array, target=latent.rows[layer], target_rows=to_host)
        latent.mark_rows(layer, to_host)
        self.arrival_count += 1

    def import_keys(self, layer: int, start: int, keys: Any) -> None:
        """Index keys, a record for each position: values, then the scale."""
        self._require("active", "preempted")
        pools = self.owner.pools
        group = key_group(pools.layout, layer)
        array = as_array(keys, "keys", "uint8", (None, pools.index.keys.key_bytes))
        to_host = self._importable(start, len(array), "keys")
        if not len(array):
            return
        keyed = pools.latent.is_keyed(group, to_host)
        if keyed.any():
            raise BadInput(f"group {group}: key {start + int(keyed.argmax())} was imported already")
        pools.latent.keys.write(group, to_host, array)
        pools.latent.mark_keys(group, to_host)
        if self.state == "active":
            pools.index.keys.write(group, self.holding.row_ids(start, len(array)), array)
        self.arrival_count += 1

    def _importable(self, start: int, count: int, what: str) -> PageIds:
        low, high = self.cached_count, len(self.tokens)
        if not low <= whole("start", start) <= start + count <= high:
            raise BadInput(
                f"{what} {start}..{start + count - 1} of sequence {self.number}: "
                f"must lie within {low}..{high - 1} (what comes before is cached)"
            )
        return self.holding.host_rows(start, count)

    def warm(self, windows: Any) -> None:
        """Selections of the last prefill queries, [groups, windows, k] positions, oldest first."""
        self._require("active")
        self.refresh()
        shape = (self.owner.pools.layout.group_count, None, None)
        array = as_array(windows, "windows", "int32", shape)
        if array.size and not -1 <= array.min() <= array.max() < self.length:
            raise BadInput(
                f"windows select positions {array.min()}..{array.max()}, "
                f"must be -1..{self.length - 1}"
            )
        self.owner.placement.warm(self, array)

    def fill(self, *, row_max: int | None = None) -> int:
        """Copies rows into free slots while these last, of each layer group `row_max` at most;
        returns how many copies of rows were started."""
        self._require("active")
        if row_max is not None:
            in_range("row_max", row_max, 0, 1 << 31)
        self.refresh()
        return self.owner.placement.fill(self, row_max)

    # ---- life

    def preempt(self) -> None:
        """Gives up slots and index pages; the rows stay on the host."""
        self._require("active")
        self.refresh()
        self.holding.leave_device()
        self.state = "preempted"

    def resume(self) -> None:
        """Takes index pages again and reloads keys: nothing is computed anew. PoolFull if there is
        no room: then it stays preempted."""
        self._require("preempted")
        self.owner.pools.inflight.drain()
        self.refresh()
        self.holding.resume(length=self.length)
        self.state = "active"

    def fork(self) -> Sequence:
        """A second sequence with the same rows so far: full pages shared, the partial one copied.
        PoolFull if there is no room for it."""
        self._require("active")
        self.owner.pools.inflight.drain()
        self.refresh()
        child = Sequence(
            self.owner,
            self.tokens[: self.length],
            text_hash=self._text_hash,
            length=self.length,
            length_max=self.length_max,
            promise=self.promise,
            published_count=self._published_count,
        )
        shared = self.holding.host_pages[: self.length // PAGE_ROWS]
        child.holding.open(shared, div_ceil(self.length, PAGE_ROWS), length=self.length)
        if self.length % PAGE_ROWS:
            self._copy_page(child, len(shared))
        return child

    def _copy_page(self, child: Sequence, page: int) -> None:
        pools, here, there = self.owner.pools, self.holding, child.holding
        pools.latent.copy_page(int(here.host_pages[page]), int(there.host_pages[page]))
        lines = pools.tables.lines
        pools.index.keys.copy_page(int(lines[here.line, page]), int(lines[there.line, page]))

    def close(self) -> None:
        """Its full stored pages stay as prefix cache while there is room.

        BadState in a step: other sequences' answers are in it too, so the caller must commit or
        abandon it."""
        self.owner.require_thread()
        self.require_state("active", "preempted")
        self._require_no_step()
        self.refresh()
        if self.state == "active":
            self.holding.leave_device()
        self.state = "closed"

        def let_go() -> None:
            self.publish()
            self.holding.let_go()

        self.owner.pools.inflight.after(let_go)

    def _require(self, *states: State) -> None:
        self.owner.require()
        self.require_state(*states)
        self._require_no_step()

    def require_state(self, *states: State) -> None:
        if self.state not in states:
            raise BadState(f"sequence {self.number} is {self.state}, not {' or '.join(states)}")

    def _require_no_step(self) -> None:
        if self.step_numbers:
            raise BadState(
                f"sequence {self.number} is in step {self.step_numbers[0]}; commit it first"
            )

    # ---- what the door tells a sequence

    def refresh(self) -> None:
        """Takes notice of what has been imported since."""
        if self._noticed_count != self.arrival_count:
            self._noticed_count = self.arrival_count
            self.length = self.owner.pools.latent.leading_count(self.holding.host_pages)
            if self.state == "active":
                self.owner.pools.tables.lengths[self.line] = self.length
            self.publish()

    def check_start(self, start: int | None) -> None:
        """The next step starts behind the rows that are there. Where imported rows end early that
        is most likely a mistake of the caller, who would bring the row of another position; so
        then `start` must say it."""
        self.refresh()
        if start is not None and not self.length <= start <= self.length_bound:
            raise BadInput(f"sequence {self.number} goes on at {self.length_bound}, not at {start}")
        known_count = len(self.tokens) - 1
        if start is None and self._begun_count != self.arrival_count and self.length < known_count:
            rows = self.holding.host_rows(0, known_count)
            latent = self.owner.pools.latent
            there = [int(latent.is_stored(n, rows).sum()) for n in range(latent.layout.layer_count)]
            least, most = int(np.argmin(there)), int(np.argmax(there))
            raise BadState(
                f"sequence {self.number}: of {known_count} rows before its last token layer "
                f"{least} has {there[least]}, layer {most} has {there[most]}; import the others, "
                f"or say starts=[{self.length}]"
            )

    def joined(self, step_number: int, count: int) -> None:
        """A step brings `count` rows; the host will learn how many of them are kept."""
        self._begun_count = self.arrival_count
        self.step_numbers = (*self.step_numbers, step_number)
        self.ahead_count += count

    def learned(self, step_number: int, count: int, kept: int, ids: Many[int] | None) -> None:
        """Of the `count` rows that the step has brought, `kept` were kept."""
        assert self.step_numbers[0] == step_number, "steps are learned in their order"
        assert 0 <= kept <= count <= self.ahead_count, "rows were learned that no step brought"
        if ids is not None and len(self.tokens) >= self.length:
            self.tokens.extend(ids[len(self.tokens) - self.length :])
        self.length += kept
        self.ahead_count -= count
        self.step_numbers = self.step_numbers[1:]
        self.publish()

    def publish(self) -> None:
        """Publishes the pages that are complete and whose text is known, in order."""
        latent = self.owner.pools.latent
        full_count = min(self.length, len(self.tokens)) // PAGE_ROWS
        for page in range(self._published_count, full_count):
            host_page = int(self.holding.host_pages[page])
            if not latent.is_complete(host_page):
                return
            text = self.tokens[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
            self._text_hash = page_hash(self._text_hash, text)
            self._published_count = page + 1
            latent.publish(host_page, self._text_hash)


def open_sequence(
    owner: Owner,
    tokens: list[int],
    *,
    length_max: int | None,
    salt: bytes,
    promise: Promise,
    reuse_max: int | None,
) -> Sequence:
    """The last token is never cached: a step must compute from it what comes next."""
    owner.pools.inflight.settle()
    prefix, text_hash = _cached_prefix(owner, tokens[: len(tokens) - 1][:reuse_max], salt)
    sequence = Sequence(
        owner,
        tokens,
        text_hash=text_hash,
        length=len(prefix) * PAGE_ROWS,
        length_max=length_max,
        promise=promise,
        published_count=len(prefix),
    )
    page_count = div_ceil(len(tokens), PAGE_ROWS)
    sequence.holding.open(prefix, page_count, length=sequence.length)
    return sequence


def _cached_prefix(owner: Owner, tokens: list[int], salt: bytes) -> tuple[PageIds, bytes]:
    """Pages of the longest cached prefix of `tokens`, and its hash.

    With MTP its last page is left out: row p of the module was made with token p + 1, and the last
    row of a prefix saw another continuation.
    """
    hashes = page_hashes(tokens, salt=salt)
    pages = owner.pools.latent.prefix.find(hashes)
    if owner.pools.layout.mtp_layer_count:
        pages = pages[:-1]
    return np.array(pages, np.int32), [root_hash(salt), *hashes][len(pages)]


def key_group(layout: ModelLayout, layer: int) -> int:
    """The group whose index keys this layer owns."""
    layout.check_layer(layer)
    group = layout.group_of(layer)
    if layout.index is None or layout.groups[group][0] != layer:
        raise BadInput(f"layer {layer} of {layout.name} has no index keys of its own")
    return group
