"""What a body costs while it is received, and how long it may take."""

from __future__ import annotations

from ess.server.http.connection import refusals
from ess.server.http.connection.refusals import Stop
from ess.server.process.bounds import (
    BODY_RATE_MIN,
    BODY_S,
    CHUNK_BYTES_MEAN,
    CHUNK_LINE_BYTES,
    CHUNKS_MAX,
)


class Body:
    """A body that is being received.

    `framing_count` is its cost besides the delivered bytes: everything around chunks, less a plain
    line for each. The parser keeps none of it, except a header that does not end.
    """

    __slots__ = ("began_s", "byte_count", "chunk_count", "framing_count")
    within_s = BODY_S
    rate_min = BODY_RATE_MIN

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.byte_count = self.chunk_count = self.framing_count = 0

    @property
    def accounted(self) -> int:
        return self.byte_count + CHUNK_LINE_BYTES * self.chunk_count

    def check_chunks(self) -> None:
        """Refuses too many chunks: reading one takes microseconds, and all connections wait."""
        if self.chunk_count > CHUNKS_MAX + self.byte_count // CHUNK_BYTES_MEAN:
            raise Stop(refusals.small_chunks(self.chunk_count, self.byte_count))

    def late_at_s(self) -> float:
        return self.began_s + self.within_s + self.byte_count / self.rate_min
