"""The server's record of each request: what was asked, and what the engine has answered so far.

    opened --> heard, heard, ... --> closed          while an engine has it
                 ^  |
           again |  v lost                           another engine gets it, with the answer so far

A record is the message to the engine, as it was sent, and the tokens that have come back. The next
engine gets the same message under the same number with these tokens in it, and continues behind
them. Tokens that were under way when the engine died are in no record, and are computed again: so
no token is sent twice, and none is left out.

A record holds its prompt for as long as its request is open, so their total size is limited. A
request beyond the limit has no record, nor has one whose prompt's rows leave for another worker, or
were made up for a test: these end with the engine. So does a request with which more than
LOSSES_MAX engines were lost since its last token: it may well be the cause.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from ess.engine.process.messages import Add, Packer, Piece

LOSSES_MAX: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Requests of a lost engine continue in the next one, if that is ready within `wait_s`; their
    records take at most `bytes_max`."""

    bytes_max: int = 0
    wait_s: float = 0.0


NO_RECOVERY: Final = Recovery()


@dataclass(slots=True, eq=False)
class Record:
    """A request's record. `scored_count` counts the chances of its prompt that have come,
    `loss_count` the engines lost since its last token. `is_counted`: its cached tokens were
    reported."""

    packed: bytes
    output: array[int] = field(default_factory=lambda: array("i"))
    scored_count: int = 0
    loss_count: int = 0
    is_counted: bool = False

    @property
    def size(self) -> int:
        return len(self.packed) + len(self.output) * self.output.itemsize

    def hear(self, piece: Piece) -> Piece:
        """The piece without what an earlier engine has sent already."""
        if piece.tokens:
            self.output.extend(piece.tokens)
            self.loss_count = 0
        self.scored_count += len(piece.prompt_chances)
        is_told, self.is_counted = (
            self.is_counted,
            self.is_counted or piece.cached_count is not None,
        )
        if is_told and piece.cached_count is not None:
            return msgspec.structs.replace(piece, cached_count=None)
        return piece

    def again(self, packer: Packer) -> Add:
        """The message for the next engine. Rows that another worker has made are now computed
        there; the prompt's chances are complete once a token was sent."""
        add = packer.for_engine(self.packed)
        assert isinstance(add, Add), f"the record of a request is a {type(add).__name__}"
        if not self.output:
            first = add.sampling.prompt_start + self.scored_count
            sampling = replace(add.sampling, prompt_start=first)
            return msgspec.structs.replace(add, sampling=sampling, handoff=None)
        sampling = replace(add.sampling, prompt_logprobs=None)
        output = self.output.tolist()
        return msgspec.structs.replace(
            add, sampling=sampling, handoff=None, leader=None, prior_output=output
        )


class Journal:
    """The records of all open requests; with `bytes_max` 0 there are none."""

    def __init__(self, bytes_max: int, packer: Packer) -> None:
        self.size = 0
        self._bytes_max = bytes_max
        self._packer = packer
        self._records: dict[int, Record] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def open(self, add: Add, packed: bytes) -> None:
        """Records a request that was sent as `packed`, if there is room."""
        assert add.number not in self._records, f"request {add.number} has a record"
        if add.handoff is None or add.handoff.kind == "take":
            self._records[add.number] = Record(packed)
            self._grow(add.number, len(packed))

    def hear(self, piece: Piece) -> Piece:
        record = self._records.get(piece.number)
        if record is None:
            return piece
        before = record.size
        told = record.hear(piece)
        self._grow(piece.number, record.size - before)
        if piece.reason is not None:
            self.close(piece.number)
        return told

    def close(self, number: int) -> None:
        record = self._records.pop(number, None)
        if record is not None:
            self.size -= record.size

    def lose(self) -> None:
        """The engine is lost: drops the requests that may be the cause."""
        for number, record in list(self._records.items()):
            record.loss_count += 1
            if record.loss_count > LOSSES_MAX:
                self.close(number)

    def again(self) -> Iterator[Add]:
        """The messages of all requests that continue, in their order of arrival."""
        return (record.again(self._packer) for record in self._records.values())

    def check(self) -> None:
        assert self.size == sum(record.size for record in self._records.values()), "other records"
        assert self.size <= self._bytes_max, f"{self.size} of {self._bytes_max} bytes"

    def _grow(self, number: int, size: int) -> None:
        self.size += size
        if self.size > self._bytes_max:
            self.close(number)
