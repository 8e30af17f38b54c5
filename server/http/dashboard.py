"""/dashboard and /chat: each one HTML file with its style and script inside; it loads nothing else.

The content security policy allows only that style and script, by digest, and requests to this
server. Recordings are in recordings/; /dashboard?replay=NAME shows one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ess.server.http.openapi.door import Door
from ess.server.http.responses import JSON, Absent

INLINE: Final = re.compile(rb"<(style|script)[^>]*>(.*?)</\1>", re.DOTALL)
NAME: Final = re.compile(r"[a-z0-9-]+\.json")


async def page(request: Request) -> Response:
    body, policy = _page(request.scope["route_name"].removeprefix("/"))
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }
    return Response(body, headers=headers, media_type="text/html")


@functools.cache
def _page(name: str) -> tuple[bytes, str]:
    body = (resources.files("ess.server.http") / f"{name}.html").read_bytes()
    digests: dict[bytes, list[str]] = {b"style": [], b"script": []}
    for tag, text in INLINE.findall(body):
        digest = base64.b64encode(hashlib.sha256(text).digest()).decode()
        digests[tag].append(f"'sha256-{digest}'")
    return body, "; ".join(
        (
            "default-src 'none'",
            "style-src " + " ".join(digests[b"style"]),
            "script-src " + " ".join(digests[b"script"]),
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


async def recording(request: Request) -> Response:
    name: str = request.path_params["recording"]
    file = resources.files("ess.server.http") / "recordings" / name
    if not NAME.fullmatch(name) or not file.is_file():
        raise Absent(f"there is no recording {name[:100]!r}")
    return Response(file.read_bytes(), media_type=JSON)


DOORS: Final = (
    Door("GET", ("/chat",), page, "A page to talk to the model.", gives=("text/html",)),
    Door("GET", ("/dashboard",), page, "A page that shows all this.", gives=("text/html",)),
    Door("GET", ("/dashboard/{recording}",), recording, "A recording for the page."),
)
