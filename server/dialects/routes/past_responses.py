"""/v1/responses/{response_id}: kept responses, for the client whose key asked for them."""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput
from ess.server.dialects.response_history import owner_of
from ess.server.dialects.response_items import Item
from ess.server.http.openapi.door import Door
from ess.server.http.responses import JSON, Absent, answer
from ess.server.process.requests.kept_responses import KeptResponse
from ess.server.process.service import Service

PATH: Final = "/v1/responses/{response_id}"
COUNTED: Final = "/v1/responses/input_tokens"
"""It fits PATH, and only POST is served there."""
PREFIXES: Final = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


async def retrieve(request: Request) -> Response:
    if request.query_params.get("stream", "false") != "false":
        raise BadInput("stream is not served here: a kept response is returned whole")
    return Response(_found(request).document, media_type=JSON)


async def input_items(request: Request) -> Response:
    """The newest first, unless `order` is asc; all of them, unless there is a `limit`."""
    asked = request.query_params
    order, limit = asked.get("order", "desc"), asked.get("limit")
    if order not in ("asc", "desc"):
        raise BadInput(f"order is {order!r:.40}, must be asc or desc")
    if limit is not None and re.fullmatch("[1-9][0-9]{0,8}", limit) is None:
        raise BadInput(f"limit is {limit!r:.40}, must be a number from 1")
    items = items_of(_found(request).input_items)
    items = _after(asked.get("after"), items if order == "asc" else items[::-1])
    shown = items[: len(items) if limit is None else int(limit)]
    return answer(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(shown) < len(items),
        }
    )


def _after(identity: str | None, items: list[Item]) -> list[Item]:
    if identity is None:
        return items
    for place, item in enumerate(items, start=1):
        if item["id"] == identity:
            return items[place:]
    raise BadInput(f"after is {identity!r:.80}, which is the id of none of these items")


def items_of(asked: bytes) -> list[Item]:
    """The items as the specification lists them. An item that came without an id gets one that
    follows from all items up to it: it is the same whenever they are listed, also for a response
    that follows."""
    so_far, items = hashlib.sha256(), []
    for raw in msgspec.json.decode(b"[%b]" % asked, type=list[msgspec.Raw]):
        so_far.update(bytes(raw))
        given = msgspec.json.decode(raw)
        kind = given.get("type") or "message"
        made = f"{PREFIXES[kind]}_{so_far.hexdigest()[:32]}"
        item = {**given, "type": kind, "id": given.get("id") or made}
        item["status"] = given.get("status") or "completed"
        items.append({**item, **_parts(item)} if kind == "message" else item)
    return items


def _parts(message: Item) -> Item:
    """The content of a message as parts, where a client gave a plain text."""
    content = message.get("content")
    if not isinstance(content, str):
        return {}
    if message.get("role") == "assistant":
        part: Item = {"type": "output_text", "text": content, "annotations": []}
    else:
        part = {"type": "input_text", "text": content}
    return {"content": [part]}


async def delete(request: Request) -> Response:
    """Deletes the response; one that is still being made ends first."""
    service: Service = request.app.state.service
    identity, owner = _identity(request), owner_of(request.scope["headers"])
    await service.background.cancel(owner, identity)
    if service.kept is None or not service.kept.drop(owner, identity):
        raise _absent(service, identity)
    return answer({"id": identity, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """Ends a response that is made in the background; harmless if it has ended."""
    service: Service = request.app.state.service
    was_open = await service.background.cancel(
        owner_of(request.scope["headers"]), _identity(request)
    )
    kept = _found(request)
    if not was_open and not msgspec.json.decode(kept.document)["background"]:
        raise BadInput(
            "background is false for this response, which has ended: nothing can be cancelled"
        )
    return Response(kept.document, media_type=JSON)


def _found(request: Request) -> KeptResponse:
    service: Service = request.app.state.service
    identity = _identity(request)
    kept = service.kept
    response = None if kept is None else kept.find(owner_of(request.scope["headers"]), identity)
    if response is None:
        raise _absent(service, identity)
    return response


def _identity(request: Request) -> str:
    if request.scope["path"] == COUNTED:
        raise HTTPException(405)
    return str(request.path_params["response_id"])


def _absent(service: Service, identity: str) -> Absent:
    why = ": --keep-responses is not set" if service.kept is None else ", or no longer"
    return Absent(f"the response {identity!r:.80} is not kept here{why}")


DOORS: Final = (
    Door("GET", (PATH,), retrieve, "A response that is kept."),
    Door("DELETE", (PATH,), delete, "Forget a response."),
    Door(
        "GET",
        (f"{PATH}/input_items",),
        input_items,
        "The items that led to a response.",
        queries=("order", "limit", "after"),
    ),
    Door("POST", (f"{PATH}/cancel",), cancel, "End a response that is made in the background."),
)
