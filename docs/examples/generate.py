"""The engine in a program: text goes in, and comes out as it is made.

The model in the box continues two texts side by side, and a second engine the same texts again: it
finds the prompts' rows in the prefix cache on disk, as the engine of a later process would.

    python docs/examples/generate.py [FOLDER OF THE CACHE]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ess
from ess.engine.config import EngineConfig
from ess.engine.engine import Engine
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.models.load import EMBEDDED, load_model
from ess.models.text.detokenizer import Detokenizer
from ess.models.text.tokenizer import Tokenizer
from ess.pool.disk.tier import DiskTier

TEXTS = ("The sea was calm, and ", "In the year of the great ")


def disk_tier(folder: Path, layout: ess.ModelLayout) -> DiskTier:
    """The identity names the weights and how they are computed: with another one the folder starts
    empty, because its rows are not those of this model."""
    return DiskTier(
        folder,
        identity=b"model in the box, bf16 weights, fp8 rows, cpu",
        page_bytes=layout.host_page_bytes,
        capacity_bytes=64 << 20,
    )


def generate(engine: Engine, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[Request]:
    """Runs the prompts side by side and prints the first answer as it comes."""
    how = Sampling(tokens_max=24, temperature=0.7, seed=3)
    requests = [engine.add(prompt, how) for prompt in prompts]
    reader = Detokenizer(tokenizer)
    for result in engine.run():
        for made in result.made:
            if made.request is requests[0]:
                print(reader.push(made.tokens), end="", flush=True)
    print(reader.finish())
    for request in requests:
        assert request.reason in ("length", "stop"), f"{request.reason}: {request.refusal}"
    return requests


def main() -> None:
    model, tokenizer = load_model(), Tokenizer(EMBEDDED)
    layout = model.config.layout()
    prompts = [tokenizer.encode(text * 40) for text in TEXTS]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1] if sys.argv[1:] else made)
        for turn in ("first", "second"):
            disk = disk_tier(folder, layout)
            with ess.Offload.create(
                layout, slot_bytes="16MiB", host_bytes="64MiB", length_max="4k", disk=disk
            ) as offload:
                engine = Engine(model, offload, EngineConfig(mtp=2), tokenizer=tokenizer)
                requests = generate(engine, tokenizer, prompts)
                engine.close()
            cached = sum(request.cached_count for request in requests)
            total = sum(len(prompt) for prompt in prompts)
            print(f"{turn} run: {cached} of {total} prompt tokens were read from the cache")


if __name__ == "__main__":
    main()
