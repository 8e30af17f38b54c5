"""What came before a response, which a client names instead of sending all of its items again."""

from __future__ import annotations

import contextlib
import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput
from ess.server.http.request_ids import given_key
from ess.server.process.bounds import JOINED_BYTES_MAX
from ess.server.process.requests.kept_responses import KeptResponse, KeptResponses
from ess.server.process.service import Service

NULL: Final = msgspec.Raw(b"null")
NO_ITEMS: Final = msgspec.Raw(b"[]")
PLACE: Final = re.compile(r"input\[([0-9]+)\](: expected)?")
"""The place of an item in the joined list. That of an item which is no object may be in the
client's own list, which comes first in the body."""


def owner_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The owner of the request's responses, by its key; all requests without a key have one."""
    return hashlib.sha256(given_key(dict(headers))).digest()


class _Given(msgspec.Struct, gc=False):
    """The fields of a body that matter here. Nothing else of it becomes an object: this runs on the
    event loop, for bodies of any length."""

    previous_response_id: msgspec.Raw = NULL
    store: bool | None = None
    input: msgspec.Raw = NO_ITEMS


class History:
    """`previous` is the id of the response that this one follows; `is_kept` says whether this one
    will be kept, as far as is known yet. The route that makes a History sees to it that `release`
    is called at the request's end."""

    def __init__(self, service: Service, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._shelf: KeptResponses | None = service.kept
        self._joined_max = min(service.limits.body_max, JOINED_BYTES_MAX)
        self.owner = owner_of(headers)
        self._items = b""
        self._before: KeptResponse | None = None
        self._own = NO_ITEMS
        self.previous: str | None = None
        self.is_kept = False

    def joined(self, raw: bytes) -> bytes:
        """The body with all items before its own. A body that cannot be read is left to the reader
        to refuse, and so is an id where no responses are kept. A body that would take the event
        loop long is not read here: its response is not kept."""
        if self._shelf is None or len(raw) > JOINED_BYTES_MAX:
            return raw
        try:
            given = msgspec.json.decode(raw.removeprefix(BOM_UTF8) or b"{}", type=_Given)
        except UNDECODABLE:
            return raw
        self.previous = _identity(given.previous_response_id)
        is_wanted = given.store is not False
        if self.previous is None and not is_wanted:
            return raw
        items = _inside(given.input)
        if self.previous is not None:
            before = self._before = self._found(self._shelf, self.previous)
            self._own = given.input
            parts = before.input_items, before.output_items, items
            items = b",".join(filter(None, parts))
            self._check_length(len(raw) + len(items))
            raw = _followed(raw, items)
        if is_wanted:
            self._hold(self._shelf, items)
        return raw

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """While a joined body is read: a refusal counts own items as the client does."""
        try:
            yield
        except BadInput as refusal:
            raise self._placed(refusal) from None
        finally:
            self._before, self._own = None, NO_ITEMS

    def _placed(self, refusal: BadInput) -> BadInput:
        match = PLACE.match(str(refusal))
        if match is None or self._before is None:
            return refusal
        place, count = int(match[1]), self._before.item_count
        if match[2] and not _may_be_object(self._own, place):
            return refusal
        own, kept = f"input[{place - count}]", f"previous_response_id: its item [{place}]"
        return BadInput((own if place >= count else kept) + str(refusal)[match.end(1) + 1 :])

    def _found(self, shelf: KeptResponses, identity: str) -> KeptResponse:
        kept = shelf.find(self.owner, identity)
        if kept is None:
            raise BadInput(
                f"previous_response_id is {identity!r:.80}, which is not kept, or no longer: send"
                " all items as input"
            )
        if kept.is_open:
            raise BadInput(
                f"previous_response_id is {identity!r:.80}, which has not ended yet: wait for its"
                " end, or cancel it"
            )
        return kept

    def _check_length(self, size: int) -> None:
        if size > self._joined_max:
            raise BadInput(
                f"previous_response_id makes a body of {size:,} bytes of this one;"
                f" at most {self._joined_max:,} are read"
            )

    def _hold(self, shelf: KeptResponses, items: bytes) -> None:
        """Holds the items until the response is there, if there is room for them."""
        if shelf.reserve(len(items)):
            self._items, self.is_kept = items, True

    def release(self) -> None:
        """Lets the items go that are held for a response to come; harmless if repeated."""
        if self._shelf is not None:
            self._shelf.release(len(self._items))
        self._items = b""

    def keep(self, document: dict[str, Any]) -> None:
        """Keeps a response, with its items, that has ended or is made in the background. The
        document says whether it is kept: a response that is too large is not."""
        if self._shelf is None or not self.is_kept:
            return
        answered = map(_without_chances, filter(_is_whole, document["output"]))
        output = msgspec.json.encode(list(answered))[1:-1]
        whole = msgspec.json.encode(document)
        is_open = document["status"] == "in_progress"
        response = KeptResponse(
            input_items=self._items, output_items=output, document=whole, is_open=is_open
        )
        self.is_kept = document["store"] = self._shelf.put(self.owner, document["id"], response)


def _without_chances(item: dict[str, Any]) -> dict[str, Any]:
    """The item as a prompt needs it: log probabilities are much longer than the text."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _identity(given: msgspec.Raw) -> str | None:
    try:
        return msgspec.json.decode(given, type=str | None)
    except UNDECODABLE:
        raise BadInput("previous_response_id must be a text") from None


def _inside(given: msgspec.Raw) -> bytes:
    """The input as items, without the brackets around them; a plain text is a message of the
    user."""
    text = bytes(given)
    if text.startswith(b'"'):
        return b'{"type":"message","role":"user","content":%b}' % text
    if text.startswith(b"["):
        return text[1:-1].strip()
    raise BadInput("input must be a text or a list")


def _followed(raw: bytes, asked: bytes) -> bytes:
    """The body, which names the response before it, with other items. Where an object has a key
    twice, the last one counts; so the items are appended, and the rest need not be read."""
    return b'%b,"previous_response_id":null,"input":[%b]}' % (raw.rstrip()[:-1], asked)


def _is_whole(item: Mapping[str, Any]) -> bool:
    """Whether an item can be followed. A call that was cut has half a JSON as arguments."""
    return bool(item["type"] != "function_call" or item["status"] == "completed")


def _may_be_object(given: msgspec.Raw, place: int) -> bool:
    """False where the client's own list has something else at this place."""
    items = msgspec.json.decode(b"[%b]" % _inside(given), type=list[msgspec.Raw])
    return place >= len(items) or bytes(items[place]).lstrip().startswith(b"{")
