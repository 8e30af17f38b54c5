"""Responses that a client may refer to by id, within a size: the longest unused are forgotten.

A client may choose its ids, so an id is no secret. Clients with the same key are one owner, which
finds its own responses alone.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class KeptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """All of it is JSON: `input_items` led to the response, those of the responses before it among
    them; `output_items` are those of its answer. Both are the inside of a list: no item is an
    object of its own, which would take several times as much memory as its JSON. One that
    `is_open` is still being made."""

    input_items: bytes
    output_items: bytes
    document: bytes
    is_open: bool = False

    @property
    def size(self) -> int:
        return len(self.input_items) + len(self.output_items) + len(self.document)

    @property
    def item_count(self) -> int:
        """Items of input and output; counted anew each time."""
        parts = (b"[%b]" % part for part in (self.input_items, self.output_items))
        return sum(len(msgspec.json.decode(part, type=list[msgspec.Raw])) for part in parts)


class KeptResponses:
    """Takes `bytes_max` at most: a half has responses, the other half the items of requests under
    way, `held_bytes` of them."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max // 2
        self._bytes = 0
        self.held_bytes = 0
        self._kept: OrderedDict[tuple[bytes, str], KeptResponse] = OrderedDict()

    def reserve(self, size: int) -> bool:
        """Whether a request under way may hold so much until its response is kept. Nothing is
        forgotten for it: the request may still be refused."""
        if self.held_bytes + size > self._bytes_max:
            return False
        self.held_bytes += size
        return True

    def release(self, size: int) -> None:
        """The request has ended."""
        self.held_bytes -= size

    def put(self, owner: bytes, identity: str, response: KeptResponse) -> bool:
        """Whether it is kept. A response that is too large by itself is not kept, and no other
        response is dropped for it."""
        self.drop(owner, identity)
        if response.size > self._bytes_max:
            return False
        self._kept[owner, identity] = response
        self._bytes += response.size
        while self._bytes > self._bytes_max:
            _, longest_unused = self._kept.popitem(last=False)
            self._bytes -= longest_unused.size
        return True

    def find(self, owner: bytes, identity: str) -> KeptResponse | None:
        response = self._kept.get((owner, identity))
        if response is not None:
            self._kept.move_to_end((owner, identity))
        return response

    def drop(self, owner: bytes, identity: str) -> bool:
        """Removes the response; returns whether it was there."""
        response = self._kept.pop((owner, identity), None)
        self._bytes -= 0 if response is None else response.size
        return response is not None
