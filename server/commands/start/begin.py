"""From flags to a running server, or to the servers of all ranks that run here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ess.server.commands.ranks.servers import check_alike, serve_ranks
from ess.server.commands.start.launch import serve_with
from ess.server.commands.start.settings import resolve


def serve_flags(flags: Mapping[str, Any], *, config: Path | None, json: bool) -> int:
    resolved = resolve(flags, config=config, environment=os.environ)
    if resolved.settings.dp_size > 1 and resolved.settings.dp_rank < 0:
        check_alike(resolved)
        if resolved.settings.executor == "processes":
            return serve_ranks(resolved, json=json)
        from ess.server.commands.ranks.on_ray import serve_on_ray

        return serve_on_ray(resolved, json=json)
    return serve_with(resolved, json=json)
