"""Pages that need no server: one file with its style, its code and its numbers."""

from __future__ import annotations

from importlib import resources
from typing import Any

import msgspec


def whole(name: str, *, title: str, numbers: Any, code: str | None = None) -> str:
    """The page of that name under the common head; `code` names its script, if that is a file of
    its own."""
    folder = resources.files("ess.server.commands.planning")
    head, body = (
        (folder / file).read_text(encoding="utf-8") for file in ("head.html", f"{name}.html")
    )
    safe = msgspec.json.encode(numbers).decode().replace("<", "\\u003c")
    page = body.replace("/*HEAD*/", head.replace("/*TITLE*/", title), 1)
    page = page.replace("/*NUMBERS*/", safe, 1)
    if code is None:
        return page
    return page.replace("/*MODEL*/", (folder / code).read_text(encoding="utf-8"), 1)
