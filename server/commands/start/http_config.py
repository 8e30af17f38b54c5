"""How the server speaks HTTP and HTTPS: what uvicorn is told, and files that it reads again."""

from __future__ import annotations

import contextlib
import functools
import ssl
from collections.abc import Sequence
from typing import TYPE_CHECKING

import uvicorn

from ess.errors import BadInput
from ess.server.commands.start.files.hidden_files import check_tls, read_keys
from ess.server.commands.start.files.watched import FILES_S, Watched
from ess.server.commands.start.settings import Settings
from ess.server.commands.start.sizing import size_of
from ess.server.commands.start.written_addresses import listed
from ess.server.http.app import create_app
from ess.server.http.auth_limits import Keys
from ess.server.http.connection.protocol import limited
from ess.server.http.request_log import RequestLog
from ess.server.process.service import Service
from ess.units import div_ceil

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp


def uvicorn_config(
    settings: Settings, service: Service, *, spans: TracerProvider | None = None
) -> uvicorn.Config:
    protocol = limited(
        connections_max=div_ceil(settings.max_connections, settings.server_processes),
        head_bytes_max=size_of(settings.header_bytes, of=1 << 20),
        stall_s=settings.stall_s,
        tally=service.tally,
        unsent_max=service.link.calls.unread_max,
    )
    api = create_app(
        service,
        keys=settings.keys,
        spans=spans,
        root_path=settings.root_path,
        origins=settings.origins,
    )
    app: ASGIApp = api
    if settings.request_log:
        app = RequestLog(api, clock=service.clock, is_json=settings.log_format == "json")
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(settings.idle_s),
        timeout_graceful_shutdown=2,
        ssl_certfile=settings.tls_cert or None,
        ssl_keyfile=settings.tls_key or None,
        ssl_ca_certs=settings.tls_ca or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_ca else ssl.CERT_NONE,
    )
    watched = watched_files(settings, config, api.state.keys)
    config.callback_notify = functools.partial(refresh, watched)
    config.timeout_notify = FILES_S
    return config


def watched_files(settings: Settings, config: uvicorn.Config, keys: Keys) -> list[Watched]:
    """The keys are read here too: those of the settings are as old as the server, and this process
    may have replaced another one."""

    def use_certificate() -> str:
        check_tls(settings.tls_cert, settings.tls_key)
        assert config.ssl is not None, "a server with a certificate speaks TLS"
        config.ssl.load_cert_chain(settings.tls_cert, settings.tls_key)
        return "new connections get the new one"

    def use_keys() -> str:
        listed_keys = listed(read_keys(settings.api_key_file))
        keys.replace(listed_keys)
        return "1 key is valid" if len(listed_keys) == 1 else f"{len(listed_keys)} keys are valid"

    watched = []
    if settings.tls_cert:
        pair = (settings.tls_cert, settings.tls_key)
        watched.append(Watched("the certificate", pair, use_certificate))
    if settings.api_key_file:
        watched.append(Watched("api_key_file", listed(settings.api_key_file), use_keys))
        with contextlib.suppress(BadInput):
            use_keys()
    return watched


async def refresh(watched: Sequence[Watched]) -> None:
    for files in watched:
        files.refresh()
