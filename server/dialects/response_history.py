"""What came before a response, which a client names instead of sending all of its items again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.server.process.requests.kept_responses import Kept, KeptResponses
from ess.server.process.service import Service


def owner_of(headers: Mapping[str, str]) -> bytes:
    """Who asks, by the key that came along; all without one are the same."""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    return hashlib.sha256(key.encode()).digest()


class History:
    """`previous` is the id of the response that this one follows."""

    def __init__(self, service: Service, headers: Mapping[str, str]) -> None:
        self._shelf: KeptResponses | None = service.kept
        self._body_max = service.limits.body_max
        self._owner = owner_of(headers)
        self._asked: list[msgspec.Raw] = []
        self.previous: str | None = None
        self.is_kept = False

    def joined(self, raw: bytes) -> bytes:
        """The body with all items before its own. A body that cannot be read is left to the reader
        to refuse, and so is an id where no responses are kept."""
        if self._shelf is None:
            return raw
        try:
            body = msgspec.json.decode(raw or b"{}", type=dict[str, msgspec.Raw])
            named = body.pop("previous_response_id", msgspec.Raw(b"null"))
            self.previous = msgspec.json.decode(named, type=str | None)
            self.is_kept = bytes(body.get("store", b"")) != b"false"
            self._asked = _items(body.get("input", msgspec.Raw(b"[]")))
        except UNDECODABLE:
            return raw
        if self.previous is None:
            return raw
        before = self._found(self._shelf, self.previous)
        self._asked = [*before.asked, *before.said, *self._asked]
        body["input"] = msgspec.Raw(msgspec.json.encode(self._asked))
        made = msgspec.json.encode(body)
        if len(made) > self._body_max:
            raise BadInput(
                f"previous_response_id has {len(made):,} bytes of items with those of this request;"
                f" at most {self._body_max:,} are read"
            )
        return made

    def _found(self, shelf: KeptResponses, identity: str) -> Kept:
        found = shelf.find(self._owner, identity)
        if found is None:
            raise BadInput(
                f"previous_response_id is {identity!r:.80}, which is not kept, or no longer: send"
                " all items as input"
            )
        return found

    def keep(self, document: Mapping[str, Any]) -> None:
        """Keeps a response that has ended, with its items."""
        if self._shelf is None or not self.is_kept:
            return
        encode = msgspec.json.encode
        kept = Kept(
            asked=self._asked,
            said=[msgspec.Raw(encode(item)) for item in document["output"]],
            document=encode(document),
        )
        self._shelf.put(self._owner, document["id"], kept)


def _items(given: msgspec.Raw) -> list[msgspec.Raw]:
    """The input as items; a text is what the user says. They are copies: a part that was decoded
    would keep the whole body."""
    if bytes(given).startswith(b'"'):
        said = {"type": "message", "role": "user", "content": given}
        return [msgspec.Raw(msgspec.json.encode(said))]
    return [item.copy() for item in msgspec.json.decode(given, type=list[msgspec.Raw])]
