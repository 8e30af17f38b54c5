"""An offload and a trivial model of it, driven by one stream of random decisions.

The model is a dictionary: text -> row. A row's bytes are a hash of (layer, all tokens up to its
position), so two sequences with one prefix have equal rows, a fork diverges with its tokens, and a
row of another prompt, layer, position or a stale version can never look right. Every operation is
legal or must be refused with a typed error; after each, the pools audit themselves.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

import numpy as np
import pytest

from ess.door import Offload, Resolution, Sequence, Step
from ess.errors import BadInput, BadState, PoolFull
from ess.kernels.streams import Lane
from ess.layout import IndexCodec, ModelLayout, RowCodec
from tests.support.manual_lane import ManualLane
from tests.support.move_budget import move_budget

ROW_BYTES = 24
TOP_K = 24

SINGLE = ModelLayout(
    name="test-single",
    layer_count=3,
    groups=((0,), (1,), (2,)),
    row=RowCodec(form="opaque", opaque_bytes=ROW_BYTES),
    index=None,
    top_k=TOP_K,
    slot_floor=16,
)
GROUPED = ModelLayout(
    name="test-grouped",
    layer_count=4,
    groups=((0,), (1, 2, 3), (4,)),
    row=RowCodec(form="opaque", opaque_bytes=ROW_BYTES),
    index=IndexCodec(form="fp8", key_dim=8, head_count=1),
    top_k=TOP_K,
    mtp_layer_count=1,
    slot_floor=16,
)


@dataclass(eq=False)
class Twin:
    """A live sequence and the text it stands for."""

    real: Sequence
    tokens: list[int]
    prompt_count: int


def row_bytes(layer: int, tokens: list[int], position: int, width: int = ROW_BYTES) -> bytes:
    text = np.array([layer, *tokens[: position + 1]], np.int64).tobytes()
    return hashlib.blake2b(text, digest_size=width).digest()


class World:
    def __init__(self, layout: ModelLayout, seed: int, *, lane: Lane | None = None) -> None:
        self.layout = layout
        self.random = random.Random(seed)
        self.offload = Offload.create(
            layout,
            slot_bytes=layout.group_count
            * layout.group_layers_max
            * 64
            * ROW_BYTES
            * (1 + seed % 2),
            host_bytes=layout.host_page_bytes * 24,
            index_bytes=layout.index_page_bytes * 18,
            sequence_max=6,
            length_max=512,
            query_max=16,
            lane=lane or ManualLane(seed=seed, delay_max=4),
            poison=True,
        )
        self.active: list[Twin] = []
        self.preempted: list[Twin] = []
        self.refused_count = 0
        self.reused_count = 0
        self.late_count = 0
        self._unlearned: list[tuple[Step, list[int], list[list[int]] | None]] = []
        self._rows: dict[tuple[int, tuple[int, ...]], bytes] = {}

    # ---- the model

    def row(self, layer: int, tokens: list[int], position: int, width: int = ROW_BYTES) -> bytes:
        key = (layer * 1000 + width, tuple(tokens[: position + 1]))
        if key not in self._rows:
            if len(self._rows) > 50_000:
                self._rows.clear()
            self._rows[key] = row_bytes(layer, tokens, position, width)
        return self._rows[key]

    def rows(self, layer: int, tokens: list[int], start: int, count: int) -> np.ndarray:
        made = b"".join(self.row(layer, tokens, start + i) for i in range(count))
        return np.frombuffer(made, np.uint8).reshape(count, ROW_BYTES).copy()

    def keys(self, layer: int, tokens: list[int], start: int, count: int) -> np.ndarray:
        width = self.layout.index.key_bytes
        made = b"".join(self.row(layer, tokens, start + i, width) for i in range(count))
        return np.frombuffer(made, np.uint8).reshape(count, width).copy()

    # ---- operations

    def open(self) -> None:
        family = self.random.randrange(3)
        count = self.random.choice([1, 5, 63, 64, 65, 100, 129, 200])
        tokens = [family * 10_000 + i for i in range(count)]
        if self.random.random() < 0.5:
            tokens[-1] = self.random.randrange(10**6)
        longest = self.random.choice([None, count, min(count + 40, 512)])
        try:
            real = self.offload.open(tokens, length_max=longest)
        except PoolFull:
            self.refused_count += 1
            return
        assert real.cached_count % 64 == 0
        assert real.cached_count < len(tokens)
        self.reused_count += real.cached_count > 0
        twin = Twin(real, tokens, count - self.random.randrange(2) if count > 1 else 1)
        self.active.append(twin)
        self._import(twin)

    def _import(self, twin: Twin) -> None:
        layers = list(range(self.layout.layer_total))
        self.random.shuffle(layers)
        for layer in layers:
            cut = self.random.randint(twin.real.cached_count, twin.prompt_count)
            spans = [(cut, twin.prompt_count), (twin.real.cached_count, cut)]
            for start, stop in spans:
                if stop > start:
                    rows = self.rows(layer, twin.tokens, start, stop - start)
                    twin.real.import_rows(layer=layer, start=start, rows=rows)
        for group in self.layout.groups if self.layout.index else ():
            start, stop = twin.real.cached_count, twin.prompt_count
            if stop > start:
                keys = self.keys(group[0], twin.tokens, start, stop - start)
                twin.real.import_keys(layer=group[0], start=start, keys=keys)

    def warm(self) -> None:
        twin = self._any_active()
        if twin is None:
            return
        shape = (self.layout.group_count, self.random.randint(1, 6), 12)
        windows = np.full(shape, -1, np.int32)
        length = self.length(twin)
        for group in range(shape[0]):
            for window in range(shape[1]):
                chosen = self._positions(length, 12)
                windows[group, window, : len(chosen)] = chosen
        twin.real.warm(windows)

    def fill(self) -> None:
        twin = self._any_active()
        if twin is not None:
            twin.real.fill(row_max=self.random.choice([None, 1, 10]))

    def refill(self) -> None:
        """Also while a step is sealed and not learned."""
        self.offload.refill([twin.real for twin in self.active])

    def preempt(self) -> None:
        twin = self._any_active()
        if twin is not None:
            twin.real.preempt()
            self.active.remove(twin)
            self.preempted.append(twin)

    def resume(self) -> None:
        if not self.preempted:
            return
        twin = self.random.choice(self.preempted)
        try:
            twin.real.resume()
        except PoolFull:
            self.refused_count += 1
            assert twin.real.state == "preempted"
            return
        self.preempted.remove(twin)
        self.active.append(twin)

    def fork(self) -> None:
        twin = self._any_active()
        if twin is None or self.length(twin) == 0:
            return
        try:
            child = twin.real.fork()
        except PoolFull:
            self.refused_count += 1
            return
        length = self.length(twin)
        self.active.append(Twin(child, twin.tokens[:length], length))

    def close(self) -> None:
        self.learn()
        pool = self.active + self.preempted
        if not pool:
            return
        twin = self.random.choice(pool)
        twin.real.close()
        (self.active if twin in self.active else self.preempted).remove(twin)

    def move_budget(self) -> None:
        source, target = self.random.sample(range(self.layout.group_count), 2)
        move_budget(self.offload, source=source, target=target)

    def drain(self) -> None:
        self.offload.drain()

    def step(self) -> None:
        count = self.random.randint(1, 3)
        twins = self.random.sample(self.active, min(count, len(self.active)))
        if not twins:
            return
        counts = [self.random.randint(1, 3) for _ in twins]
        starts = [self.length(twin) for twin in twins]
        news = [[self.random.randrange(10**6) for _ in range(n)] for n in counts]
        texts = [
            [*twin.tokens[:start], *self._next(twin, start, new)]
            for twin, start, new in zip(twins, starts, news, strict=True)
        ]
        try:
            step = self.offload.begin([twin.real for twin in twins], query_counts=counts)
        except (PoolFull, BadInput):
            self.refused_count += 1
            return
        self.late_count += len(self._unlearned)
        for twin, start in zip(twins, starts, strict=True):
            assert twin.real.length <= start <= twin.real.length_bound
        for layer in range(self.layout.layer_total):
            self._layer(step, layer, texts, starts, counts)
        self._commit(step, twins, texts, starts, counts)

    def _next(self, twin: Twin, start: int, new: list[int]) -> list[int]:
        """Known prompt tokens come first: decode runs the last prompt token itself."""
        known = twin.tokens[start : start + len(new)]
        return known + new[len(known) :]

    def _layer(
        self,
        step: Step,
        layer: int,
        texts: list[list[int]],
        starts: list[int],
        counts: list[int],
    ) -> None:
        spans = list(zip(texts, starts, counts, strict=True))
        new_rows = np.concatenate([self.rows(layer, t, s, n) for t, s, n in spans])
        leads = self.layout.groups[self.layout.group_of(layer)][0] == layer
        keys = None
        if leads and self.layout.index:
            keys = np.concatenate([self.keys(layer, t, s, n) for t, s, n in spans])
        if leads:
            self._early = self.random.random() < 0.7
        early = self._early
        if early:
            step.append(layer, new_rows, keys=keys)
        if leads:
            self._selection = self._select(spans, early)
            self._cuts = self._parts(len(new_rows))
        texts_of = [text for text, _, count in spans for _ in range(count)]
        self._resolve(step, layer, leads, texts_of)
        if not early:
            step.append(layer, new_rows, keys=keys)

    def _select(self, spans: list[tuple[list[int], int, int]], early: bool) -> np.ndarray:
        lengths = [s + (i + 1 if early else 0) for _, s, n in spans for i in range(n)]
        selection = np.full((len(lengths), TOP_K), -1, np.int32)
        for query, length in enumerate(lengths):
            chosen = self._positions(length, TOP_K)
            selection[query, : len(chosen)] = chosen
        return selection

    def _positions(self, length: int, count_max: int) -> list[int]:
        """Ascending, biased to few hot positions so that hits, misses and evictions all happen."""
        if length == 0:
            return []
        hot = [self.random.randrange(min(length, 30)) for _ in range(count_max // 2)]
        cold = [self.random.randrange(length) for _ in range(count_max - len(hot))]
        return sorted(set((hot + cold)[: self.random.randint(0, count_max)]))

    def _parts(self, query_count: int) -> list[int]:
        cuts = [0]
        if query_count > 1 and self.random.random() < 0.5:
            cuts.append(self.random.randint(1, query_count - 1))
        return [*cuts, query_count]

    def _resolve(self, step: Step, layer: int, leads: bool, texts: list[list[int]]) -> None:
        held = []
        for first, stop in zip(self._cuts, self._cuts[1:], strict=False):
            selection = self._selection[first:stop] if leads else None
            answer = step.resolve(layer, selection, queries=range(first, stop))
            held.append((first, answer))
            self._read_hits(layer, first, answer, texts)
        for first, answer in held:
            self._read_all(layer, first, answer, texts)

    def _read_hits(
        self, layer: int, first: int, answer: Resolution, texts: list[list[int]]
    ) -> None:
        """Hits and rows in place are right before anything has been waited for."""
        memory = self.offload.memory(layer)
        slots, host = memory.slots.numpy(), memory.host.numpy()
        for query in range(len(answer.hit)):
            wanted = {self.row(layer, texts[first + query], p) for p in self._chosen(first + query)}
            hit, place = answer.hit[query].numpy(), answer.place[query].numpy()
            assert (hit[: answer.hit_count[query]] >= 0).all()
            assert (hit[answer.hit_count[query] :] == -1).all()
            read = [slots[slot].tobytes() for slot in hit[hit >= 0]]
            read += [host[row].tobytes() for row in place[place >= 0]]
            assert set(read) <= wanted, (layer, query)
            assert len(set(read)) == len(read)

    def _read_all(self, layer: int, first: int, answer: Resolution, texts: list[list[int]]) -> None:
        """After the wait, `slots` names every selected row in order, each on one side only."""
        answer.wait()
        assert answer.is_ready
        memory = self.offload.memory(layer)
        slots, host = memory.slots.numpy(), memory.host.numpy()
        for query in range(len(answer.slots)):
            chosen = self._chosen(first + query)
            codes = answer.slots[query].numpy()
            assert (codes[len(chosen) :] == -1).all()
            for position, code in zip(chosen, codes.tolist(), strict=False):
                got = slots[code] if code >= 0 else host[-2 - code]
                assert got.tobytes() == self.row(layer, texts[first + query], position)
            sides = (answer.hit_count, answer.miss_count, answer.place_count)
            assert sum(int(side[query]) for side in sides) == len(chosen)
            merged = set(codes[: len(chosen)].tolist())
            parts = {s for m in (answer.hit, answer.miss) for s in m[query].tolist() if s >= 0}
            parts |= {-2 - row for row in answer.place[query].tolist() if row >= 0}
            assert merged == parts

    def _chosen(self, query: int) -> list[int]:
        line = self._selection[query]
        return line[line >= 0].tolist()

    def _commit(
        self,
        step: Step,
        twins: list[Twin],
        texts: list[list[int]],
        starts: list[int],
        counts: list[int],
    ) -> None:
        if self.random.random() < 0.1:
            self.learn()
            step.abandon()
            return
        accepted = [self.random.randint(0, count) for count in counts]
        kept = [t[s : s + n] for t, s, n in zip(texts, starts, accepted, strict=True)]
        told = kept if self.random.random() < 0.8 else None
        step.seal(accepted=accepted)
        self.learn()
        self._unlearned.append((step, accepted, told))
        if self.random.random() < 0.5:
            self.learn()
        for twin, text, start, count in zip(twins, texts, starts, accepted, strict=True):
            twin.tokens = [*text[: start + count], *twin.tokens[start + count :]]
            twin.prompt_count = start + count
        with pytest.raises(BadState, match=r"is sealed|is learned"):
            step.seal(accepted=accepted)

    def learn(self) -> None:
        """The host takes notice of a step that may lie one back."""
        while self._unlearned:
            step, accepted, told = self._unlearned.pop()
            for sequence in step.sequences:
                with pytest.raises(BadState, match="learn it first"):
                    sequence.preempt()
            step.learn(accepted=accepted, tokens=told)

    # ---- helpers

    def length(self, twin: Twin) -> int:
        return twin.prompt_count

    def _any_active(self) -> Twin | None:
        self.learn()
        return self.random.choice(self.active) if self.active else None

    def check(self) -> None:
        self.offload.check()
        assert self.offload.verify(self.random.randrange(self.layout.layer_total)) == []
        assert {twin.real.state for twin in self.active} <= {"active"}
        assert {twin.real.state for twin in self.preempted} <= {"preempted"}

    def finish(self) -> None:
        """Close everything: every slot and every page must come back."""
        self.learn()
        for twin in self.active + self.preempted:
            twin.real.close()
        self.offload.drain()
        self.offload.check()
        stats = self.offload.stats()
        assert stats.used_slot_count.sum() == 0, "slots outlive their sequences"
        assert stats.free_host_page_count == stats.host_page_count, "host pages were lost"
        assert stats.free_index_page_count == stats.index_page_count, "index pages were lost"
        self.offload.close()


WEIGHTS = {
    "open": 10,
    "step": 50,
    "warm": 4,
    "fill": 4,
    "refill": 10,
    "preempt": 6,
    "resume": 8,
    "fork": 3,
    "close": 8,
    "move_budget": 3,
    "drain": 4,
}
