"""/v1/events: what engine and server are doing, as server-sent events, a few times a second.

One frame is made per published status and encoded once for all viewers. A stream begins with the
last minute, so that a new viewer's charts are not empty, and says at least once a second what the
server itself knows: that it starts, drains, or has lost its engine. Then it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import ess
from ess.engine.process.messages import Status
from ess.server.dialects.streaming import STREAM_HEADERS, first_of, gone
from ess.server.http.openapi.door import EVENTS, Door
from ess.server.process.engines import stages
from ess.server.process.handoffs import view
from ess.server.process.service import Service
from ess.server.process.tally import WAIT_BOUNDS_S, Waits

QUIET_S: Final = 1.0


async def events(request: Request) -> Response:
    frames: Frames = request.app.state.frames
    return FrameStream(frames, frames.service.watch())


class Frames:
    """The current frame as bytes; every viewer gets the same object until the status changes."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._key: tuple[object, ...] = ()
        self._ready = b""

    def latest(self) -> bytes:
        service = self.service
        silent_s = int(service.link.engine.silent_s)
        key = (service.board.published_s, service.state, silent_s)
        if key != self._key:
            self._key, self._ready = key, _event("frame", frame(service))
        return self._ready


class FrameStream(Response):
    """Frames until the viewer leaves, takes nothing for too long, or the engine is lost."""

    def __init__(self, frames: Frames, fresh: asyncio.Event) -> None:
        super().__init__()
        self._frames = frames
        self._service = frames.service
        self._fresh = fresh

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["method"] == "HEAD":
                await self._begin(send)
                await self._end(send)
                return
            with contextlib.suppress(TimeoutError):
                await first_of(self._pump(send), gone(receive))
        finally:
            self._service.board.leave(self._fresh)

    async def _begin(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200, "headers": list(STREAM_HEADERS)}
        await send(head)

    async def _end(self, send: Send) -> None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pump(self, send: Send) -> None:
        await self._begin(send)
        await self._send(send, b"retry: 1000\n\n" + _event("history", history(self._service)))
        while True:
            is_lost = self._service.link.engine.state == "lost"
            await self._send(send, self._frames.latest())
            if is_lost:
                break
            await _set_within(self._fresh, QUIET_S)
        await self._end(send)

    async def _send(self, send: Send, ready: bytes) -> None:
        body = {"type": "http.response.body", "body": ready, "more_body": True}
        async with asyncio.timeout(self._service.limits.stall_s):
            await send(body)


async def _set_within(fresh: asyncio.Event, most_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(most_s):
            await fresh.wait()
            fresh.clear()


def _event(name: str, document: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(document) + b"\n\n"


# ---- the content of a frame


def history(service: Service) -> list[dict[str, Any]]:
    """The counts of the last minute, from which a viewer computes rates."""
    return [counts(status, at_s) for at_s, status in service.board.recent]


def frame(service: Service) -> dict[str, Any]:
    status, link, tally = service.board.status, service.link, service.tally_of_all
    ready = link.engine.ready
    return {
        **counts(status, service.board.published_s),
        "unix_s": time.time(),
        "version": ess.__version__,
        "model": service.name,
        "state": service.state,
        "why": link.engine.why_lost,
        "silent_s": link.engine.silent_s,
        "limiter": status.limiter,
        "shortage": status.shortage,
        "tokens_per_s": service.board.tokens_per_s,
        "running": status.running_count,
        "running_max": service.limits.running_max,
        "waiting": service.waiting_count,
        "waiting_max": service.limits.waiting_max,
        "length_max": service.limits.length_max,
        "step_s": status.step_s,
        "refusals": dict(tally.refusals),
        "oldest_wait_s": link.calls.oldest_wait_s,
        "disconnects": tally.disconnect_count,
        "failures": tally.failure_count,
        "verified": status.verified_count,
        "mismatches": status.mismatch_count,
        "warmup": _setting(service.described, "warm"),
        "weight_bytes": service.weight_bytes,
        "groups": ready.groups if ready is not None else (),
        "row_bytes": ready.row_bytes if ready is not None else 0,
        "pools": [msgspec.structs.asdict(pool) for pool in status.pools],
        "slots_used": status.slots_used,
        "slots": status.slots,
        "landed_hits": status.landed_hits,
        "landed_asked": status.landed_asked,
        "wait_bounds_s": WAIT_BOUNDS_S,
        "first_token": _waits(tally.first_token),
        "between_tokens": _waits(tally.between_tokens),
        "requests": _requests(status),
        "role": _setting(service.described, "role"),
        "handoff": view(status, service.board.handoffs),
        "stages": stages.view(status.stages),
    }


def _setting(described: Mapping[str, Any], name: str) -> Any:
    return described.get(name, {}).get("value")


def _waits(waits: Waits) -> list[int]:
    return waits.counts.copy()


def _requests(status: Status) -> list[dict[str, Any]]:
    """The engine's requests, of all server processes, under the ids that clients know."""
    return [{**msgspec.structs.asdict(line), "id": line.name} for line in status.requests]


def counts(status: Status, at_s: float) -> dict[str, Any]:
    """The growing counters, the running and waiting counts, and the time of the reading."""
    return {
        "at_s": at_s,
        "running": status.running_count,
        "waiting": status.waiting_count,
        "steps": status.step_count,
        "turns": status.turn_count,
        "made": status.made_count,
        "prompt": status.prompt_count,
        "cached": status.cached_count,
        "preempted": status.preempted_count,
        "hits": status.hits,
        "misses": status.misses,
        "places": status.places,
        "fetched": sum(status.fetched_bytes),
        "stored": sum(status.stored_bytes),
        "modes": status.modes,
        "transfer_us": status.transfer_us,
        "exposed_us": status.exposed_us,
    }


DOORS: Final = (
    Door(
        "GET",
        ("/v1/events",),
        events,
        "What the engine does, a few times a second.",
        gives=(EVENTS,),
    ),
)
