"""Routes: texts to ids and back, aborting by id, forgetting cached prefixes."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput, BadState
from ess.server.dialects import schemas
from ess.server.dialects.streaming import read
from ess.server.http.openapi.door import Door
from ess.server.http.responses import JSON, answer
from ess.server.process.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.TokenizeAsk)
    service.check_model(prepared.ask.model)
    return Response(prepared.document, media_type=JSON)


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    prepared = await read(request, schemas.DetokenizeAsk)
    service.check_model(prepared.ask.model)
    return Response(prepared.document, media_type=JSON)


async def abort(request: Request) -> Response:
    """Aborts requests by id; ignores unknown ids. The answer counts what was aborted."""
    service: Service = request.app.state.service
    ask = (await read(request, schemas.AbortAsk)).ask
    if ask.abort_all:
        return answer({"aborted": await service.link.abort_ids(None)})
    ids = {*(ask.request_ids or ()), *([ask.rid] if ask.rid else ())}
    if not ids:
        raise BadInput("give rid, request_ids or abort_all")
    return answer({"aborted": await service.link.abort_ids(ids)})


async def flush(request: Request) -> Response:
    service: Service = request.app.state.service
    sentence = await service.link.flush()
    if sentence:
        raise BadState(f"nothing was flushed: {sentence}")
    return answer({"flushed": True})


DOORS: Final = (
    Door(
        "POST",
        ("/tokenize", "/v1/tokenize"),
        tokenize,
        "Texts or a conversation to ids.",
        schemas.TokenizeAsk,
        example={"prompt": "Hello"},
    ),
    Door(
        "POST",
        ("/detokenize", "/v1/detokenize"),
        detokenize,
        "Ids to texts.",
        schemas.DetokenizeAsk,
        example={"tokens": [72, 105]},
    ),
    Door(
        "POST",
        ("/abort_request", "/abort_requests"),
        abort,
        "End requests by their ids.",
        schemas.AbortAsk,
        example={"rid": "mine"},
    ),
    Door(
        "POST",
        ("/flush_cache", "/reset_prefix_cache"),
        flush,
        "Forget cached prefixes, when nothing runs.",
    ),
)
