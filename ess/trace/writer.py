"""Appends whole steps to a trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ess.errors import BadInput, BadState
from ess.trace import form, selections, varints
from ess.trace.form import RequestStep, TraceHeader


class TraceWriter:
    """Write the groups of a step in order, as the layers run, then `commit_step`.

    A step reaches the file only when it is committed. One encoded step is held in memory.
    """

    def __init__(self, path: str | os.PathLike[str], *, header: TraceHeader) -> None:
        preamble, self._seed = form.encode_preamble(header)
        self.header = header
        self._step_sizes: list[int] = []
        self._pending: list[list[tuple[bytes, bytes]]] = []
        self._query_count = 0
        self._last_number = -1
        self._offset = 0
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise BadInput(
                f"{path} exists; a trace is never overwritten, name a new file"
            ) from None
        self._append(preamble)

    @property
    def step_count(self) -> int:
        return len(self._step_sizes)

    def write_group(
        self,
        group: int,
        selection: npt.NDArray[Any],
        *,
        scores: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """What every query of this step picked: [queries, up to top_k], ascending, -1 pads.

        A `scored` trace takes [queries, positions] `scores` too, 0 behind a query's last.
        """
        self._check_open()
        if group != len(self._pending) or group >= self.header.group_count:
            raise BadInput(
                f"group {group} cannot come now: {len(self._pending)} of "
                f"{self.header.group_count} groups of this step are written, in order"
            )
        selections.check(selection, self.header)
        if group and len(selection) != self._query_count:
            raise BadInput(f"{len(selection)} queries, the first group had {self._query_count}")
        if (scores is not None) != self.header.scored:
            raise BadInput(f"the header says scored is {self.header.scored}: group {group} differs")
        self._query_count = len(selection)
        frames = [(form.SELECTION, selections.encode(group, selection))]
        if scores is not None:
            if len(scores) != len(selection):
                raise BadInput(f"{len(selection)} queries, scores of {len(scores)}")
            frames.append((form.SCORES, selections.encode_scores(scores, self.header)))
        self._pending.append(frames)

    def commit_step(self, number: int, requests: Sequence[RequestStep]) -> None:
        """Publishes the groups written since the last commit; `requests` says what was accepted."""
        self._check_open()
        if len(self._pending) != self.header.group_count:
            raise BadState(
                f"step {number} has {len(self._pending)} of {self.header.group_count} groups"
            )
        if not self._last_number < number < 1 << 63:
            raise BadInput(f"step {number} does not follow step {self._last_number}; count upward")
        form.check_requests(requests, self.header)
        query_count = sum(entry.query_count for entry in requests)
        if query_count != self._query_count:
            raise BadInput(f"requests with {query_count} queries, groups with {self._query_count}")
        step = self._encode_step(number, requests)
        self._append(step)
        self._step_sizes.append(len(step))
        self._last_number = number
        self._pending.clear()

    def close(self) -> None:
        """Writes the index. Groups that were never committed are dropped, with a BadState."""
        if self._file.closed:
            return
        offset = self._offset
        sizes = varints.encode(self._step_sizes)
        index = form.encode_frame(form.INDEX, sizes, offset=offset, seed=self._seed)
        check = form.trailer_check(offset, seed=self._seed)
        self._append(index + form.TRAILER.pack(offset, check, form.END))
        self._file.close()
        if self._pending:
            raise BadState(f"closed with {len(self._pending)} groups of a step never committed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._pending.clear()
        self.close()

    def _check_open(self) -> None:
        if self._file.closed:
            raise BadState(f"this trace is closed after {self.step_count} steps; begin a new trace")

    def _encode_step(self, number: int, requests: Sequence[RequestStep]) -> bytes:
        group_sizes = [
            sum(form.FRAME.size + len(payload) for _, payload in frames) for frames in self._pending
        ]
        payloads = [(form.STEP, form.encode_step(number, requests, group_sizes))]
        payloads += [frame for frames in self._pending for frame in frames]
        step = bytearray()
        for kind, payload in payloads:
            offset = self._offset + len(step)
            step += form.encode_frame(kind, payload, offset=offset, seed=self._seed)
        return bytes(step)

    def _append(self, piece: bytes) -> None:
        """Writes all of it or closes for good: nothing may follow a torn tail (of a full disk)."""
        left = memoryview(piece)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            self._file.close()
            raise
        self._offset += len(piece)
