"""Which stretches of host memory the driver knows: none of its copies may cross from one into the
next, even where they lie side by side."""

from __future__ import annotations

from collections.abc import Iterator


class PinnedRanges:
    """A finaliser may remove a stretch at any time, also in the middle of a call of this thread. So
    each change is one operation of a dict, and readers look at a copy of it."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def add(self, start: int, byte_count: int) -> None:
        assert byte_count > 0, f"{byte_count} bytes at {start:#x}"
        self._sizes[start] = byte_count

    def remove(self, start: int) -> None:
        self._sizes.pop(start, None)

    def pieces(self, address: int, byte_count: int) -> Iterator[tuple[int, int]]:
        """(offset, size) of the parts of a copy; memory that is not known here is left whole."""
        seams = sorted(
            start - address
            for start in self._sizes.copy()
            if address < start < address + byte_count
        )
        for begin, end in zip([0, *seams], [*seams, byte_count], strict=True):
            if begin < end:
                yield begin, end - begin
