"""Generation that an operator or a trainer pauses, in the words of vLLM and of SGLang.

    vLLM      POST /pause?mode=abort|keep&clear_cache=true|false, POST /resume, GET /is_paused
    SGLang    POST /pause_generation {"mode": "abort"|"in_place"}, POST /continue_generation

No step runs while it is paused. Requests may come: they wait, as others do, and their streams get
comments. With `abort` those that are open end with what they have; with `keep`, or `in_place`, they
go on where they were. A drain ends a pause (`lifecycle`). The weights are those of the start, so
nothing cached is ever out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput, BadState
from ess.server.dialects import schemas
from ess.server.dialects.streaming import read
from ess.server.http.openapi.door import Door
from ess.server.http.responses import answer
from ess.server.process.service import Service

BOOLEANS: Final[Mapping[str, bool]] = {"true": True, "1": True, "false": False, "0": False}
ELSEWHERE: Final[Mapping[str, str]] = {
    "wait": "send nothing more, and pause when /load says 0",
    "retract": "requests keep their rows; take in_place",
}


async def pause(request: Request) -> Response:
    service, asked = _service(request), request.query_params
    mode = _mode(asked.get("mode", "abort"), kept="keep")
    given = asked.get("clear_cache", "true" if mode == "abort" else "false")
    if given not in BOOLEANS:
        raise BadInput(f"clear_cache is {given!r:.40}, must be true or false")
    if BOOLEANS[given] and mode == "keep":
        raise BadInput("clear_cache is true and mode is keep: requests that go on need their rows")
    for name in ("wait_for_inflight_requests", "timeout_s"):
        if asked.get(name, "false") != "false":
            raise BadInput(f"{name} is not served: {ELSEWHERE['wait']}")
    await _pause(service, mode)
    sentence = await service.link.flush() if BOOLEANS[given] else ""
    if sentence:
        raise BadState(f"generation is paused, and no cached prefix was forgotten: {sentence}")
    return answer({"status": "paused"})


async def pause_sglang(request: Request) -> Response:
    service = _service(request)
    ask = (await read(request, schemas.PauseAsk)).ask
    await _pause(service, _mode(ask.mode, kept="in_place"))
    return answer({"status": "ok", "message": "Generation is paused."})


async def resume(request: Request) -> Response:
    await _service(request).link.hold(is_on=False)
    return answer({"status": "resumed"})


async def resume_sglang(request: Request) -> Response:
    await _service(request).link.hold(is_on=False)
    return answer({"status": "ok", "message": "Generation goes on."})


async def is_paused(request: Request) -> Response:
    return answer({"is_paused": _service(request).link.engine.is_held})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _mode(given: str, *, kept: str) -> str:
    if given not in ("abort", kept):
        other = ELSEWHERE.get(given, f"abort and {kept} are")
        raise BadInput(f"mode is {given!r:.40}, which is not served: {other}")
    return given


async def _pause(service: Service, mode: str) -> None:
    """Holds the engine first: no request makes a token between its end and the pause. A server that
    drains is not paused: its requests could not finish."""
    service.check_state()
    await service.link.hold(is_on=True)
    if mode == "abort":
        await service.link.abort_ids(None)


DOORS: Final = (
    Door(
        "POST",
        ("/pause",),
        pause,
        "Run no step; end open requests, or keep them.",
        queries=("mode", "clear_cache"),
    ),
    Door("POST", ("/resume",), resume, "Run steps again."),
    Door("GET", ("/is_paused",), is_paused, "Whether generation is paused."),
    Door(
        "POST",
        ("/pause_generation",),
        pause_sglang,
        "Run no step; end open requests, or keep them.",
        schemas.PauseAsk,
        example={"mode": "in_place"},
    ),
    Door("POST", ("/continue_generation",), resume_sglang, "Run steps again."),
)
