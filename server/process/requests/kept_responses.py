"""Responses that a client may refer to by id, within a size: the longest unused are forgotten.

A client may choose its ids, so an id is no secret: an owner, whoever sends the same key, finds its
own responses alone.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """All of it is JSON: `asked` has the items that led to the response, those of the responses
    before it among them; `said` has the items of its answer."""

    asked: list[msgspec.Raw]
    said: list[msgspec.Raw]
    document: bytes

    @property
    def size(self) -> int:
        items = sum(len(bytes(item)) for item in (*self.asked, *self.said))
        return items + len(self.document)


class KeptResponses:
    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._kept: OrderedDict[tuple[bytes, str], Kept] = OrderedDict()

    def put(self, owner: bytes, identity: str, kept: Kept) -> None:
        """Keeps it, unless it alone is too large."""
        self.drop(owner, identity)
        self._kept[owner, identity] = kept
        self._bytes += kept.size
        while self._bytes > self._bytes_max:
            _, longest_unused = self._kept.popitem(last=False)
            self._bytes -= longest_unused.size

    def find(self, owner: bytes, identity: str) -> Kept | None:
        found = self._kept.get((owner, identity))
        if found is not None:
            self._kept.move_to_end((owner, identity))
        return found

    def drop(self, owner: bytes, identity: str) -> bool:
        """Whether there was one."""
        found = self._kept.pop((owner, identity), None)
        self._bytes -= 0 if found is None else found.size
        return found is not None
