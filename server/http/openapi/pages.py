"""/docs and /redoc: the document for people, in Swagger UI and Redoc, without other servers.

The pages and their files need no key, like the dashboard's; the document does. The page asks for
the key, keeps it for its tab as the dashboard does, and sends it with the requests that are tried
out. All addresses are relative, so that the pages work below a prefix too.
"""

from __future__ import annotations

import asyncio
import functools
import gzip
from importlib import resources
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ess.server.http.openapi.door import Door
from ess.server.http.responses import answer

HTML: Final = "text/html"
SCRIPT: Final = "text/javascript"
STYLE: Final = "text/css"
LOADED: Final = {
    "/docs/page.js": SCRIPT,
    "/docs/page.css": STYLE,
    "/docs/swagger-ui-bundle.js": SCRIPT,
    "/docs/swagger-ui.css": STYLE,
    "/docs/redoc.standalone.js": SCRIPT,
}
READERS: Final = {
    "/docs": ("swagger-ui.css", "swagger-ui-bundle.js"),
    "/redoc": ("redoc.standalone.js",),
}
PATHS: Final = (*READERS, *LOADED)
# Redoc makes two style elements: an empty one, filled by rules later, and its scroll bar's.
REDOC_STYLES: Final = (
    "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
    "'sha256-QMIg+bpjm3JdElJ388KYke01izlUW0UoNOeKjpMxdgc='",
)
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        f"style-src 'self' {' '.join(REDOC_STYLES)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
KEPT: Final = {"cache-control": "public, max-age=3600", "x-content-type-options": "nosniff"}


async def document(request: Request) -> Response:
    """The document; if the app is mounted below a prefix, `servers` names it. To make it, once,
    takes tenths of a second: a thread does, so that the event loop has its turns."""
    made: dict[str, Any] = await asyncio.to_thread(request.app.openapi)
    root = request.scope.get("app_root_path", "")
    return answer({**made, "servers": [{"url": root}]} if root else made)


async def page(request: Request) -> Response:
    headers = {
        "content-security-policy": POLICY,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    tags = "\n".join(map(_tag, READERS[request.scope["route_name"]])).encode()
    html = _read("page.html").replace(b"<!-- reader -->", tags)
    return Response(html, headers=headers, media_type=HTML)


def _tag(name: str) -> str:
    if name.endswith(".css"):
        return f'<link rel="stylesheet" href="docs/{name}">'
    return f'<script src="docs/{name}" defer></script>'


async def loaded(request: Request) -> Response:
    """Scripts and styles; the large ones are stored compressed, which every browser accepts."""
    path = request.scope["route_name"]
    name = path.rpartition("/")[2]
    kind = LOADED[path]
    if name.startswith("page."):
        return Response(_read(name), headers=KEPT, media_type=kind)
    packed = _read(f"{name}.gz")
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(gzip.decompress(packed), headers=KEPT, media_type=kind)
    return Response(packed, headers={**KEPT, "content-encoding": "gzip"}, media_type=kind)


@functools.cache
def _read(name: str) -> bytes:
    return (resources.files("ess.server.http.openapi") / "assets" / name).read_bytes()


DOORS: Final = (
    Door("GET", ("/openapi.json",), document, "This document."),
    Door("GET", ("/docs",), page, "This document, to read and to try.", gives=(HTML,)),
    Door("GET", ("/redoc",), page, "This document, to read.", gives=(HTML,)),
    Door("GET", tuple(LOADED), loaded, "What these pages load.", listed=False),
)
