"""From a request that was read and checked to the answer that grows: alike in all dialects."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from ess.models.chat.reply import ReplyParser
from ess.server.dialects.forms.calls import ReplyRules
from ess.server.dialects.generation import Generation
from ess.server.dialects.sampling_params import SamplingWishes, samplings
from ess.server.dialects.schemas import Generated
from ess.server.dialects.streaming import Answer
from ess.server.http.request_ids import begin
from ess.server.process.service import Service


def begin_answer(
    request: Request,
    ask: Generated,
    wanted: Sequence[SamplingWishes],
    prompts: Sequence[list[int]],
    *,
    named: str | None,
    names: Sequence[str] = (),
) -> Answer:
    """Hands the prompts to the engine. `wanted` has the wishes for each prompt. `named` is the id
    of the request if its body has one; `names` are ids of the prompts, if they have their own."""
    service: Service = request.app.state.service
    made = samplings(service, wanted, prompts)
    pairs = [(each.prompt, each.sampling) for each in made]
    call = begin(request, ask, pairs, named=named, names=names)
    return Answer(service, call, [Generation(service.tokenizer, each.ending) for each in made])


def begin_reply(
    request: Request,
    ask: Generated,
    wanted: SamplingWishes,
    prompt: list[int],
    rules: ReplyRules,
    *,
    named: str | None,
) -> tuple[Answer, list[ReplyParser]]:
    """The answer to a conversation, and a parser for each of its choices."""
    style = request.app.state.service.style
    grown = begin_answer(request, ask, [wanted], [prompt], named=named)
    return grown, [
        style.parser(thinking=rules.thinking, tools=rules.functions) for _ in grown.generations
    ]
