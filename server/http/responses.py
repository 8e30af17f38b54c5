"""Answers that are not streams: JSON, and errors in the form of OpenAI clients, or of Anthropic's
at /v1/messages and for clients that send `anthropic-version`.

    {"error": {"message", "type", "param", "code"}}
    {"type": "error", "error": {"type", "message"}, "request_id"}

Overload carries Retry-After (in seconds, and in milliseconds for clients that read those) and
`x-ess-reason`, the name of the exhausted resource.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from ess.errors import BadInput, BadState, EssError, PoolFull, Unavailable

JSON: Final = "application/json"
MESSAGES: Final = "/v1/messages"
FIELD: Final = re.compile(
    r"(?:the )?([a-z]+(?:_[a-z]+)*)(?:[.\[][\w.\[\]]*| (?:of )?id -?\d+)?(?::| (?:is|has|must)\b)"
)


class Refused(EssError):
    """A valid request that cannot be served now."""

    def __init__(self, sentence: str, *, reason: str, retry_after_s: float | None) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Interrupted(Unavailable):
    """The engine that had the request is gone; another can be asked in a while."""

    retry_after_s: float = 5.0


class Broken(EssError):
    """The model's output for this request is not numbers; other requests are not affected."""


class Denied(EssError):
    """The API key is missing or wrong."""


class Foreign(EssError):
    """Another site's page had a browser send this request."""


class Absent(EssError):
    """The model or route does not exist."""

    def __init__(self, sentence: str, *, code: str | None = None) -> None:
        super().__init__(sentence)
        self.code = code


class TooLarge(EssError):
    """The body exceeds the limit."""


STATUS_OF: Final[tuple[tuple[type[EssError], int, str], ...]] = (
    (Denied, 401, "authentication_error"),
    (Foreign, 403, "permission_error"),
    (Absent, 404, "not_found_error"),
    (TooLarge, 413, "invalid_request_error"),
    (Refused, 503, "overloaded"),
    (PoolFull, 503, "overloaded"),
    (BadInput, 400, "invalid_request_error"),
    (BadState, 409, "conflict_error"),
    (Unavailable, 503, "unavailable_error"),
    (Broken, 500, "server_error"),
)
MESSAGES_TYPE_OF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "overloaded": "overloaded_error",
        "unavailable_error": "api_error",
        "server_error": "api_error",
        "conflict_error": "invalid_request_error",
    }
)
"""Anthropic's types of errors, where they are not ours."""


def answer(document: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(
        msgspec.json.encode(document), status_code=status, headers=headers, media_type=JSON
    )


def error_body(error: EssError) -> tuple[int, dict[str, Any]]:
    """The status and body of an error; `param` is the field that the sentence begins with."""
    named = FIELD.match(str(error)) if isinstance(error, BadInput) else None
    param = named[1] if named is not None and named[1] != "body" else None
    for kind, status, name in STATUS_OF:
        if isinstance(error, kind):
            return status, _body(str(error), name, param=param, code=_code(error))
    return 500, _body("the server failed; its log says how", "server_error")


def _code(error: EssError) -> str | None:
    match error:
        case Refused():
            return error.reason
        case Absent():
            return error.code
        case Broken():
            return "numerical_error"
    return None


def _body(
    sentence: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": sentence, "type": kind, "param": param, "code": code}}


def is_of_messages(path: str) -> bool:
    """Whether a path, without a proxy's prefix, is one at which Anthropic's clients ask."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def is_of_anthropic(path: str, state: Mapping[str, Any]) -> bool:
    """Whether a client of Anthropic asks: it names its version, also where it asks for models."""
    return is_of_messages(path) or state["has_version"]


def messages_error(error: EssError, request_id: str) -> tuple[int, dict[str, Any]]:
    """The status and body of an error in Anthropic's form, which streams have too."""
    status, body = error_body(error)
    ours = body["error"]["type"]
    kind = "request_too_large" if status == 413 else MESSAGES_TYPE_OF.get(ours, ours)
    told = {"type": kind, "message": body["error"]["message"]}
    return status, {"type": "error", "error": told, "request_id": request_id}


def error_answer(error: EssError, scope: Scope | None = None) -> Response:
    """The answer to the request of `scope`, in the form of its client."""
    if scope is not None and is_of_anthropic(scope["path"], scope["state"]):
        status, body = messages_error(error, scope["state"]["request_id"])
    else:
        status, body = error_body(error)
    headers = {}
    if isinstance(error, Refused):
        headers["x-ess-reason"] = error.reason
    if isinstance(error, Refused | Interrupted) and error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        headers["retry-after-ms"] = str(round(error.retry_after_s * 1000))
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return answer(body, status=status, headers=headers)
