"""One scenario in every configuration: the tokens must be those of the plain model.

    python -m tests.model.grid --out docs/exactness.md

Requests join, leave, are preempted, cancelled and share a prefix midway, in fp32 throughout: f32
rows, f32 keys, f32 weights, copies that come late and poison what has not landed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.requests.request import Request
from ess.engine.tokens.sampling import Sampling
from ess.errors import PoolFull
from ess.layout import ModelLayout
from ess.models.load import EMBEDDED, load_model
from ess.models.model import Model
from ess.models.text.tokenizer import Tokenizer
from ess.pool.lru.eviction import POLICIES
from tests.compressed import world
from tests.support.checkpoints import (
    TINY_AXK2,
    TINY_DOTS3,
    TINY_GLM,
    TINY_GLM5_NEXT,
    TINY_HY4,
    TINY_LLAMA,
    TINY_MISTRAL4,
    TINY_V32,
    model,
    tokens,
)
from tests.support.greedy import made_once
from tests.support.manual_lane import ManualLane

FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "checkpoint": ("embedded", "deepseek_v32", "glm_moe_dsa"),
    "mode": ("resident", "none", "da", "dba", "layerwise"),
    "mtp": ("1", "2", "4"),
    "tbo": ("off", "on"),
    "sbo": ("off", "combine-down", "combine-shared", "dispatch-shared"),
    "depth": ("0", "1"),
    "arena": ("ample", "tight", "smallest"),
    "warm": ("on", "off"),
    "evict": POLICIES,
}
LENGTH_MAX: Final = 1024
TOKEN_COUNT: Final = 8
RANDOM: Final = {
    "deepseek_v32": TINY_V32,
    "glm_moe_dsa": TINY_GLM,
    "llama": TINY_LLAMA,
    "axk2": TINY_AXK2,
    "hy_v4": TINY_HY4,
    "mistral_large4": TINY_MISTRAL4,
    "dots3_note": TINY_DOTS3,
    "glm5_next": TINY_GLM5_NEXT,
    "deepseek_v4": world.LISTED,
}
Case = Mapping[str, str]
HEADING: Final = "## In float32: the full grid, once"


@functools.cache
def checkpoint(name: str) -> Model:
    if name == "deepseek_v4":
        return world.tiny()
    return load_model(EMBEDDED, form="f32") if name == "embedded" else model(RANDOM[name])


@functools.cache
def text(name: str) -> list[int]:
    """Real text for the model that was trained on it, random tokens for the others."""
    if name != "embedded":
        return tokens(LENGTH_MAX, RANDOM[name]["vocab_size"], seed=5)
    page = (Path(__file__).parents[2] / "README.md").read_text()
    return Tokenizer(EMBEDDED).encode(page)[:LENGTH_MAX]


def expected(name: str, start: int, stop: int) -> list[int]:
    return made_once(checkpoint(name), tuple(text(name)[start:stop]), TOKEN_COUNT)


def engine(case: Case, *, lane: Any = None, **changes: Any) -> Engine:
    made, mtp = checkpoint(case["checkpoint"]), int(case["mtp"])
    layout = made.config.layout(row="f32", index="f32", has_mtp=mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=slot_bytes(layout, case["arena"]),
        host_bytes=40 * layout.host_page_bytes,
        length_max=LENGTH_MAX,
        slot_floor=min(24, layout.top_k),
        lane=lane or ManualLane(seed=mtp, delay_max=3),
        poison=True,
        evict=case["evict"],
    )
    config = EngineConfig(
        modes=case["mode"],
        mtp=mtp,
        tbo=case["tbo"],
        sbo=case["sbo"],
        depth=int(case["depth"]),
        warm=case["warm"] == "on",
        chunk_tokens=int(case.get("chunk", "96")),
        **changes,
    )
    return Engine(made, offload, config)


def slot_bytes(layout: ModelLayout, arena: str) -> int:
    """Chunks a group: every row of the scenario; about two selections; the least there is."""
    counts = {"ample": 40, "tight": 2 + 2 * layout.top_k // 64, "smallest": 1}
    return layout.group_count * layout.chunk_bytes * counts[arena]


def scenario(eng: Engine, name: str) -> list[tuple[Request, int, int]]:
    """Requests and the spans of the text they must continue."""
    followed: list[tuple[Request, int, int]] = []

    def join(start: int, stop: int) -> Request:
        request = eng.add(text(name)[start:stop], Sampling(tokens_max=TOKEN_COUNT, ignore_eos=True))
        followed.append((request, start, stop))
        return request

    def steps(count: int) -> None:
        for _ in range(count):
            eng.step()
            eng.offload.check()

    join(0, 1)
    join(5, 7)
    held = join(0, 300)
    steps(6)
    join(40, 170)
    gone = eng.add(text(name)[100:290], Sampling(tokens_max=40))
    steps(2)
    if held.state == "decoding":
        eng.preempt(held)
    join(0, 280)
    steps(3)
    eng.cancel(gone)
    steps(2)
    while held.state == "preempted":
        try:
            eng.resume(held)
        except PoolFull:
            steps(1)
    for _ in eng.run():
        eng.offload.check()
    join(0, 300)
    for _ in eng.run():
        eng.offload.check()
    return followed


def differences(case: Case) -> list[str]:
    """What one configuration gets wrong; empty when it is exact and leaves nothing behind."""
    name = case["checkpoint"]
    eng = engine(case)
    lines = []
    for request, start, stop in scenario(eng, name):
        wanted = expected(name, start, stop)
        if request.output != wanted:
            lines.append(f"request {request.number} of {stop - start}: {request.output} {wanted}")
    eng.offload.drain()
    stats = eng.offload.stats()
    if stats.used_slot_count.sum():
        lines.append(f"slots in use at the end: {stats.used_slot_count.tolist()}")
    if stats.free_index_page_count != stats.index_page_count:
        lines.append(f"index pages: {stats.free_index_page_count} of {stats.index_page_count} free")
    eng.offload.close()
    return lines


def full_grid() -> Iterator[Case]:
    """Every combination; where SBO is on, its three orders take turns, and policies always do."""
    orders, policies = itertools.cycle(FACTORS["sbo"][1:]), itertools.cycle(POLICIES)
    for values in itertools.product(*{**FACTORS, "sbo": ("off", "on"), "evict": ("",)}.values()):
        case = {**dict(zip(FACTORS, values, strict=True)), "evict": next(policies)}
        yield case if case["sbo"] == "off" else {**case, "sbo": next(orders)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="each n-th case only")
    parser.add_argument("--out", type=Path, default=None)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = list(full_grid())[:: asked.every]
    passed: Counter[tuple[str, str]] = Counter()
    failed, started = [], time.monotonic()
    for number, case in enumerate(cases, start=1):
        lines = differences(case)
        passed[case["checkpoint"], case["mode"]] += not lines
        failed += [f"{case}: {line}" for line in lines]
        print(f"{number}/{len(cases)} {time.monotonic() - started:.0f} s", *lines, flush=True)
    print(*failed, sep="\n")
    if asked.out:
        before = asked.out.read_text().partition(HEADING)[0] if asked.out.exists() else ""
        asked.out.write_text(before + section(cases, passed, failed))


def section(cases: list[Case], passed: Counter[tuple[str, str]], failed: list[str]) -> str:
    total = Counter((case["checkpoint"], case["mode"]) for case in cases)
    names = FACTORS["checkpoint"]
    lines = [
        HEADING,
        "",
        "`python -m tests.model.grid --out docs/exactness.md` runs one scenario in every",
        "configuration, in fp32, and compares all tokens with the plain model. Requests of",
        "1 to 300 tokens join, leave, are preempted, cancelled and share a prefix midway; copies",
        "come late, and slots that have not landed are poisoned. The plain model agrees with",
        "transformers (`tests/model/test_oracle.py`). `make test` covers every pair of settings",
        "(`tests/model/test_exactness.py`, `tests/families/test_covered.py`), contexts of 4K and",
        "8K tokens, and what must be bitwise equal.",
        "",
        *(f"- {name}: {', '.join(values)}" for name, values in FACTORS.items()),
        "",
        "Where SBO is on, its three orders take turns: each case has one of them. So do the",
        "eviction policies in all cases.",
        "",
        f"{len(cases):,} cases, {len(failed)} differences.",
        "",
        f"| mode | {' | '.join(names)} |",
        f"|---|{'---|' * len(names)}",
    ]
    for mode in FACTORS["mode"]:
        counts = [f"{passed[name, mode]} of {total[name, mode]}" for name in names]
        lines.append(f"| {mode} | {' | '.join(counts)} |")
    return "\n".join([*lines, *failed, ""])


if __name__ == "__main__":
    main()
