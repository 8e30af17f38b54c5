"""`python -m ess.bench.locality.guest_drafts`: would drafts from earlier text pay for a guest?

The guest answers the 20 recorded prompts, at temperature 0 and as it is served. Each answer is then
replayed with drafts: the words that followed the latest earlier place of the newest two or three
words. How many tokens would a step have brought, and how much longer does a step take that verifies
as many? The time is that of steps with as many requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ess.bench.harness.threads import compute_threads
from ess.bench.locality.guest_prompts import prompts
from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.models.chat.messages import Conversation, Message
from ess.models.chat.styles import style_of
from ess.models.guest.pins import SMOLLM2
from ess.models.guest.place import checkpoint_folder
from ess.models.load import load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer
from ess.units import PAGE_ROWS

GRAMS: Final = (3, 2)
DRAFTED: Final = (1, 2, 4, 8)
ANSWER_MAX: Final = 128
PAGES_EACH: Final = 12
"""Tokens of a prompt and its answer."""
GREEDY: Final = Sampling(tokens_max=ANSWER_MAX)
RUNNING: Final = 10
TIMED: Final = 16


def drafts(known: Sequence[int], count: int) -> list[int]:
    """The tokens that followed an earlier occurrence of the newest tokens, longest match first.

    >>> drafts([5, 6, 7, 8, 9, 6, 7], 2), drafts([1, 2, 3], 2)
    ([8, 9], [])
    """
    for gram in GRAMS:
        newest = list(known[-gram:])
        for start in range(len(known) - gram - 1, -1, -1):
            if list(known[start : start + gram]) == newest:
                return list(known[start + gram : start + gram + count])
    return []


def tokens_per_step(prompt: Sequence[int], answer: Sequence[int], count: int) -> list[int]:
    """Tokens of each step that verifies `count` drafts; the first token is the prompt's.

    >>> tokens_per_step([1, 2, 3, 4], [1, 2, 3, 4, 9], 2)
    [1, 3]
    """
    made, at = [], 1
    while at < len(answer):
        guesses = drafts([*prompt, *answer[:at]], count)
        kept = 1
        for guess, said in zip(guesses, answer[at:], strict=False):
            if guess != said or at + kept == len(answer):
                break
            kept += 1
        made.append(kept)
        at += kept
    return made


def main() -> None:
    folder = checkpoint_folder(SMOLLM2)
    tokenizer, model = Tokenizer(folder), load_model(folder)
    style = style_of(folder, tokenizer)
    turns = [[Message(role="user", content=prompt.text())] for prompt in prompts()]
    asked = [tokenizer.encode(style.encode(Conversation(turn, thinking=False))) for turn in turns]
    with compute_threads(1):
        for line in _lines(_engine(model, len(asked)), asked):
            print(json.dumps(line), flush=True)


def _lines(engine: Engine, asked: Sequence[list[int]]) -> Iterator[dict[str, object]]:
    served = replace(GREEDY, temperature=SMOLLM2.temperature, top_p=SMOLLM2.top_p)
    ways = {"greedy": GREEDY, "as served": served}
    answers = {name: _answered(engine, asked, sampling) for name, sampling in ways.items()}
    alone = _step_seconds(engine, asked[:1])
    for count in DRAFTED:
        longer = _step_seconds(engine, asked[: 1 + count]) / alone
        for name, replies in answers.items():
            made = [tokens_per_step(*pair, count) for pair in zip(asked, replies, strict=True)]
            each = float(np.mean(np.concatenate(made)))
            yield {
                "answers": name,
                "tokens": sum(map(len, replies)),
                "drafts": count,
                "tokens_per_step": round(each, 3),
                "by_prompt": [round(float(np.mean(steps)), 2) for steps in made],
                "step_takes": round(longer, 3),
                "gain": round(each / longer, 3),
            }


def _engine(model: Model, count: int) -> Engine:
    layout = model.config.layout()
    pages = min(count, RUNNING) * PAGES_EACH
    offload = Offload.create(
        layout,
        slot_bytes=layout.group_count * pages * layout.page_bytes,
        host_bytes=count * PAGES_EACH * layout.host_page_bytes,
        length_max=PAGES_EACH * PAGE_ROWS,
        sequence_max=RUNNING,
        slot_floor=1,
    )
    return Engine(model, offload, EngineConfig(max_running=RUNNING))


def _answered(engine: Engine, asked: Sequence[list[int]], sampling: Sampling) -> list[list[int]]:
    requests = [engine.add(prompt, sampling) for prompt in asked]
    for _ in engine.run():
        pass
    return [request.output for request in requests]


def _step_seconds(engine: Engine, asked: Sequence[list[int]]) -> float:
    """The median processor time of a step with that many requests."""
    wanted = Sampling(tokens_max=2 * TIMED, ignore_eos=True)
    requests = [engine.add(prompt, wanted) for prompt in asked]
    while any(request.state != "decoding" for request in requests):
        engine.step()
    taken = []
    for _ in range(TIMED):
        started = time.process_time()
        engine.step()
        taken.append(time.process_time() - started)
    for request in requests:
        engine.cancel(request)
    return float(np.median(taken))


if __name__ == "__main__":
    main()
