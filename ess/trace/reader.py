"""Reads a trace step by step, or any step by its place; recovers a trace that was never closed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, BadState, unreadable
from ess.trace import form, selections, varints
from ess.trace.form import RequestStep, TraceHeader

RECOVER: Final = "; recover=True, or --recover of ess-bench policies, reads its whole steps"


class Source:
    """The bytes of one file of known size; a range outside it is refused before it is read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise unreadable(f"the trace {self.path}", error) from None
        self.size = os.fstat(self._file.fileno()).st_size
        self.seed = 0

    def read(self, offset: int, size: int) -> bytes:
        if self._file.closed:
            raise BadState(f"{self.path} is closed; read inside `with TraceReader(...)`")
        if not 0 <= offset <= offset + size <= self.size:
            raise BadInput(f"bytes {offset}..{offset + size} are not in {self.size}: truncated")
        piece = os.pread(self._file.fileno(), size, offset)
        if len(piece) != size:
            raise BadInput(f"the file became shorter than {self.size} bytes while it was read")
        return piece

    def frame(self, kind: bytes, offset: int, *, end: int) -> tuple[bytes, int]:
        """The payload of the frame at `offset`, which must end by `end`, and where it ends."""
        kind_read, size, check = form.FRAME.unpack(self.read(offset, form.FRAME.size))
        after = offset + form.FRAME.size + size
        if kind_read != kind or after > end or size > form.PAYLOAD_BYTES_MAX:
            raise BadInput(f"no whole {kind.decode()} frame at byte {offset}")
        payload = self.read(offset + form.FRAME.size, size)
        if form.frame_check(kind, payload, offset=offset, seed=self.seed) != check:
            raise BadInput(f"the {kind.decode()} frame at byte {offset} is damaged")
        return payload, after

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStep:
    """One recorded step. Selections are read and checked when they are asked for.

    `offsets` says where the frame of each group begins, and where the last frame ends.
    """

    number: int
    requests: tuple[RequestStep, ...]
    header: TraceHeader
    offsets: tuple[int, ...] = field(repr=False)
    source: Source = field(repr=False)

    @property
    def query_count(self) -> int:
        return sum(entry.query_count for entry in self.requests)

    def selection(self, group: int) -> npt.NDArray[np.int32]:
        """[queries, top_k], in the order of the requests, ascending, -1 pads."""
        try:
            payload, _ = self._frames(group)
            return selections.decode(
                payload, group=group, query_count=self.query_count, header=self.header
            )
        except BadInput as error:
            raise BadInput(f"{self.source.path}, step {self.number}: {error}") from None

    def scores(self, group: int) -> npt.NDArray[np.uint8]:
        """[queries, positions]: the indexer's score of each position, 0 behind a query's last."""
        try:
            _, payload = self._frames(group)
            if payload is None:
                raise BadInput("this trace was recorded without scores")
            return selections.decode_scores(
                payload, query_count=self.query_count, header=self.header
            )
        except BadInput as error:
            raise BadInput(f"{self.source.path}, step {self.number}: {error}") from None

    def _frames(self, group: int) -> tuple[bytes, bytes | None]:
        """A group's selection, and its scores if there are any."""
        if not 0 <= group < self.header.group_count:
            raise BadInput(f"group {group} is outside 0..{self.header.group_count - 1}")
        start, end = self.offsets[group], self.offsets[group + 1]
        payload, after = self.source.frame(form.SELECTION, start, end=end)
        scores = None
        if self.header.scored:
            scores, after = self.source.frame(form.SCORES, after, end=end)
        if after != end:
            raise BadInput(f"the frame at byte {start} ends at {after}, not at {end}")
        return payload, scores


class TraceReader:
    """The steps of a closed trace; with `recover`, the whole steps of any trace, from the front.

    `dropped_bytes` is how much a recovery left out.
    """

    def __init__(self, path: str | os.PathLike[str], *, recover: bool = False) -> None:
        self._source = Source(path)
        self.dropped_bytes = 0
        try:
            self.header, self._start = self._read_preamble()
            self._offsets = self._walk() if recover else self._read_index()
        except BadInput as error:
            self._source.close()
            raise BadInput(f"{self._source.path}: {error}") from None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[TraceStep]:
        return (self.step(place) for place in range(len(self)))

    def step(self, place: int) -> TraceStep:
        """The step at a place from 0; its own number is `TraceStep.number`."""
        if not 0 <= place < len(self):
            raise BadInput(f"step {place} is outside 0..{len(self) - 1} of {self._source.path}")
        start, end = int(self._offsets[place]), int(self._offsets[place + 1])
        try:
            step = self._read_step(start, limit=end)
            if step.offsets[-1] != end:
                raise BadInput(f"the step ends at byte {step.offsets[-1]}, not at {end}")
            return step
        except BadInput as error:
            raise BadInput(f"{self._source.path}, place {place}: {error}") from None

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_preamble(self) -> tuple[TraceHeader, int]:
        head = self._source.read(0, min(form.PREAMBLE.size, self._source.size))
        if not head.startswith(form.MAGIC) or len(head) < form.PREAMBLE.size:
            raise BadInput(f"not an ESS trace: it does not begin with {form.MAGIC.decode()}")
        _, version, size, check = form.PREAMBLE.unpack(head)
        if version not in (form.VERSION, form.VERSION_SCORED):
            raise BadInput(
                f"version {version} of the format; this ESS reads {form.VERSION} and "
                f"{form.VERSION_SCORED}"
            )
        if size > form.HEADER_BYTES_MAX:
            raise BadInput(f"a header of {size} bytes, at most {form.HEADER_BYTES_MAX} are allowed")
        self._source.seed = check
        payload = self._source.read(len(head), size)
        header = form.decode_header(payload, check=check, version=version)
        return header, len(head) + size

    def _read_index(self) -> npt.NDArray[np.int64]:
        trailer_at = max(self._start, self._source.size - form.TRAILER.size)
        tail = self._source.read(trailer_at, self._source.size - trailer_at)
        if len(tail) < form.TRAILER.size or not tail.endswith(form.END):
            raise BadInput(f"no index: never closed, or cut off{RECOVER}")
        index_at, check, _ = form.TRAILER.unpack(tail)
        if form.trailer_check(index_at, seed=self._source.seed) != check:
            raise BadInput(f"the trailer is damaged{RECOVER}")
        payload, after = self._source.frame(form.INDEX, index_at, end=trailer_at)
        step_bytes_min = form.FRAME.size * (1 + self.header.group_count)
        sizes = varints.decode(payload, count_max=self._source.size // step_bytes_min)
        offsets = self._start + np.cumsum(np.concatenate(([0], sizes)))
        if (after, int(offsets[-1])) != (trailer_at, index_at):
            raise BadInput(f"the index does not fit the file{RECOVER}")
        return offsets

    def _walk(self) -> npt.NDArray[np.int64]:
        """The offsets of whole, sound steps, and the end of the last one."""
        offsets = [self._start]
        try:
            while True:
                step = self._read_step(offsets[-1], limit=self._source.size)
                for group in range(self.header.group_count):
                    step.selection(group)
                offsets.append(step.offsets[-1])
        except BadInput:
            pass
        self.dropped_bytes = self._tail_bytes(offsets[-1])
        return np.array(offsets, dtype=np.int64)

    def _tail_bytes(self, end: int) -> int:
        """The bytes behind the last whole step; 0 if they are the index of exactly these steps."""
        try:
            return 0 if int(self._read_index()[-1]) == end else self._source.size - end
        except BadInput:
            return self._source.size - end

    def _read_step(self, start: int, *, limit: int) -> TraceStep:
        payload, after = self._source.frame(form.STEP, start, end=limit)
        number, requests, group_sizes = form.decode_step(payload, self.header)
        offsets = tuple(itertools.accumulate(group_sizes, initial=after))
        if offsets[-1] > limit:
            raise BadInput(f"the groups end at byte {offsets[-1]}, after the limit of {limit}")
        return TraceStep(
            number=number,
            requests=requests,
            header=self.header,
            offsets=offsets,
            source=self._source,
        )
