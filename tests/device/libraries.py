"""Whole steps by kernels of other libraries, where stand-ins have their names, their signatures and
their limits: run by `test_pretended_steps`.

The stand-ins compute what the libraries do, over the same codes and with the same roundings, and
leave what is no number where the libraries leave garbage. So what our engine asks of them, eagerly
and in graphs, is run by whole decode steps; whether the libraries answer so, only a device says.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_map

from ess.bench.engine.precision import apart, forced_logits
from ess.door import Offload
from ess.engine.config import ProcessConfig
from ess.engine.engine import Engine, EngineConfig
from ess.engine.process import build as building
from ess.engine.process.messages import Launch
from ess.engine.tokens.sampling import Sampling
from ess.kernels import backend
from ess.kernels.cuda.adapters import choice, deep_gemm_experts, deep_gemm_linear
from ess.kernels.cuda.adapters.joined import joined
from ess.kernels.ops import Ops
from ess.models.load import load_model
from ess.models.weights.ahead import build_ahead
from tests.device.kernels import Kernels, without_ids
from tests.kernels.test_adapters import FlashMlaStandIn
from tests.kernels.test_adapters_joined import DeepGemmWhole
from tests.support.checkpoints import tokens
from tests.support.deep_gemm_layouts import VERSIONS
from tests.support.manual_clock import ManualClock
from tests.support.pretended import PRETENCE
from tests.unit.weights.conftest import SMALL, write_checkpoint

pytestmark = pytest.mark.usefixtures("alone")

RAW = {**SMALL, "index_n_heads": 32, "num_hidden_layers": 2}
VOCABULARY, LENGTH, FORCED = RAW["vocab_size"], 90, 6
ASKED = {
    "flash_mla": ("flash_mla_with_kvcache",),
    "deep_gemm": ("fp8_paged_mqa_logits", "fp8_gemm_nt", "m_grouped_fp8_gemm_nt_masked"),
}
ON_HOST = {
    "flash_mla": ("get_mla_metadata",),
    "deep_gemm": ("get_paged_mqa_logits_metadata", "get_num_sms"),
}
KL_MAX = 0.1
"""Nats between our own kernels and the libraries', which also round index queries to e4m3 and what
comes out of products to bfloat16. Random weights have no margins: another expert is soon chosen. A
wrong scale or place is whole nats."""


def kernel(function, count):
    """On the pretended device a call is one kernel: a graph that holds it runs it again."""

    def called(*given, **options):
        def run(given, options):
            with torch._C.DisableTorchFunction():
                return function(*given, **options)

        def call():
            count()
            return run(*named)

        writes = function.__annotations__["return"] == "None"
        named = PRETENCE.by_address((given, options))
        first = (lambda: None) if writes else lambda: run(*tree_map(without_ids, (given, options)))
        is_captured = PRETENCE.captured is not None
        return PRETENCE.run(call, there=True, first=first if is_captured else None)

    return called


@pytest.fixture
def libraries(monkeypatch):
    """Calls of each function, by name."""
    calls, own = Counter(), Ops("cuda", Kernels())
    made = {"flash_mla": FlashMlaStandIn(), "deep_gemm": DeepGemmWhole()}
    for name, stand_in in made.items():
        module = types.ModuleType(name)
        module.__version__ = "9.9"
        for asked in ASKED[name]:
            count = functools.partial(calls.update, [asked])
            setattr(module, asked, kernel(getattr(stand_in, asked), count))
        for asked in ON_HOST[name]:
            setattr(module, asked, getattr(stand_in, asked))
        monkeypatch.setitem(sys.modules, name, module)
    for user in (deep_gemm_experts, deep_gemm_linear):
        real = user.own_ops
        monkeypatch.setattr(
            user, "own_ops", lambda name, real=real: own if name == "cuda" else real(name)
        )
    chosen = choice.choose(torch.device("cuda", 0))
    assert all(chosen[:4]), chosen.lines
    monkeypatch.setattr(backend, "_cuda", lambda: joined(own, chosen))
    backend._ops.cache_clear()
    calls.clear()
    return calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, RAW)
    return path


def engine(folder, *, mtp=1, **more) -> Engine:
    made = load_model(folder, form="stored", device="cuda")
    layout = made.config.layout(row="fp8", index="fp8")
    offload = Offload.create(
        layout,
        device="cuda:0",
        slot_bytes=layout.group_count * layout.chunk_bytes * 4,
        host_bytes=16 * layout.host_page_bytes,
        length_max=256,
        slot_floor=16,
        poison=True,
    )
    return Engine(made, offload, EngineConfig(mtp=mtp, backend="cuda", **more))


def forced(folder, mode) -> torch.Tensor:
    """Logits of every query."""
    eng = engine(folder, modes=mode)
    line = tokens(LENGTH + FORCED, VOCABULARY, seed=4)
    logits = torch.stack(forced_logits(eng, [line], start=LENGTH)).cpu()
    eng.offload.close()
    return logits


@pytest.mark.parametrize("mode", ["none", "da"])
def test_logits_are_near_those_of_our_own_kernels(mode, folder, request):
    ours = forced(folder, mode)
    calls = request.getfixturevalue("libraries")
    theirs = forced(folder, mode)
    asked = {name for names in ASKED.values() for name in names}
    assert calls.keys() == asked - ({"flash_mla_with_kvcache"} if mode == "da" else set())
    assert 0 < apart(ours, theirs).mean < KL_MAX


def products(monkeypatch) -> list[tuple[int, int, int]]:
    """Tokens, width and depth of each dense product from now on."""
    module, asked = sys.modules["deep_gemm"], []
    run = module.fp8_gemm_nt

    def noted(values, weights, out):
        asked.append((len(out), *weights[0].shape))
        return run(values, weights, out)

    monkeypatch.setattr(module, "fp8_gemm_nt", noted)
    return asked


def test_all_layouts_are_met_before_the_first_request(folder, libraries, monkeypatch):
    eng = engine(folder, mtp=2, modes="none", depth=1, graphs=0, chunk_tokens=80)
    asked, told = products(monkeypatch), []
    build_ahead(eng.runner.model, count_max=80, clock=ManualClock(), tell=told.append)
    shapes = {each[1:] for each in asked}
    counts = (15, 16, 31, 32, 63, 64, 80)
    assert sorted(asked) == sorted((count, *shape) for count in counts for shape in shapes)
    assert sum("by up to 80 tokens, shape " in line for line in told) == len(shapes) > 4
    assert len(told) == len(shapes) + 2, "and two of experts"
    assert told[-1].endswith(f"shape {len(told)} of {len(told)}, 0.0 s")

    met = [{choose(*each) + each[1:] for each in asked} for choose in VERSIONS]
    asked.clear()
    for count in (3, 17, 70, 90, 180):
        eng.add(tokens(count, VOCABULARY, seed=count), Sampling(tokens_max=8, ignore_eos=True))
    while not eng.is_idle:
        eng.step()
    eng.offload.close()
    assert {each[1:] for each in asked} == shapes
    assert max(asked)[0] == 80
    for choose, built in zip(VERSIONS, met, strict=True):
        assert {choose(*each) + each[1:] for each in asked} <= built


def test_so_are_those_of_experts(folder, libraries, monkeypatch):
    """By how many tokens an expert is expected to have; in blocks of 64 or more their choice knows
    no other number."""
    module, asked = sys.modules["deep_gemm"], set()
    run = module.m_grouped_fp8_gemm_nt_masked

    def noted(given, weights, out, counts, expected):
        asked.add((expected, tuple(weights[0].shape)))
        return run(given, weights, out, counts, expected)

    monkeypatch.setattr(module, "m_grouped_fp8_gemm_nt_masked", noted)
    eng = engine(folder, mtp=2, modes="none", depth=1, graphs=0, chunk_tokens=80)
    told = []
    build_ahead(eng.runner.model, count_max=80, clock=ManualClock(), tell=told.append)
    built, each = set(asked), eng.runner.model.config.experts_per_token
    experts = eng.runner.model.config.expert_count
    assert max(built)[0] == 80 * each // experts
    assert sum(f"by up to {80 * each} lines, shape " in line for line in told) == 2
    asked.clear()
    for count in (3, 17, 70, 180):
        eng.add(tokens(count, VOCABULARY, seed=count), Sampling(tokens_max=4, ignore_eos=True))
    while not eng.is_idle:
        eng.step()
    eng.offload.close()
    assert {shape for _, shape in asked} == {shape for _, shape in built}
    for expected, shape in asked:
        least = min(count for count, of in built if of == shape and count >= expected)
        assert {least, expected} <= set(range(*limits_around(expected)))


def limits_around(expected):
    """Between two of these numbers there is one layout."""
    limits = [1, 16, 17, 32, 33, 64, 65, 128]
    return max(n for n in limits if n <= expected), min(n for n in limits if n > expected)


def test_an_engine_s_process_meets_them_before_it_begins(folder, libraries, monkeypatch):
    asked, told = products(monkeypatch), []
    monkeypatch.setattr(building, "Tokenizer", lambda _: None)
    monkeypatch.setattr(building.console, "note", told.append)
    chosen = {"device": "cuda", "backend": "cuda", "form": "stored", "threads": 1}
    launch = Launch(
        model=str(folder),
        config=ProcessConfig(**chosen, chunk_tokens=100, max_running=2, mtp=1),
        length_max=256,
        slot_bytes=8 << 20,
        host_bytes=8 << 20,
        index_bytes=4 << 20,
    )
    met = []
    made = building.build(launch, ManualClock(), before_steps=lambda: met.extend(asked))
    made.engine.offload.close()
    assert {count for count, *_ in met} == {15, 16, 31, 32, 63, 64, 100}
    lines = sum(line.startswith("products in fp8: ") for line in told)
    assert lines == len({each[1:] for each in met}) + 2, "and two of experts"


def test_our_own_products_are_not_made_ahead(folder):
    told = []
    eng = engine(folder)
    build_ahead(eng.runner.model, count_max=80, clock=ManualClock(), tell=told.append)
    eng.offload.close()
    assert told == []


def test_a_graph_asks_them_again(folder, libraries):
    said = []
    for graphs in (0, 16):
        eng = engine(folder, mtp=2, modes="none", depth=1, graphs=graphs)
        requests = [
            eng.add(tokens(count, VOCABULARY, seed=count), Sampling(tokens_max=8, ignore_eos=True))
            for count in (70, 90)
        ]
        while not eng.is_idle:
            eng.step()
            eng.check()
        said.append([request.output for request in requests])
        line = eng.graph_line()
        eng.offload.close()
    assert said[0] == said[1]
    assert line.replayed > 0
    assert libraries["flash_mla_with_kvcache"] > 0
