"""The routes, and what happens to an error on its way out."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ess.errors import BadInput, EssError
from ess.server.dialects import chat, completions, generate
from ess.server.http import (
    dashboard,
    events,
    openapi,
    status_routes,
    telemetry,
    text_routes,
    trace_routes,
)
from ess.server.http.auth_limits import Gate
from ess.server.http.responses import Absent, answer, error_answer
from ess.server.process.service import Service

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Handler = Callable[[Request], Awaitable[Response]]


async def openapi_document(request: Request) -> Response:
    return answer(openapi.document([(methods, path) for methods, path, _ in ROUTES]))


ROUTES: Sequence[tuple[str, str, Handler]] = (
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/chat/completions", chat.chat),
    ("POST", "/generate", generate.generate),
    ("POST", "/inference/v1/generate", generate.generate_tokens),
    ("POST", "/tokenize", text_routes.tokenize),
    ("POST", "/v1/tokenize", text_routes.tokenize),
    ("POST", "/detokenize", text_routes.detokenize),
    ("POST", "/v1/detokenize", text_routes.detokenize),
    ("POST", "/abort_request", text_routes.abort),
    ("POST", "/abort_requests", text_routes.abort),
    ("GET POST", "/flush_cache", text_routes.flush),
    ("GET", "/v1/models", status_routes.models),
    ("GET", "/version", status_routes.version),
    ("GET", "/server_info", status_routes.server),
    ("GET", "/get_server_info", status_routes.server),
    ("GET", "/model_info", status_routes.model),
    ("GET", "/get_model_info", status_routes.model),
    ("GET", "/health", status_routes.health),
    ("GET", "/health_generate", status_routes.health_generate),
    ("GET", "/ready", status_routes.ready),
    ("GET", "/v1/loads", status_routes.loads),
    ("GET", "/metrics", status_routes.metrics),
    ("GET", "/v1/events", events.events),
    ("POST", "/trace/start", trace_routes.start),
    ("POST", "/trace/stop", trace_routes.stop),
    ("GET", "/dashboard", dashboard.page),
    ("GET", "/dashboard/{recording}", dashboard.recording),
    ("GET", "/openapi.json", openapi_document),
)


def make_app(
    service: Service, *, keys: Sequence[str] = (), spans: TracerProvider | None = None
) -> ASGIApp:
    routes = [
        Route(path, _named(path, handler), methods=methods.split())
        for methods, path, handler in ROUTES
    ]
    app = Starlette(
        routes=routes,
        exception_handlers={EssError: _on_error, HTTPException: _on_http},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    app.state.frames = events.Frames(service)
    inner: ASGIApp = app if spans is None else telemetry.Spans(app, spans)
    return Gate(inner, keys=keys, body_max=service.limits.body_max, tally=service.tally)


def _named(path: str, handler: Handler) -> Handler:
    """Runs a route, counted under its own path; an unexpected exception becomes a 500."""

    async def handle(request: Request) -> Response:
        request.scope["route_name"] = path
        try:
            return await handler(request)
        except (EssError, HTTPException):
            raise
        except Exception as error:
            return _failed(request, error)

    return handle


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EssError), "registered for these"
    return error_answer(error)


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for these"
    path = request.url.path[:100]
    if error.status_code == 404:
        return error_answer(Absent(f"there is no {path}; {_nearest(path)}"))
    served = (error.headers or {}).get("Allow", "")
    made = error_answer(BadInput(f"{request.method} is not served at {path}; {served} is"))
    made.status_code = error.status_code
    made.headers.update(error.headers or {})
    return made


def _nearest(path: str) -> str:
    """The known path closest to the requested one; often a client's base URL lacks /v1."""
    known = [route for _, route, _ in ROUTES]
    close = [f"/v1{path}"] if f"/v1{path}" in known else difflib.get_close_matches(path, known, n=1)
    return f"did you mean {close[0]}?" if close else "/openapi.json lists what there is"


def _failed(request: Request, error: Exception) -> Response:
    """The log gets the exception; the client gets a 500 without details."""
    state = request.state
    traced = f" of trace {state.trace}" if state.trace else ""
    log = logging.getLogger("ess")
    log.error("request %s%s failed", state.request_id, traced, exc_info=error)
    return error_answer(EssError())
