"""An OpenTelemetry span per generating request, if the package and an endpoint are given.

Plain ASGI inside auth_limits: a request without a valid key has no span. The request's
`traceparent` is the span's parent. The span ends with the answer's last byte, so its length is the
request's; the time of the first byte is an attribute and an event.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ess
from ess.errors import not_installed

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

TRACED: Final = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/generate", "/inference/v1/generate"),
    }
)


@contextlib.contextmanager
def provided(endpoint: str, *, model: str) -> Iterator[TracerProvider | None]:
    """The provider, or None without an endpoint; remaining spans are flushed at the end."""
    provider = provider_to(endpoint, model=model) if endpoint else None
    try:
        yield provider
    finally:
        if provider is not None:
            provider.shutdown()


def provider_to(endpoint: str, *, model: str) -> TracerProvider:
    """A provider that exports spans in batches from its own thread."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), extra="otel") from None
    return provider_over(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)), model=model)


def provider_over(processor: SpanProcessor, *, model: str) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    about = {"service.name": "ess", "service.version": ess.__version__, "ess.model": model}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    return provider


class Spans:
    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = provider.get_tracer("ess.server", ess.__version__)
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in TRACED:
            await self._app(scope, receive, send)
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode

        carried = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        began_s, has_body = time.monotonic(), False
        with self._tracer.start_as_current_span(
            f"{scope['method']} {scope['path']}",
            context=self._propagator.extract(carried),
            kind=SpanKind.SERVER,
        ) as span:
            span.set_attribute("http.request.method", scope["method"])
            span.set_attribute("http.route", scope["path"])
            span.set_attribute("gen_ai.request.id", scope["state"]["request_id"])

            async def noted(message: Message) -> None:
                nonlocal has_body
                await send(message)
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(Status(StatusCode.ERROR))
                elif message.get("body") and not has_body:
                    has_body = True
                    span.set_attribute("ess.first_byte_s", time.monotonic() - began_s)
                    span.add_event("first byte")

            await self._app(scope, receive, noted)
