"""The id, session and trace of a request: read from it, returned in the answer's headers.

The API key is read here too: for its check, and to tell the responses of different clients apart.
An id and a session are taken from headers or bodies and come back as headers. A W3C traceparent
keeps its trace, but its parent becomes ours: in the answer and in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from ess.engine.requests.request import PRIORITY_MAX
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.server.dialects.legs import leg_of
from ess.server.dialects.schemas import Generated
from ess.server.http.responses import is_of_anthropic
from ess.server.process.bounds import NAME_CHARS_MAX
from ess.server.process.requests.call import Call
from ess.server.process.service import Service

NAME: Final = re.compile(rb"[\x21-\x7e]{1,%d}" % NAME_CHARS_MAX)
PARENT: Final = re.compile(rb"00-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})")


def address(headers: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Id, session and trace from a request's headers; malformed values are ignored."""
    request_id, session_id = headers.get(b"x-request-id", b""), headers.get(b"x-session-id", b"")
    state: dict[str, Any] = {
        "request_id": request_id.decode() if NAME.fullmatch(request_id) else secrets.token_hex(16),
        "session_id": session_id.decode() if NAME.fullmatch(session_id) else "",
        "trace": "",
        "has_version": b"anthropic-version" in headers,
    }
    parent = PARENT.fullmatch(headers.get(b"traceparent", b""))
    if parent is not None:
        trace, flags = parent[1].decode(), parent[2].decode()
        state["trace"] = f"00-{trace}-{secrets.token_hex(8)}-{flags}"
    return state


def given_key(headers: Mapping[bytes, bytes]) -> bytes:
    """The API key that came along, as Authorization: Bearer KEY or as x-api-key; empty if none."""
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return (key if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")).strip()


def headers_of(state: Mapping[str, Any], path: str) -> list[tuple[bytes, bytes]]:
    """The headers of the answer; Anthropic's clients know the id as `request-id`."""
    said = (
        (b"x-request-id", state["request_id"]),
        (b"request-id", state["request_id"] if is_of_anthropic(path, state) else ""),
        (b"x-session-id", state["session_id"]),
        (b"traceparent", state["trace"]),
    )
    return [(name, value.encode()) for name, value in said if value]


def begin(
    request: Request,
    ask: Generated,
    prompts: Sequence[tuple[list[int], Sampling]],
    *,
    named: str | None,
    names: Sequence[str] = (),
) -> Call:
    """Hands the prompts to the engine under the id in the body, or else in the header, and with the
    rows' destination or origin if a router has named one. `names` are ids of the prompts, if they
    have their own; all choices of a prompt have its id."""
    service: Service = request.app.state.service
    priority = ask.priority or 0
    if abs(priority) > PRIORITY_MAX:
        raise BadInput(f"priority is {priority}, must be -{PRIORITY_MAX}..{PRIORITY_MAX}")
    for field in ("rid", "request_id", "session_id"):
        _check_names(field, getattr(ask, field, None))
    if ask.session_id:
        request.state.session_id = ask.session_id
    if named:
        request.state.request_id = named
    own = dict.fromkeys(id(prompt) for prompt, _ in prompts)
    leg = leg_of(request, ask, len(own))
    name_of = dict(zip(own, names, strict=bool(names)))
    call = service.begin(
        request.state.request_id,
        prompts,
        names=[name_of[id(prompt)] or request.state.request_id for prompt, _ in prompts if names],
        priority=priority,
        salt=_salt(ask),
        handoffs=leg.handoffs,
    )
    call.params = leg.params
    request.state.call = call
    return call


def _check_names(field: str, given: str | Sequence[str] | None) -> None:
    """Refuses bad names: they come back in headers and in every event."""
    for name in [given] if isinstance(given, str) else given or ():
        if name and not NAME.fullmatch(name.encode(errors="replace")):
            raise BadInput(f"{field} must be 1 to {NAME_CHARS_MAX} visible ASCII characters")


def _salt(ask: Generated) -> str:
    """An empty `extra_key` is none, as in SGLang; vLLM refuses an empty `cache_salt`."""
    given = (("cache_salt", ask.cache_salt), ("extra_key", ask.extra_key or None))
    for name, salt in given:
        if salt is not None and not 0 < len(salt) <= NAME_CHARS_MAX:
            raise BadInput(f"{name} has {len(salt):,} characters, not 1..{NAME_CHARS_MAX}")
    salt, more = (salt or "" for _, salt in given)
    return f"{len(salt)} {salt}{more}" if salt or more else ""
