"""Texts to ids and back; aborting by id; forgetting prefixes."""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput, BadState
from ess.server.dialects import schemas
from ess.server.dialects.chat import encode_chat, wants_thinking
from ess.server.dialects.completions import encode_text
from ess.server.dialects.logprobs import token_text
from ess.server.http.openapi.door import Door
from ess.server.http.responses import answer
from ess.server.process.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    ask = schemas.read(await request.body(), schemas.TokenizeAsk)
    service.check_model(ask.model)
    if (ask.prompt is None) == (ask.messages is None):
        raise BadInput("give either prompt or messages")
    if isinstance(ask.prompt, list):
        texts = [await _ids_of(service, ask, text) for text in ask.prompt]
        return answer({"tokens": texts, "count": [len(ids) for ids in texts]})
    ids = await _ids_of(service, ask, ask.prompt)
    found: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.limits.length_max,
        "tokens": ids,
    }
    if ask.return_token_strs:
        found["token_strs"] = [token_text(service.tokenizer, token) for token in ids]
    return answer(found)


async def _ids_of(service: Service, ask: schemas.TokenizeAsk, text: str | None) -> list[int]:
    if text is None:
        thinking = wants_thinking(ask.chat_template_kwargs, None)
        return await encode_chat(service, ask.messages or [], ask.tools or [], thinking=thinking)
    return await encode_text(service, text, add_special=ask.add_special_tokens is not False)


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    ask = schemas.read(await request.body(), schemas.DetokenizeAsk)
    service.check_model(ask.model)
    keep_special = ask.skip_special_tokens is not True
    texts = []
    for ids in schemas.read_ids(ask.tokens, where="tokens"):
        if any(not 0 <= token < service.vocabulary for token in ids):
            raise BadInput(f"tokens must be ids 0..{service.vocabulary - 1}")
        texts.append(service.tokenizer.decode(ids, keep_special=keep_special))
    many = bytes(ask.tokens).lstrip()[1:].lstrip()[:1] == b"["
    shown: Any = texts if many else texts[0]
    return answer({"prompt": shown, "text": shown})


async def abort(request: Request) -> Response:
    """Ignores unknown ids; the answer counts the requests that were aborted."""
    service: Service = request.app.state.service
    ask = schemas.read(await request.body(), schemas.AbortAsk)
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
    Door("POST", ("/flush_cache",), flush, "Forget cached prefixes, when nothing runs."),
)
