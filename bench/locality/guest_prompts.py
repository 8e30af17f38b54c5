"""`python -m ess.bench.locality.guest_prompts --into FOLDER`: recorded selections of 20 prompts.

A guest is asked something, mostly about a page, and answers; its indexer's selections behind each
word of the answer are recorded, with scores. Pages are documents and sources of this repository.
One layer of each prompt is kept, another each time, so that all of them together stay small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ess import console
from ess.bench.harness.prefix import Prefix, offload_of_one
from ess.bench.locality.guest_text import prefilled
from ess.bench.locality.record_trace import record
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.chat.messages import Conversation, Message
from ess.models.chat.styles import TemplateStyle, style_of
from ess.models.guest.pins import SMOLLM2
from ess.models.guest.place import checkpoint_folder
from ess.models.load import load_model
from ess.models.text.tokenizer import Tokenizer
from ess.pool.warmup import WINDOW_MAX
from ess.units import PAGE_ROWS

ROOT: Final = Path(__file__).resolve().parents[2]
TOP_K: Final = 64
QUERIES: Final = 2 * WINDOW_MAX
PAGE_CHARS: Final = 1200
MARK: Final = "PAGE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`asked` holds MARK where a part of `page` is inserted."""

    kind: str
    asked: str
    page: str

    def text(self) -> str:
        whole = (ROOT / self.page).read_text(encoding="utf-8")
        start = whole.find("\n\n", len(whole) // 3) + 2
        return self.asked.replace(MARK, f"\n\n{whole[start : start + PAGE_CHARS]}\n\n")


def prompts() -> Iterator[Prompt]:
    for kind, page, asked in (
        ("summary", "docs/serving.md", "Read this. PAGE Now say in five sentences what it tells."),
        ("question", "docs/pd.md", "PAGE Which of the two workers waits for the other, and why?"),
        ("list", "docs/attacks.md", "List, as short points, what is defended here. PAGE"),
        ("title", "docs/planning.md", "PAGE Give this text ten titles, from plain to funny."),
        ("letter", "docs/prefill.md", "Write a friendly letter about this to a colleague. PAGE"),
        ("poem", "docs/vllm.md", "PAGE Turn what you have read into a poem that rhymes."),
        ("dialogue", "docs/exactness.md", "Two engineers argue about this page. PAGE Write it."),
        ("numbers", "docs/log.md", "PAGE Name every number above and what it counts."),
        ("opposite", "README.md", "PAGE Write the same, but claim the opposite of each sentence."),
        ("story", "docs/serving.md", "Here is a dull page. PAGE Tell a story about a fox instead."),
        ("explain-code", "models/config_json/rope.py", "Explain this file to a beginner. PAGE"),
        ("review-code", "models/moe.py", "PAGE Review this code. Which line would you change?"),
        ("test-code", "ess/units.py", "Write tests with pytest for these functions. PAGE"),
        ("rename-code", "ess/layout.py", "PAGE Write it again with other names for all variables."),
        ("to-c-code", "models/indexer.py", "Write this in C. PAGE Begin with the includes."),
        ("doc-code", "models/plain.py", "PAGE Write the documentation of each function above."),
        (
            "kernel-code",
            "csrc/cpu/ops/stage.h",
            "What does this C++ compute? PAGE Go line by line.",
        ),
        ("table", "docs/planning.md", "PAGE Make a table of the terms used and what they mean."),
        ("plan", "docs/pd.md", "PAGE Make a plan for a week in which somebody learns all this."),
        ("translate", "docs/vllm.md", "Translate into French, sentence by sentence. PAGE"),
    ):
        yield Prompt(kind=kind, page=page, asked=asked)


def main(*, into: Path) -> None:
    folder = checkpoint_folder(SMOLLM2)
    tokenizer = Tokenizer(folder)
    style = style_of(folder, tokenizer)
    model = load_model(folder, top_k=TOP_K)
    layout = model.config.layout(name=f"{SMOLLM2.name}, top-k {TOP_K}")
    assert isinstance(style, TemplateStyle), "the guest has a template"
    for number, prompt in enumerate(prompts()):
        turn = Message(role="user", content=prompt.text())
        asked = tokenizer.encode(style.encode(Conversation([turn], thinking=False)))
        prefix = prefilled(model, layout, [*asked, 0], f"the prompt {prompt.kind!r}")
        ids = [*asked, *_answer(prefix, asked)]
        layer = (3 * number + number // 10) % prefix.layout.layer_count
        path = into / f"{prompt.kind}-layer-{layer}.trace"
        record(path, prefix, ids, query_count=QUERIES, mtp=1, groups=[layer])
        said = tokenizer.decode(ids[len(asked) :])
        console.note(f"{path.name}: {len(asked)} tokens, {path.stat().st_size:,} bytes: {said!r}")
    style.close()


def _answer(prefix: Prefix, asked: list[int]) -> list[int]:
    """A greedy answer of the recorded length, even if the guest would have ended earlier."""
    pages = (len(asked) + QUERIES) // PAGE_ROWS + 3
    with offload_of_one(prefix.layout, pages, is_resident=True) as offload:
        engine = Engine(prefix.model, offload, EngineConfig(mtp=1))
        wanted = Sampling(tokens_max=QUERIES + 1, ignore_eos=True)
        request = engine.add(asked, wanted)
        for _ in engine.run():
            pass
        if len(request.output) != QUERIES + 1:
            raise BadInput(f"the answer has {len(request.output)} tokens, not {QUERIES + 1}")
        return list(request.output)


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
