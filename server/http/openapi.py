"""/openapi.json: every route with its request and answer forms, as OpenAPI 3.1.

The bodies are the structs that the routes read, so the document cannot say anything else. The
routes come from the app; what they are for stands in `DOORS`, and a route without a line there, or
a line without a route, fails the test of this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

import ess
from ess.server.dialects import schemas
from ess.server.http.auth_limits import OPEN_PATHS
from ess.server.http.responses import JSON, STATUS_OF

EVENTS: Final = "text/event-stream"
SCHEMAS: Final = "#/components/schemas/"


class Error(msgspec.Struct, forbid_unknown_fields=True):
    """An error body: a sentence for people, a type and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct, forbid_unknown_fields=True):
    error: Error


class Door(msgspec.Struct, frozen=True):
    """`asks` is read from the body, `gives` are the media types of a good answer."""

    sentence: str
    asks: type[msgspec.Struct] | None = None
    gives: tuple[str, ...] = (JSON,)
    example: dict[str, Any] | None = None
    queries: tuple[str, ...] = ()


def _grows(sentence: str, ask: type[msgspec.Struct], example: dict[str, Any]) -> Door:
    return Door(sentence, ask, (JSON, EVENTS), example)


_TOKENIZE: Final = Door(
    "Texts or a conversation to ids.", schemas.TokenizeAsk, example={"prompt": "Hello"}
)
_DETOKENIZE: Final = Door("Ids to texts.", schemas.DetokenizeAsk, example={"tokens": [72, 105]})
_ABORT: Final = Door("End requests by their ids.", schemas.AbortAsk, example={"rid": "mine"})
_HELLO: Final = [{"role": "user", "content": "Hello"}]
_SERVER: Final = Door("What was configured, where from, and what the engine chose.")
_MODEL: Final = Door("The model.")

DOORS: Final[Mapping[str, Door]] = MappingProxyType(
    {
        "/v1/completions": _grows(
            "Complete prompts.", schemas.CompletionAsk, {"prompt": "Hello", "max_tokens": 16}
        ),
        "/v1/chat/completions": _grows(
            "Answer a conversation.", schemas.ChatAsk, {"messages": _HELLO, "max_tokens": 16}
        ),
        "/generate": _grows(
            "Complete prompts, as SGLang has it.",
            schemas.GenerateAsk,
            {"text": "Hello", "sampling_params": {"max_new_tokens": 16}},
        ),
        "/inference/v1/generate": _grows(
            "Ids in, ids out.",
            schemas.TokensAsk,
            {"token_ids": [72, 105], "sampling_params": {"max_tokens": 16}},
        ),
        "/tokenize": _TOKENIZE,
        "/v1/tokenize": _TOKENIZE,
        "/detokenize": _DETOKENIZE,
        "/v1/detokenize": _DETOKENIZE,
        "/abort_request": _ABORT,
        "/abort_requests": _ABORT,
        "/flush_cache": Door("Forget cached prefixes, when nothing runs."),
        "/v1/models": Door("The names under which the model is served."),
        "/version": Door("The version of this server."),
        "/server_info": _SERVER,
        "/get_server_info": _SERVER,
        "/model_info": _MODEL,
        "/get_model_info": _MODEL,
        "/health": Door("Alive: the engine is not lost."),
        "/health_generate": Door("Healthy enough to make one token."),
        "/ready": Door("Send requests here."),
        "/v1/loads": Door("The load, as SGLang has it.", queries=("include",)),
        "/metrics": Door("Metrics, as Prometheus scrapes them.", gives=("text/plain",)),
        "/v1/events": Door("What the engine does, a few times a second.", gives=(EVENTS,)),
        "/trace/start": Door("Keep what every step does."),
        "/trace/stop": Door("What was kept, as a trace for Perfetto."),
        "/dashboard": Door("A page that shows all this.", gives=("text/html",)),
        "/dashboard/{recording}": Door("A recording for the page."),
        "/openapi.json": Door("This document."),
    }
)


def document(routes: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """`routes` are methods, separated by spaces, and a path."""
    structs = {door.asks for door in DOORS.values() if door.asks is not None}
    named = sorted(structs, key=lambda struct: struct.__name__)
    _, schemas = msgspec.json.schema_components(
        [*named, ErrorAnswer], ref_template=SCHEMAS + "{name}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "ESS", "version": ess.__version__},
        "paths": {path: _path(methods.split(), path) for methods, path in routes},
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _path(methods: Sequence[str], path: str) -> dict[str, Any]:
    return {method.lower(): _operation(method, path, DOORS[path]) for method in methods}


def _operation(method: str, path: str, door: Door) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": f"{method.lower()}_{path.strip('/').translate(_WORDS)}",
        "summary": door.sentence,
        "parameters": _parameters(path, door),
        "responses": {"200": _good(door), **_errors()},
    }
    if door.asks is not None:
        content = {"schema": {"$ref": SCHEMAS + door.asks.__name__}, "example": door.example}
        made["requestBody"] = {"required": True, "content": {JSON: content}}
    if path in OPEN_PATHS:
        made["security"] = []
    return made


_WORDS: Final = str.maketrans("/.{", "___", "}")
_REQUEST_ID: Final = {
    "description": "The request's id: the one that was given, or one that was made.",
    "schema": {"type": "string"},
}


def _parameters(path: str, door: Door) -> list[dict[str, Any]]:
    text = {"type": "string"}
    found: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": text} for name in door.queries
    ]
    found += [
        {"name": part.strip("{}"), "in": "path", "required": True, "schema": text}
        for part in path.split("/")
        if part.startswith("{")
    ]
    return [*found, {"name": "x-request-id", "in": "header", "schema": text}]


def _good(door: Door) -> dict[str, Any]:
    schemas: dict[str, Any] = {JSON: {"type": ["object", "array"]}, EVENTS: {}}
    return {
        "description": door.sentence,
        "headers": {"x-request-id": _REQUEST_ID},
        "content": {kind: {"schema": schemas.get(kind, {"type": "string"})} for kind in door.gives},
    }


def _errors() -> dict[str, Any]:
    """All errors share one shape; those of an overloaded server carry Retry-After."""
    content = {JSON: {"schema": {"$ref": SCHEMAS + "ErrorAnswer"}}}
    kinds: dict[int, list[str]] = {}
    for _, status, kind in STATUS_OF:
        kinds.setdefault(status, []).append(kind)
    kinds[500] = ["server_error"]
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
