"""The application: its routes, and how errors become answers.

`ess serve` runs it, and it can be a part of another FastAPI or Starlette application:

    parent = FastAPI()
    parent.mount("/llm", create_app(service, keys=["secret"]))

It keeps its state in itself and needs no lifespan: the caller that makes the service runs its link.
Below a prefix its document, its pages and its errors name the right addresses. Middleware in front
of it still sees every byte: events go straight to the socket only without middleware.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.exception_handlers import http_exception_handler
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

import ess
from ess.errors import BadInput, EssError
from ess.server.dialects.routes import (
    anthropic_messages,
    chat,
    completions,
    generate,
    openai_responses,
    past_responses,
)
from ess.server.http import dashboard, events, telemetry
from ess.server.http.auth_limits import Gate, Keys
from ess.server.http.connection.outlets import STRAIGHT
from ess.server.http.openapi import pages
from ess.server.http.openapi.document import completed, operation, operation_id
from ess.server.http.openapi.door import DirectRoute, Door
from ess.server.http.responses import Absent, error_answer
from ess.server.http.routes import (
    pause_routes,
    peer_routes,
    status_routes,
    text_routes,
    trace_routes,
)
from ess.server.http.routes.absent import why_absent
from ess.server.process.service import Service

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ROOMS: Final[Mapping[str, Sequence[Door]]] = MappingProxyType(
    {
        "openai": (*completions.DOORS, *chat.DOORS, *openai_responses.DOORS, *past_responses.DOORS),
        "anthropic": anthropic_messages.DOORS,
        "generate": generate.DOORS,
        "text": text_routes.DOORS,
        "status": status_routes.DOORS,
        "events": events.DOORS,
        "peers": peer_routes.DOORS,
        "pause": pause_routes.DOORS,
        "trace": trace_routes.DOORS,
        "dashboard": dashboard.DOORS,
        "document": pages.DOORS,
    }
)
DOORS: Final = tuple(door for doors in ROOMS.values() for door in doors)
CLOSE: Final = 0.85


class Application(FastAPI):
    """FastAPI with the schemas of our bodies in its document, and usable below any prefix.

    Inside, paths are without the prefix, which is in `app_root_path`: code that compares a path
    with a route, such as the check of the key, need not know where the app is mounted.
    """

    def __init__(self, *, prefix: str, **given: Any) -> None:
        super().__init__(**given)
        self._prefix = prefix
        self._document: dict[str, Any] | None = None

    def openapi(self) -> dict[str, Any]:
        if self._document is None:
            self._document = completed(super().openapi(), DOORS)
        return self._document

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix: str = self._prefix or scope.get("root_path", "")
        if prefix:
            path: str = scope["path"]
            if path == prefix or path.startswith(prefix + "/"):
                path = path[len(prefix) :] or "/"
            scope = {**scope, "path": path, "root_path": "", "app_root_path": prefix}
        if STRAIGHT in scope.get("extensions", ()) and not _is_of_socket(send):
            kept = {name: v for name, v in scope["extensions"].items() if name != STRAIGHT}
            scope = {**scope, "extensions": kept}
        await super().__call__(scope, receive, send)


def _is_of_socket(send: Send) -> bool:
    """Whether nothing wraps `send`: a wrapper would miss events that go straight to the socket."""
    return isinstance(getattr(send, "__self__", None), RequestResponseCycle)


def create_app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    spans: TracerProvider | None = None,
    root_path: str = "",
    origins: Sequence[str] = (),
) -> FastAPI:
    """`root_path` is the prefix of a proxy in front; a parent that mounts the app sets its own.
    `app.state.keys` has the keys, to replace them."""
    app = Application(
        title="ESS",
        version=ess.__version__,
        prefix=root_path,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={EssError: _on_error, HTTPException: _on_http},
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.service = service
    app.state.keys = Keys(keys)
    app.state.frames = events.Frames(service)
    _add_routes(app)
    if spans is not None:
        app.add_middleware(telemetry.Spans, provider=spans)
    app.add_middleware(
        Gate,
        keys=app.state.keys,
        names=service.limits.names,
        body_max=service.limits.body_max,
        tally=service.tally,
        origins=origins,
    )
    return app


def _add_routes(app: FastAPI) -> None:
    """Adds routes to the app's own router: routers per room would be searched as a whole.

    HEAD is served wherever GET is; its routes come last and are not in the document.
    """
    for room, doors in ROOMS.items():
        for door in doors:
            for method in door.methods.split():
                _add_route(app, method, door, tags=[room])
    for door in DOORS:
        if "GET" in door.methods.split():
            _add_route(app, "HEAD", msgspec.structs.replace(door, listed=False), tags=[])


def _add_route(app: FastAPI, method: str, door: Door, *, tags: list[Any]) -> None:
    for path in door.paths:
        app.router.add_api_route(
            path,
            door.handler,
            methods=[method],
            tags=tags,
            summary=door.sentence,
            response_description=door.sentence,
            operation_id=operation_id(method, path),
            response_model=None,
            response_class=Response,
            openapi_extra=operation(door, path),
            include_in_schema=door.listed,
            route_class_override=DirectRoute,
        )


# ---- errors


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EssError), "registered for these"
    return error_answer(error, request.scope)


async def _on_http(request: Request, error: Exception) -> Response:
    """A path that does not exist, or not for this method; other errors come from added routes. A
    browser that was given the bare address is sent to the page to talk to the model."""
    assert isinstance(error, HTTPException), "registered for these"
    path = request.scope["path"][:100]
    is_browser = "text/html" in request.headers.get("accept", "")
    if path == "/" and request.method in ("GET", "HEAD") and is_browser:
        return RedirectResponse(request.scope.get("app_root_path", "") + "/chat")
    if error.status_code == 405 and not why_absent(path):
        return _not_allowed(request, path)
    if error.detail in (HTTPStatus.NOT_FOUND.phrase, HTTPStatus.METHOD_NOT_ALLOWED.phrase):
        missing = Absent(f"there is no {path}; {_nearest(path)}")
        return error_answer(missing, request.scope)
    return await http_exception_handler(request, error)


def _not_allowed(request: Request, path: str) -> Response:
    served = _methods_at(request)
    shown = sorted(served - {"HEAD"})
    verb = "is" if len(shown) == 1 else "are"
    sentence = f"{request.method} is not served at {path}; {' and '.join(shown)} {verb}"
    made = error_answer(BadInput(sentence), request.scope)
    made.status_code = 405
    made.headers["allow"] = ", ".join(sorted(served))
    return made


def _methods_at(request: Request) -> set[str]:
    """The methods of a path, each of which has its own route. A path of its own comes before a
    pattern that it fits too."""
    scope = request.scope
    met = [each for each in request.app.routes if each.matches(scope)[0] is not Match.NONE]
    own = [route for route in met if getattr(route, "path", "") == scope["path"]]
    return {method for route in own or met for method in getattr(route, "methods", None) or ()}


def _nearest(path: str) -> str:
    """The known path that was probably meant: often /v1 is missing, or a slash is too many."""
    known = {path for door in DOORS for path in door.paths if door.listed and "{" not in path}
    if why := why_absent(path):
        return why
    path = path.rstrip("/").lower()
    meant = [near for near in (path, f"/v1{path}", path.removeprefix("/v1")) if near in known]
    meant = meant or difflib.get_close_matches(path, sorted(known), n=1, cutoff=CLOSE)
    return f"did you mean {meant[0]}?" if meant else "/openapi.json lists what there is"
