"""Engines of the tiny models on a device and on the host, and one scenario for both.

Nothing here brings the pretended device until it is asked for: a real one runs the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Final

import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.step.decode import Launcher
from ess.engine.tokens.sampling import Sampling
from ess.errors import PoolFull
from ess.kernels import backend
from ess.models.model import Model
from ess.models.registry import build, read_config
from tests.support.checkpoints import TINY_GLM, TINY_V32, tensors, tokens

FAMILIES: Final = {"v32": TINY_V32, "glm": TINY_GLM}
VOCABULARY: Final = TINY_V32["vocab_size"]
LENGTH_MAX: Final = 320
FACTORS: Final[Mapping[str, tuple[str, ...]]] = {
    "family": ("v32", "glm"),
    "mode": ("resident", "none", "da", "dba", "layerwise"),
    "mtp": ("1", "2", "4"),
    "depth": ("0", "1"),
    "arena": ("ample", "tight", "smallest"),
}
GRAPHS: Final = {"off": 0, "few": 2, "many": 64, "usual": "auto"}
CHUNKS: Final = {"ample": 24, "tight": 3, "smallest": 1}


@functools.cache
def model(family: str, device: str) -> Model:
    parsed = read_config(FAMILIES[family])
    made = tensors(parsed)
    return build(parsed, lambda name: made[name].to(device))


def engine(device: str, **case) -> Engine:
    return Engine(*parts(device, **case))


def parts(
    device: str,
    *,
    family="v32",
    mode="none",
    mtp="1",
    depth="0",
    arena="ample",
    graphs="off",
    evict="lru",
    door=True,
    **more,
) -> tuple[Model, Offload, EngineConfig]:
    """Of an engine. Not through the `door`: over the host's, which looks like the device's and is
    quick."""
    made, count = model(family, device), int(mtp)
    layout = made.config.layout(row="f32", index="f32", has_mtp=count > 1)
    made_here = device == "cpu" or not door
    offload = _creates(stands_in=device != "cpu" and not door)(
        layout,
        device="cpu" if made_here else "cuda:0",
        slot_bytes=layout.group_count * layout.chunk_bytes * CHUNKS[arena],
        host_bytes=40 * layout.host_page_bytes,
        length_max=LENGTH_MAX,
        slot_floor=16,
        poison=True,
        evict=evict,
    )
    shuffle(offload)
    chosen = EngineConfig(
        modes=mode,
        mtp=count,
        depth=int(depth),
        chunk_tokens=96,
        backend=device,
        graphs=GRAPHS[graphs],
        **more,
    )
    return made, offload, chosen


def _creates(*, stands_in: bool):
    if not stands_in:
        return Offload.create
    from tests.device.standin import opened

    return opened


def shuffle(offload) -> None:
    """From here on no page lies where its number says."""
    lengths = (70, 200, 3, 129)
    held = [offload.open(tokens(count, 99, seed=count), length_max=count) for count in lengths]
    for place in (2, 0, 3, 1):
        held[place].close()


PROMPTS: Final = (
    (1, 0, {}),
    (20, 1, {"temperature": 1.0, "seed": 3, "min_p": 0.01}),
    (90, 2, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 4, "logprobs": 2}),
    (130, 3, {"logprobs": 0}),
    (40, 4, {"temperature": 1.2, "top_k": 300, "top_p": 0.7, "seed": -1}),
)
AGAIN: Final = (130, 3, {"temperature": 0.5, "seed": 1 << 63})


def scenario(eng: Engine, *, penalised: bool = False) -> list[tuple[list[int], list[object]]]:
    """What each request said, and its chances; midway one waits without its rows, one is given up,
    and the last one finds its prompt's pages."""
    chances: dict[object, list[object]] = {}
    more = {"presence_penalty": 0.7, "logit_bias": {5: 2.0}} if penalised else {}

    def join(count, seed, given):
        sampling = Sampling(tokens_max=7, ignore_eos=True, **given, **more)
        return eng.add(tokens(count, VOCABULARY, seed=seed), sampling)

    def steps(count):
        for _ in range(count):
            for made in eng.step().made:
                chances.setdefault(made.request, []).extend(made.chances)
            eng.check()

    requests = [join(*given) for given in PROMPTS]
    gone = join(33, 9, {})
    steps(4)
    held = requests[3]
    if held.state == "decoding":
        eng.preempt(held)
    eng.cancel(gone)
    steps(2)
    while held.state == "preempted":
        with contextlib.suppress(PoolFull):
            eng.resume(held)
        steps(1)
    while not eng.is_idle:
        steps(1)
    requests.append(join(*AGAIN))
    while not eng.is_idle:
        steps(1)
    assert requests[-1].cached_count or eng.offload.layout.mtp_layer_count
    eng.offload.drain()
    assert eng.offload.stats().used_slot_count.sum() == 0
    eng.offload.close()
    return [(request.output, chances.get(request, [])) for request in requests]


@functools.cache
def expected(family: str, *, penalised: bool = False):
    return scenario(engine("cpu", family=family), penalised=penalised)


@contextlib.contextmanager
def alone():
    """Launches may not wait for the device, and the device's ops are quick."""
    from tests.device.kernels import Kernels
    from tests.support.pretended import PRETENCE, without_waits

    real, cuda = Launcher.launch, backend._cuda

    def launch(launcher, turns, *, vector=None, **given):
        if vector is not None:  # a rehearsal
            return real(launcher, turns, vector=vector, **given)
        PRETENCE.moment += 1
        changes = any(turn.request.sampling.changes_logits for turn in turns)
        is_there = launcher.runner.model.device.type != "cpu"
        guard = without_waits() if is_there and not changes else contextlib.nullcontext()
        with guard:
            return real(launcher, turns, **given)

    torch.set_num_threads(1)
    Launcher.launch, backend._cuda = launch, Kernels
    backend._ops.cache_clear()
    try:
        yield
    finally:
        Launcher.launch, backend._cuda = real, cuda
        backend._ops.cache_clear()
