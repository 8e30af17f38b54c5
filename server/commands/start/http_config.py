"""How the server speaks HTTP and HTTPS: what uvicorn is told, and the certificate kept fresh."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn

from ess import console
from ess.errors import BadInput
from ess.server.commands.start.files.hidden_files import check_tls
from ess.server.commands.start.settings import Settings
from ess.server.commands.start.sizing import size_of
from ess.server.http.app import create_app
from ess.server.http.connection.protocol import limited
from ess.server.http.request_log import RequestLog
from ess.server.process.service import Service
from ess.units import div_ceil

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp

CERTIFICATE_S: Final = 10


def uvicorn_config(
    settings: Settings, service: Service, *, spans: TracerProvider | None = None
) -> uvicorn.Config:
    protocol = limited(
        connections_max=div_ceil(settings.max_connections, settings.server_processes),
        head_bytes_max=size_of(settings.header_bytes, of=1 << 20),
        stall_s=settings.stall_s,
        tally=service.tally,
    )
    app: ASGIApp = create_app(
        service,
        keys=settings.keys,
        spans=spans,
        root_path=settings.root_path,
        origins=settings.origins,
    )
    if settings.request_log:
        app = RequestLog(app, clock=service.clock)
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
    if settings.tls_cert:
        config.callback_notify = Certificate(config, settings.tls_cert, settings.tls_key).refresh
        config.timeout_notify = CERTIFICATE_S
    return config


class Certificate:
    """The certificate of new connections: its files are read again when they have changed. A pair
    that is wrong, as when only one file has changed yet, is not used."""

    def __init__(self, config: uvicorn.Config, cert: str, key: str) -> None:
        self._config = config
        self._paths = cert, key
        self._seen = self._stamps()

    async def refresh(self) -> None:
        found = self._stamps()
        if found == self._seen:
            return
        self._seen = found
        try:
            check_tls(*self._paths)
            assert self._config.ssl is not None, "a server with a certificate speaks TLS"
            self._config.ssl.load_cert_chain(*self._paths)
        except (BadInput, OSError) as error:
            console.note(f"ess: the certificate has changed and is not used: {error}")
        else:
            console.note("ess: the certificate has changed: new connections get the new one")

    def _stamps(self) -> list[tuple[int, int] | None]:
        """When each file was written, and which one it is; None for a missing file."""
        stamps: list[tuple[int, int] | None] = []
        for path in map(Path, self._paths):
            try:
                found = path.stat()
            except OSError:
                stamps.append(None)
            else:
                stamps.append((found.st_mtime_ns, found.st_ino))
        return stamps
