"""/openapi.json: every route with its request and answer forms, as OpenAPI 3.1.

FastAPI makes the document from the routes. Each operation gets what its declaration says, and the
document the schemas of the bodies: they are the structs that the routes read, so the document
cannot differ from the code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ess.server.http.auth_limits import OPEN_PATHS
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.http.responses import JSON, MESSAGES_TYPE_OF, STATUS_OF, is_of_messages

SCHEMAS: Final = "#/components/schemas/"


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """An error body: a sentence for people, a type and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, forbid_unknown_fields=True):
    error: Error


class MessagesError(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    message: str


class MessagesErrorAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """An error body in Anthropic's form."""

    type: str
    error: MessagesError
    request_id: str


def completed(document: Mapping[str, Any], doors: Sequence[Door]) -> dict[str, Any]:
    """The document with the schemas that its operations name, and with the API key."""
    structs = {door.asks for door in doors if door.asks is not None}
    named = sorted(structs, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(
        [*named, ErrorAnswer, MessagesErrorAnswer], ref_template=SCHEMAS + "{name}"
    )
    made = document.get("components", {})
    return {
        **document,
        "components": {
            **made,
            "schemas": {**made.get("schemas", {}), **schemas},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def operation(door: Door, path: str) -> dict[str, Any]:
    """What FastAPI cannot see of a route, as its handler takes a request and reads the body."""
    made: dict[str, Any] = {
        "parameters": _parameters(path, door),
        "responses": {"200": _good_answer(door), **_errors(path)},
    }
    if door.asks is not None:
        content = {"schema": {"$ref": SCHEMAS + door.asks.__name__}, "example": door.example}
        made["requestBody"] = {"required": True, "content": {JSON: content}}
    if door.takes:
        content = {"schema": {"type": "string", "format": "binary"}}
        made["requestBody"] = {"required": True, "content": {door.takes: content}}
    if path in OPEN_PATHS:
        made["security"] = []
    return made


_WORDS: Final = str.maketrans({"/": "_", ".": "_", "-": "_", "{": "_", "}": None})


def operation_id(method: str, path: str) -> str:
    """
    >>> operation_id("GET", "/v1/models/{model:path}")
    'get_v1_models__model'
    """
    return f"{method.lower()}_{path.strip('/').replace(':path', '').translate(_WORDS)}"


_REQUEST_ID: Final = {
    "description": "The request's id: the one that was given, or one that was made.",
    "schema": {"type": "string"},
}


def _parameters(path: str, door: Door) -> list[dict[str, Any]]:
    text = {"type": "string"}
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": text} for name in door.queries
    ]
    parameters += [
        {"name": part.strip("{}").partition(":")[0], "in": "path", "required": True, "schema": text}
        for part in path.split("/")
        if part.startswith("{")
    ]
    return [*parameters, {"name": "x-request-id", "in": "header", "schema": text}]


def _good_answer(door: Door) -> dict[str, Any]:
    schemas: dict[str, Any] = {JSON: {"type": ["object", "array"]}, EVENTS: {}}
    return {
        "description": door.sentence,
        "headers": {"x-request-id": _REQUEST_ID},
        "content": {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in door.gives},
    }


def _errors(path: str) -> dict[str, Any]:
    """The error answers, all of one form; those of an overloaded server carry Retry-After."""
    form, types = (
        (MessagesErrorAnswer, MESSAGES_TYPE_OF) if is_of_messages(path) else (ErrorAnswer, {})
    )
    content = {JSON: {"schema": {"$ref": SCHEMAS + form.__name__}}}
    kinds: dict[int, list[str]] = {}
    for _, status, kind in STATUS_OF:
        kinds.setdefault(status, []).append(types.get(kind, kind))
    kinds[500] = [types.get("server_error", "server_error")]
    return {
        str(status): {
            "description": " or ".join(dict.fromkeys(named)),
            "headers": {"x-request-id": _REQUEST_ID, **(_AGAIN if status == 503 else {})},
            "content": content,
        }
        for status, named in sorted(kinds.items())
    }


_AGAIN: Final = {
    "retry-after": {"description": "Seconds.", "schema": {"type": "string"}},
    "x-ess-reason": {"description": "What is short.", "schema": {"type": "string"}},
}
