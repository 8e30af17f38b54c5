"""One step: a batch of sequences that bring new rows, and what may be done with it, in this order.

    begin     pages for the new rows; a new age
    append    new rows of a layer into memory: their truth until they are stored
    resolve   a selection becomes hits, misses under way and rows read in place from the host
    seal      accepted rows leave for the host behind the step, rejected ones are gone
    learn     the host takes notice of what was accepted

Seal and learn together are a commit. Between them the device is ahead of the host, so that the next
step may begin before the host has read what this one accepted: `begin` provides pages for the most
that unlearned steps can have added, and takes its positions from the device's own lengths. The
accepted rows are stored at the end of their own step, not at the head of the next: a sequence that
is in no next step would otherwise need a store of its own, and slots of rejected rows are free for
the next step's claims. Nothing that an unlearned step touches may leave: a sequence refuses that.

A group's later layers take the resolution of its first layer, whose fetch started all their copies.
Until a layer has been appended its new positions do not exist for `resolve` (they are past the
length), so memory without its row cannot be attended by mistake.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from ess.door.checks import in_range, kept_counts, named, part_of, require_appended
from ess.door.owner import Owner
from ess.door.sequences.sequence import Sequence, key_layer
from ess.door.steps.arrays import Array, Brought, Kept, StepArrays, rows_of
from ess.door.steps.placement import Resolution
from ess.door.steps.step_answers import PartAnswer, Recording, Tokens, known_texts
from ess.errors import BadInput, BadState
from ess.pool.device_bytes import PARTS_MAX

StepState = Literal["open", "broken", "sealed", "learned"]


class Step:
    """Made by `Offload.begin`. Query numbers count through the sequences in batch order. A context
    manager: a step that is still open at the end of the block is given up.

    A verb that takes `queries` is about these, None: all of them. `append` and `resolve` take a
    `range`, and ranges of a layer follow each other in batch order.

    number          of the step; they count up
    state           "open", "sealed" or "learned"; "broken" behind an error in the middle of its end
    sequences       the batch
    lines           of each sequence, its line in the page tables
    query_counts    how many queries each sequence has
    query_count     all together, and pads behind them where the step has room for more
    row_counts      how many new rows each brings: as many, unless a row is of several tokens
    firsts          of each sequence, the number of its first query
    appended        layers whose new rows are all there
    keyed           key layers whose new index keys are all there

    Where a row is of several tokens, `queries` of verbs that take new rows are rows. Counts are the
    host's.
    These arrays are the device's, int32 with an entry for each query:

    row_ids         its new row: page * 64 + offset in `LayerMemory.key_pages`
    query_line      its sequence's line in the page tables
    query_start     the position at which its sequence starts in this step
    query_offset    its place among the queries of its sequence; where each brings a row, it is at
                    position query_start + query_offset
    query_stop      the length that it may select from, once the new rows have been appended
    positions       where its token is in its sequence's text
    """

    def __init__(
        self,
        owner: Owner,
        sequences: tuple[Sequence, ...],
        query_counts: list[int],
        room: int,
        brought: Brought | None = None,
    ) -> None:
        self.owner = owner
        self.number = owner.pools.sparse.begin_step()
        self.now = owner.pools.sparse.now
        self.state: StepState = "open"
        self.sequences = sequences
        self.lines = [sequence.holding.line for sequence in sequences]
        self.query_counts = tuple(query_counts)
        self.query_count = room
        self.row_counts = self.query_counts if brought is None else tuple(brought.row_counts)
        self.row_count = room if brought is None else sum(self.row_counts)
        self._brought = brought
        self.firsts = list(accumulate(query_counts[:-1], initial=0))
        self.arrays: StepArrays = owner.pools.step_arrays(
            self.lines, self.query_counts, room, brought
        )
        self.row_ids: Array = self.arrays.row_ids
        self.query_line: Array = self.arrays.query_line
        self.query_start: Array = self.arrays.query_start
        self.query_offset: Array = self.arrays.query_offset
        self.query_stop: Array = self.arrays.query_stop
        self._row_counts: dict[int, int] = {}
        self._key_counts: dict[int, int] = {}
        self._answers: dict[tuple[int, int], PartAnswer] = {}

    def __repr__(self) -> str:
        sequences = f"{len(self.sequences)} sequences, {self.query_count} queries"
        return f"<Step {self.number}: {self.state}, {sequences}>"

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *error: object) -> None:
        if self.state == "open":
            self.abandon()

    # ---- what may be read

    @property
    def appended(self) -> set[int]:
        if not self.row_count:
            return {*range(self.owner.pools.layout.layer_total)}
        return {layer for layer, count in self._row_counts.items() if count == self.row_count}

    @property
    def keyed(self) -> set[int]:
        return {layer for layer, count in self._key_counts.items() if count == self.row_count}

    @property
    def positions(self) -> Array:
        return self.arrays.positions

    @property
    def page_table(self) -> Tensor:
        """[queries, pages] active pages, -1 padded: for the indexer."""
        return self.arrays.page_table()

    def lengths(self, layer: int) -> Array:
        """What each query may select: new rows of this layer only once they are there."""
        return self.arrays.lengths(self._row_counts.get(layer, 0))

    # ---- per layer

    def append(
        self, layer: int, rows: Any, *, keys: Any = None, queries: range | None = None
    ) -> None:
        """New rows of this layer, uint8 [queries, row_bytes], and their index keys, uint8 [queries,
        layout.index.key_bytes], which the first layer of a group has."""
        self._require_open()
        pools, part = self.owner.pools, part_of(queries, self.row_count)
        pools.layout.check_layer(layer)
        width = pools.layout.row_of(layer).row_bytes
        array = self.arrays.given(rows, "rows", "uint8", (len(part), width))
        if not self.row_count:
            return
        self._require_next(f"layer {layer}", self._row_counts.get(layer, 0), part)
        if keys is not None:
            shape = len(part), pools.latent.keys.key_bytes
            keys = self.arrays.given(keys, "keys", "uint8", shape)
            self._require_keys_next(layer, part)
        self.owner.placement.append(self, layer, part, array, keys)
        self._count(layer, part, has_keys=keys is not None)

    def places(self, layer: int, *, queries: range | None = None) -> Tensor:
        """Rows of `LayerMemory.slots` for the new rows, int32: an engine whose kernels write them
        there, and keys to `row_ids` of `LayerMemory.key_pages`, says so by `wrote` and appends
        nothing. -1 for a pad."""
        self._require_open()
        self.owner.pools.layout.check_layer(layer)
        return self.owner.placement.places(self, layer, part_of(queries, self.row_count))

    def wrote(self, layer: int, *, keys: bool = False, queries: range | None = None) -> None:
        """New rows of this layer lie where `places` says, and with `keys` their index keys."""
        self._require_open()
        part = part_of(queries, self.row_count)
        if not self.row_count:
            return
        self._require_next(f"layer {layer}", self._row_counts.get(layer, 0), part)
        if keys:
            self._require_keys_next(layer, part)
        self.owner.placement.places(self, layer, part)
        self._count(layer, part, has_keys=keys)

    def wrote_each(self, layers: range) -> None:
        """`wrote` with keys, all new rows of neighbours that are each alone in their group."""
        self._require_open()
        layout = self.owner.pools.layout
        first = layout.group_of(layers.start)
        number = key_layer(layout, layers.start)
        assert layout.groups[first + len(layers) - 1] == (layers.stop - 1,), f"groups of {layers}"
        assert layout.key_groups[number + len(layers) - 1] == first + len(layers) - 1, "no keys"
        if not self.row_count:
            return
        numbers = range(number, number + len(layers))
        for names, counts in ((layers, self._row_counts), (numbers, self._key_counts)):
            if not counts.keys().isdisjoint(names):
                raise BadState(f"{layers} were appended in step {self.number} already, in part")
            counts.update(dict.fromkeys(names, self.row_count))

    def _require_keys_next(self, layer: int, part: range) -> None:
        layout = self.owner.pools.layout
        so_far = self._key_counts.get(key_layer(layout, layer), 0)
        self._require_next(f"group {layout.group_of(layer)}", so_far, part)

    def _count(self, layer: int, part: range, *, has_keys: bool) -> None:
        self._row_counts[layer] = part.stop
        if has_keys:
            self._key_counts[key_layer(self.owner.pools.layout, layer)] = part.stop

    def _require_next(self, name: str, so_far: int, part: range) -> None:
        if so_far == self.row_count:
            raise BadState(f"{name} was appended in step {self.number} already")
        if part.start != so_far:
            raise BadState(
                f"{name} has rows of {so_far} queries: the next part starts at query {so_far}, "
                f"not at {part.start}"
            )

    def resolve(
        self,
        layer: int,
        selection: Any,
        *,
        queries: range | None = None,
        workspace: int | None = None,
        waits: bool = False,
    ) -> Resolution:
        """Where the selected positions are; the missing ones are under way when this returns.

        `selection` is int32 [queries, k], ascending, -1 padded at its end. Layers that share a
        selection pass None after their group's first layer has been resolved. The answer lies in
        this `workspace`, by default how many parts of the group came before: name it when two
        halves of a step are in different layers at once, so that neither takes the other's.
        A caller that `waits` before it does anything else says so: then no other thread is woken
        for the copy.
        """
        self._require_open()
        group, member = self.owner.pools.layout.place_of(layer)
        part = self._part(queries)
        if member == 0:
            answer = self._lead(layer, group, part, selection, workspace, waits=waits)
        else:
            answer = self._follow(layer, group, part, selection)
        if self._row_counts.get(layer, 0) < answer.appended_min:
            raise BadState(f"layer {layer}: append its new rows first, the selection may name them")
        resolution = answer.resolutions[member]
        if resolution.fetch is not None:
            resolution.fetch.ask()
        return resolution

    def observe(
        self, layer: int, selection: Any, logits: Any, *, queries: range | None = None
    ) -> None:
        """Takes the indexer's logits for every position, and the selection made from them.

        `logits` is float32 [queries, positions]. Slots that give way by score follow it, so it
        comes before `resolve`; an offload that does not want scores refuses it.
        """
        self._require_open()
        pools, part = self.owner.pools, self._part(queries)
        pools.layout.check_layer(layer)
        if pools.sizes.evict != "score":
            raise BadState(f"evict is {pools.sizes.evict!r}: no scores are kept")
        array = self._selection(selection, len(part))
        scores = self.arrays.given(logits, "logits", "float32", (len(part), None))
        self.owner.placement.observe(self, layer, part, array, scores)

    def _lead(
        self,
        layer: int,
        group: int,
        part: range,
        selection: Any,
        workspace: int | None,
        *,
        waits: bool,
    ) -> PartAnswer:
        if selection is None:
            raise BadInput(
                f"layer {layer} is the first of its group and needs a selection; only layers that "
                f"share one pass None"
            )
        array = self._selection(selection, len(part))
        before = [answer for (other, _), answer in self._answers.items() if other == group]
        self._require_behind(layer, part, [answer.queries for answer in before])
        if workspace is None and len(before) >= PARTS_MAX:
            raise BadInput(
                f"layer {layer}: {named(part)} would be part {len(before) + 1} of group {group} "
                f"in this step, at most {PARTS_MAX}"
            )
        chosen = len(before) if workspace is None else workspace
        in_range(f"the workspace of group {group}", chosen, 0, PARTS_MAX - 1)
        for answer in before:
            if answer.workspace == chosen:
                raise BadState(f"workspace {chosen} of group {group} has another part's answer")
        resolutions = self.owner.placement.resolve(
            self, group, part, array, workspace=chosen, waits=waits
        )
        appended_min = self._row_counts.get(layer, 0)
        if self.arrays.row_offset is self.arrays.query_offset:
            appended_count = min(appended_min, part.stop)
            appended_min = appended_count if appended_count > part.start else 0
        answer = self._answers[group, part.start] = PartAnswer(
            part, chosen, appended_min, resolutions
        )
        return answer

    def _require_behind(self, layer: int, part: range, resolved: list[range]) -> None:
        for other in resolved:
            if part.start < other.stop and other.start < part.stop:
                raise BadState(f"layer {layer}: {named(other)} are resolved already")
        if resolved and part.start < resolved[-1].stop:
            raise BadState(
                f"layer {layer}: {named(resolved[-1])} are resolved, and {named(part)} come "
                f"before them: resolve ranges in batch order"
            )

    def _follow(self, layer: int, group: int, part: range, selection: Any) -> PartAnswer:
        leader = self.owner.pools.layout.groups[group][0]
        if selection is not None:
            raise BadInput(f"layer {layer} shares the selection of layer {leader}: pass None")
        answer = self._answers.get((group, part.start))
        if answer is None:
            raise BadState(f"resolve layer {leader} before layer {layer}: they share a selection")
        if answer.queries != part:
            raise BadInput(
                f"layer {layer}: layer {leader} has resolved {named(answer.queries)}, "
                f"not {named(part)}"
            )
        return answer

    def locate(
        self, layer: int, selection: Any, *, queries: Many[int] | Tensor | None = None
    ) -> Tensor:
        """Slots of the selected rows that are resident, -1 where one is not. Nothing is fetched.
        On a device `queries` may be an int32 tensor there."""
        self._require_open()
        self.owner.pools.layout.check_layer(layer)
        chosen: Any = range(self.query_count) if queries is None else queries
        if isinstance(chosen, Tensor):
            chosen = self.arrays.given(chosen, "queries", "int32", (None,))
        else:
            for query in chosen:
                in_range("a query", query, 0, self.query_count - 1)
        array = self._selection(selection, len(chosen))
        return self.owner.placement.locate(self, layer, chosen, array)

    def locate_all(
        self, layer: int, selection: Any, *, queries: range | None = None
    ) -> Tensor | None:
        """`locate`, for an attention over all of it; None when a selected row is absent."""
        part, array = self._selected(layer, selection, queries)
        return self.owner.placement.locate_all(self, layer, part, array)

    def host_codes(self, layer: int, selection: Any, *, queries: range | None = None) -> Tensor:
        """The selection as codes that read the host's rows, even where a row is resident: for
        checks."""
        part, array = self._selected(layer, selection, queries)
        return self.owner.placement.host_codes(self, layer, part, array)

    def _selected(self, layer: int, selection: Any, queries: range | None) -> tuple[range, Array]:
        self._require_open()
        self.owner.pools.layout.check_layer(layer)
        part = self._part(queries)
        return part, self._selection(selection, len(part))

    def _selection(self, selection: Any, query_count: int) -> Array:
        shape = query_count, self.owner.pools.layout.top_k
        return self.arrays.given(selection, "selection", "int32", shape)

    def _part(self, queries: range | None) -> range:
        return part_of(queries, self.query_count)

    # ---- graphs of a device

    def record(self) -> Recording:
        """A recording of the step's calls, for steps that replay the graph into which they were
        captured. Compute waits for all fetches: the last call of a capture."""
        self._require_open()
        counts = dict(self._row_counts), dict(self._key_counts)
        placed = self.owner.placement.record(self)
        return Recording(self.query_count, *counts, placed)

    def replay(self, recording: Recording) -> None:
        """A graph does all that was recorded; this step is ready to be sealed."""
        self._require_open()
        if recording.query_count != self.query_count or self._row_counts:
            raise BadState(
                f"step {self.number} has {self.query_count} queries and {len(self._row_counts)} "
                f"layers appended; what was recorded has {recording.query_count} queries"
            )
        self.owner.placement.replay(self, recording.placed)
        self._row_counts = dict(recording.row_counts)
        self._key_counts = dict(recording.key_counts)

    # ---- its end

    def commit(self, *, accepted: Many[int], tokens: Tokens = None) -> None:
        """Keep the first `accepted` new rows of each sequence; the others are gone. Where a row is
        of several tokens, `accepted` counts tokens, and the rows that they complete are kept.

        `tokens` are the ids that the kept rows were computed from: of each sequence exactly
        `accepted` ids. The first is the pending token, known already; a bonus token, sampled by
        the step and without a row yet, is not among them. Without `tokens` nothing is lost but
        prefix cache: it takes pages whose ids are known.
        """
        self._require_open()
        if self.owner.sealed:
            raise BadState(f"learn step {self.owner.sealed[0].number} before this commit")
        known_texts(self.sequences, kept_counts(accepted, self.query_counts), tokens)
        self.seal(accepted=accepted)
        self.learn(accepted=accepted, tokens=tokens)

    def abandon(self) -> None:
        """Give the step up: none of its rows are kept."""
        self.commit(accepted=[0] * len(self.sequences))

    def seal(self, *, accepted: Many[int] | Tensor) -> None:
        """The device's half of `commit`: rows leave or go, the next step may begin. After an error
        in the middle of that (memory, a driver, Ctrl-C) the offload can only be closed.

        On a device `accepted` may be a tensor, int32 [sequences], that the host has not read."""
        self._require_open()
        owner, kept = self.owner, self.arrays.kept(accepted, self.query_counts)
        rows = rows_of(self._brought, kept)
        self._require_complete(rows)
        self.state = "broken"
        owner.placement.seal(self, rows)
        self.arrays.sealed(kept)
        self.state = "sealed"
        self._answers.clear()
        owner.open_step = None
        owner.sealed.append(self)

    def learn(self, *, accepted: Many[int], tokens: Tokens = None) -> None:
        """The host's half of `commit`, for sealed steps in their order. After an error in the
        middle of that the offload can only be closed, as in `seal`."""
        self.owner.require()
        self.require_unbroken()
        if self.state != "sealed":
            raise BadState(f"step {self.number} is {self.state}, not sealed")
        oldest = self.owner.sealed[0]
        if oldest is not self:
            raise BadState(f"learn step {oldest.number} before step {self.number}")
        kept = kept_counts(accepted, self.query_counts)
        texts = known_texts(self.sequences, kept, tokens)
        self.arrays.learned(kept, number=self.number)
        rows = kept if self._brought is None else self._brought.rows_of(kept)
        self.state = "broken"
        for place, sequence in enumerate(self.sequences):
            ids = None if texts is None else texts[place]
            counts = self.row_counts[place], rows[place]
            sequence.progress.learned(self.number, *counts, ids, text=kept[place])
        self.owner.sealed.popleft()
        self.state = "learned"

    def _require_complete(self, accepted: Kept) -> None:
        """Accepted rows exist in every main layer; the MTP layer may lag."""
        if isinstance(accepted, list) and not any(accepted):
            return
        require_appended(self.number, self.owner.pools.layout, self._row_counts, self.row_count)

    def require_unbroken(self) -> None:
        if self.state == "broken":
            raise BadState(f"step {self.number} broke off at its end: close the offload")

    def _require_open(self) -> None:
        self.owner.require()
        self.require_unbroken()
        if self.state != "open":
            raise BadState(f"step {self.number} is {self.state}")

    def check(self) -> None:
        assert sum(self.query_counts) <= self.query_count, f"{self!r}: {self.query_counts}"
        for counts_of in (self._row_counts, self._key_counts):
            assert all(0 < n <= self.row_count for n in counts_of.values()), counts_of
        for sequence in self.sequences:
            assert self.number in sequence.step_numbers, f"{sequence!r} does not know {self!r}"
            sequence.holding.check()
