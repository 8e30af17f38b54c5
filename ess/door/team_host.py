"""The host pool of a stage, once for all members of its team: member 0 writes, the others read.

Every member makes the same calls of its offload in the same order. So each knows where the host's
rows lie and when they are written, and marks them in masks of its own; the bytes are there once, in
a memory file of member 0, which the others map for reading.

A member reads a row behind its mark, and `LatentPool.say` stands between the two. In it member 0
sends a word and goes on; the others wait for the word, which follows all that was written before.
So nobody reads a row too early. Nor does anybody read one too late, when its page has gone to
another text: between two words a member may be as late as the last exchange of its team, and what
it still reads then are rows of sequences that leave (their pages are free for the others already).
Their slots are dropped with them, so what was read is never looked at. A step attends before the
exchange of its layer, so no attention is that late.

What could break it: a member that reads the host at a place that the others do not pass (`say`
waits for calls of all, so it stands at places that follow from the calls alone); a copy to the host
that is still under way when the word is sent (`Slots.seal` waits for it where memory is common).

The file has no name. It is gone when the last process that maps it has ended, and processes that
begin again make a new one: no pool that a lost member has half written is ever used.
"""

from __future__ import annotations

import os
from struct import Struct
from typing import Final

from ess.comm.team import Team
from ess.errors import BadInput, Unavailable
from ess.kernels.memory import map_memory_file, memory_file
from ess.pool.latent import Bytes

_FILE: Final = Struct("<3Q")
WRITER: Final = 0
NAME: Final = "host-pool"


class TeamHost:
    """`Common`, of one member."""

    def __init__(self, team: Team) -> None:
        self._team = team

    @property
    def writes(self) -> bool:
        return self._team.rank == WRITER

    def memory(self, byte_count: int) -> Bytes:
        if self.writes:
            made = memory_file(byte_count, name=NAME)
            self._team.broadcast(_FILE.pack(os.getpid(), made.fd, byte_count))
            return made.memory
        pid, fd, theirs = _FILE.unpack(self._team.broadcast(b""))
        if theirs != byte_count:
            raise BadInput(
                f"host_bytes pays for {byte_count} bytes on member {self._team.rank} of a stage, "
                f"for {theirs} on member {WRITER}"
            )
        try:
            return map_memory_file(pid, fd, byte_count, writes=False)
        except OSError as error:
            raise Unavailable(
                f"the host pool of process {pid} cannot be mapped: {error}; the members of a stage "
                "must run on one machine"
            ) from error

    def written(self) -> None:
        self._team.broadcast(b"")
