"""The host pool of an engine of several processes: once on a machine, in a memory file that all of
them map.

A stage of the engine has the rows and keys of its own layers in it. Of its processes, which share
the heads of these layers, member 0 writes them, and the others have mapped them for reading.

Every process makes the same calls of its offload in the same order. So each knows where a row lies
and when it is written, and has marks of its own for that; only the bytes are common. A row is read
behind its mark, and `LatentPool.say` stands between the two: in it member 0 sends a word and
continues, and the others wait for that word, which follows all that was written before. So no
process reads a row too early.

Nor does a process use what it reads too late, when the page has gone to another text. In a step
each layer attends before the members exchange what they have attended, so a member that is behind
the exchange of the last layer has no attention before it. What it may still read between that
exchange and the next are copies for its slots. Where the page has been free for others meanwhile,
they are of a sequence that leaves: its slots are dropped in the call that frees the page, and
nothing looks at them between.

What would break it: a `say` at a place that follows from more than the calls (the others would wait
for a word that never comes); a copy to the host that is under way when the word is sent
(`Slots.seal` waits for it where memory is common); a second writer of a row. Rank 0 writes rows of
every layer where a handoff brings them, into pages that are marked in no process until it says
that they have come. A disk's pages are read by member 0, also into pages that are marked in no
process until all ranks know that all stages have read theirs (`shelf`).

The file has no name. It is gone when the last process that maps it has ended, and processes that
begin again make a new one: no pool that a lost process has half written is ever used.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from struct import Struct
from typing import Final

from ess.array_types import Bytes
from ess.comm.group import Group
from ess.errors import BadInput, Unavailable
from ess.kernels.memory import MemoryFile, map_memory_file, memory_file
from ess.layout import ModelLayout
from ess.pool.keys import KeyPages
from ess.pool.latent import CommonMemory
from ess.units import PAGE_ROWS

NAME: Final = "host-pool"
TOLD_S: Final = 3600.0
"""As long as loading may take: rank 0 has its weights before it has a pool."""
_FILE: Final = Struct("<3Q")


@dataclass(frozen=True, slots=True)
class WholeHost:
    """All rows and keys of the model, as rank 0 has them: where handoffs lay theirs."""

    layout: ModelLayout
    row_memory: Bytes
    keys: KeyPages
    fd: int


class CommonHost:
    """`Common`, of one process, which has the layers of `part`. The ranks are divided equally over
    so many machines, none of a stage among two; each machine has a file of its own, in which the
    rows of stages elsewhere take no memory."""

    def __init__(
        self, group: Group, whole: ModelLayout, part: ModelLayout, *, machines: int = 1
    ) -> None:
        assert group.size % (machines * group.team.size) == 0, f"{machines} machines"
        self._group = group
        self._here = group.size // machines
        self._whole = whole
        self._part = part
        self._made: tuple[MemoryFile, int] | None = None

    @property
    def writes(self) -> bool:
        return self._group.team.rank == 0

    def memory(self, page_count: int) -> CommonMemory:
        pid, fd, theirs = self._file(page_count)
        if theirs != page_count:
            raise BadInput(
                f"host_bytes pays for {page_count} pages on rank {self._group.rank}, for {theirs} "
                "on rank 0"
            )
        whole, part, row_count = self._whole, self._part, page_count * PAGE_ROWS
        rows = sum(part.layer_bytes(range(part.layer_total))) * row_count
        keys_begin = whole.token_row_bytes * row_count
        if whole.key_layer_count:
            each = whole.key_page_bytes // whole.key_layer_count
            keys_begin += part.first_key_layer * each * page_count
        begin = part.bytes_before * row_count
        return CommonMemory(
            rows=self._mapped(pid, fd, begin, rows),
            keys=self._mapped(pid, fd, keys_begin, part.key_page_bytes * page_count),
        )

    def written(self) -> None:
        self._group.team.broadcast(b"")

    def whole(self) -> WholeHost:
        """On rank 0, where all run on one machine: it has made the file."""
        assert self._here == self._group.size, "rows of stages elsewhere are not in this file"
        assert self._made is not None, f"rank {self._group.rank} has made no file"
        (made, page_count), layout = self._made, self._whole
        end = layout.token_row_bytes * page_count * PAGE_ROWS
        keys = KeyPages(layout, made.memory[end:], page_count)
        return WholeHost(layout, made.memory[:end], keys, made.fd)

    def _file(self, page_count: int) -> tuple[int, int, int]:
        """Whose it is, its number there, and for how many pages it is. The first rank of a machine
        makes it, and keeps it open; rank 0 passes on where it is."""
        rank = self._group.rank
        where = None if rank % self._here else self._make(page_count)
        if rank == 0:
            assert where is not None, "rank 0 is the first of its machine"
            self._pass_on(where)
        elif where is not None:
            self._group.reports[0].send(where)
        else:
            where = self._heard(0)
        pid, fd, count = _FILE.unpack(where)
        return pid, fd, count

    def _make(self, page_count: int) -> bytes:
        file = memory_file(page_count * self._whole.host_page_bytes, name=NAME)
        self._made = file, page_count
        return _FILE.pack(os.getpid(), file.fd, page_count)

    def _pass_on(self, of_mine: bytes) -> None:
        for first in range(0, self._group.size, self._here):
            where = self._heard(first) if first else of_mine
            for rank in range(first + 1, first + self._here):
                self._group.reports[rank].send(where)

    def _heard(self, rank: int) -> bytes:
        frame = self._group.reports[rank].receive(TOLD_S)
        if frame is None:
            raise Unavailable(f"rank {rank} has not named its host pool within {TOLD_S:g} s")
        return frame.head

    def _mapped(self, pid: int, fd: int, begin: int, byte_count: int) -> Bytes:
        if self._made is not None:
            return self._made[0].memory[begin : begin + byte_count]
        try:
            return map_memory_file(pid, fd, max(byte_count, 1), begin=begin, writes=self.writes)
        except OSError as error:
            raise Unavailable(
                f"the host pool of process {pid} cannot be mapped: {error}; it must run on this "
                "machine"
            ) from error
