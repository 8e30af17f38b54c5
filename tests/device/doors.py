"""Whole engines over the device's own door, their steps replayed from graphs: run by
`test_forward_steps`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ess.engine.graphs import buckets, rehearsal
from ess.engine.prompt import plain_rows
from ess.engine.ranks.agreement import StepNeeds, agreed
from ess.engine.step_bytes import graph_bytes
from ess.engine.tokens.sampling import Sampling
from ess.kernels.cuda import streams
from ess.kernels.cuda.driver import shared_device
from ess.pool import cuda_programs
from ess.pool.lru import cuda_shape
from tests.device import engines
from tests.device.steps import close
from tests.support.checkpoints import tokens
from tests.support.pretended import PRETENCE

pytestmark = pytest.mark.usefixtures("alone")

CASES = (("glm", "layerwise", "1", "1", "smallest", "many"),)
MORE = (
    ("v32", "dba", "4", "0", "tight", "many"),
    ("glm", "resident", "1", "0", "ample", "many"),
    ("v32", "none", "2", "1", "ample", "few"),
)


@pytest.mark.parametrize(
    "values", [*CASES, *(pytest.param(case, marks=pytest.mark.long) for case in MORE)], ids="-".join
)
def test_the_tokens_are_those_of_the_host(values):
    case = dict(zip((*engines.FACTORS, "graphs"), values, strict=True))
    shared_device(0)._kernels.clear()  # other tests of this process have loaded more
    eng = engines.engine("cuda", **case)
    close(engines.scenario(eng), engines.expected(case["family"]))
    assert eng.offload._pools.lane.device is plain_rows._mover(0)._device
    require_built_ahead(eng.offload._pools.lane.device)
    made = eng.graph_line()
    assert made.replayed > 0
    assert 0 < made.held <= engines.GRAPHS[case["graphs"]]
    assert made.eager.keys() == {"first steps"}


def require_built_ahead(device):
    """But for what follows from addresses, which are rounder on a device."""
    sizes = {size_of(program) for program, _ in device._kernels}
    assert len(sizes) > 5
    assert sizes <= {size_of(program) for program in cuda_programs.programs()}


def size_of(program):
    return program.file, dict(program.defines).get("ESS_ROW_BYTES")


def test_so_are_those_of_batches_that_fill_the_device(monkeypatch):
    """Tiny batches would all be resolved by one cluster."""
    monkeypatch.setattr(cuda_shape, "ALONE_ENTRIES_MAX", 0)
    test_the_tokens_are_those_of_the_host(("v32", "dba", "2", "1", "smallest", "few"))


def test_graphs_stay_within_their_bytes(monkeypatch):
    """What a graph of one query takes is there, what one of two takes is not. Where the driver has
    taken more than was estimated, steps and prompts keep what they take."""
    config = engines.model("v32", "cuda").config
    eng = engines.engine("cuda", graphs="many")
    sizes = {"layout": eng.offload.layout, "length_max": engines.LENGTH_MAX, "value_bytes": 4}
    least = graph_bytes(config, query_max=1, graph_count=1, **sizes)
    eng.offload.close()
    eng = engines.engine("cuda", graphs="many", graph_byte_max=least, beside_bytes=50)
    for free, cached, leaves in ((50, -9, True), (49, 0, False), (9, 41, True), (9, 40, False)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 1 << 40))
            held = PRETENCE.held_bytes + cached
            patch.setattr(torch.cuda, "memory_reserved", lambda _, held=held: held)
            assert eng._flights.replays.has_bytes(1) is leaves
    for seed, count in ((0, 12), (1, 5)):
        prompt = tokens(2, engines.VOCABULARY, seed=seed)
        eng.add(prompt, Sampling(tokens_max=count, ignore_eos=True))
    while not eng.is_idle:
        eng.step()
    made = eng.graph_line()
    assert (made.captured, made.byte_max) == (1, least)
    assert 0 < made.bytes <= least
    assert made.replayed > 2 < made.eager["memory"]
    eng.offload.close()


def test_a_kind_without_bytes_does_not_ask_the_device_in_each_step(monkeypatch):
    eng = engines.engine("cuda", graphs="many", beside_bytes=1)
    replays, asked = eng._flights.replays, []
    replays._runner.standby = SimpleNamespace(decode=lambda agreement: None)
    monkeypatch.setattr(type(replays), "left_bytes", property(lambda _: asked.append(0) or 0))
    for _ in range(33):
        replays.stand_by(agreed([StepNeeds(token_count=1)]))
    assert len(asked) == 5
    monkeypatch.undo()
    for _ in range(32):
        replays.stand_by(agreed([StepNeeds(token_count=1)]))
    made = eng.graph_line()
    assert (made.captured, made.replayed, made.eager) == (1, 1, {"first steps": 1, "memory": 62})
    eng.offload.close()


def test_what_stands_by_beside_a_step_without_a_bucket_is_not_captured():
    """Such a step is eager, with as many tokens as its requests happen to have."""
    eng = engines.engine("cuda", graphs="many", graph_sizes="2")
    replays, decoded = eng._flights.replays, []
    replays._runner.standby = SimpleNamespace(decode=decoded.append)
    for tokens_of_others in (3, 3, 3, 2, 2, 2):
        replays.stand_by(agreed([StepNeeds(token_count=tokens_of_others)]))
    made = eng.graph_line()
    assert made.eager == {"no bucket": 3, "first steps": 1}
    assert (made.captured, made.held, made.replayed) == (1, 1, 1)
    assert [each.rooms.batch for each in decoded] == [3, 3, 3, 2, 2]
    eng.offload.close()


def test_the_steps_of_the_first_requests_are_replays(monkeypatch):
    """One draws by top-p, as checkpoints recommend, and one is greedy; one joins while the other
    has drafts. All usual kinds have places, and one place is left for steps of others."""
    monkeypatch.setattr(buckets, "GRAPHS_MIN", 1)
    monkeypatch.setattr(rehearsal, "TOLD_EVERY_S", 0.0)
    eng = engines.engine("cuda", mode="layerwise", mtp="2", graphs="usual", graph_sizes="2")
    told = []
    eng.rehearse(told.append)
    before = eng.graph_line()
    assert (before.captured, before.held, before.most) == (6, 6, 7)
    assert told[-1].startswith("graphs of steps: 6 captured")
    for count, line in enumerate(told[1:-1], 1):
        assert line.startswith(f"graphs of steps: {count} of at most 6, after ")
    assert len(told) == 8
    assert not eng.tuning.mode_counts.any()
    requests = []
    for count, given in ((20, {"temperature": 1.0, "top_p": 0.9}), (3, {})):
        prompt = tokens(count, engines.VOCABULARY, seed=count)
        requests.append(eng.add(prompt, Sampling(tokens_max=20, ignore_eos=True, **given)))
        eng.step()
        eng.check()
    while not eng.is_idle:
        eng.step()
    assert [len(request.output) for request in requests] == [20, 20]
    after = eng.graph_line()
    assert after.replayed > 0
    assert after.eager == {}
    assert after.captured == before.captured
    eng.offload.drain()
    assert eng.offload.stats().fetch_count.any(), "a step was timed"
    eng.offload.close()


def test_a_turn_to_be_timed_is_passed_over_where_there_is_no_room():
    """The rehearsal's two kinds take all graphs that may be kept."""
    eng = engines.engine("cuda", mode="none", graphs="few", graph_sizes="1,2")
    eng.rehearse(lambda said: None)
    for seed, count in ((0, 40), (1, 10)):
        prompt = tokens(20, engines.VOCABULARY, seed=seed)
        eng.add(prompt, Sampling(tokens_max=count, ignore_eos=True, temperature=1.0))
    while not eng.is_idle:
        eng.step()
        eng.check()
    made = eng.graph_line()
    assert (made.captured, made.held, made.dropped, made.eager) == (2, 2, 0, {})
    eng.close()
    assert eng.graph_line().held == 0, "a graph that NCCL would wait for"
    assert not eng.offload.stats().fetch_count.any()
    eng.offload.close()


def test_a_prompt_waits_for_its_end_and_not_for_its_layers():
    """Once for its windows, and for rows and keys, which have then come too."""
    eng = engines.engine("cuda", mtp="2", depth="1")
    eng.add(tokens(150, engines.VOCABULARY, seed=0), Sampling(tokens_max=2, ignore_eos=True))
    chunks = []
    while not eng.is_idle:
        PRETENCE.waited.clear()
        if eng.step().chunks:
            chunks.append(dict(PRETENCE.waited))
    assert chunks == [{"cpu": 1, "synchronize": 1}] * 2
    eng.offload.close()


def test_two_halves_are_replayed_with_other_selections():
    """Prompts differ and go on, so every replay selects, misses and fetches other rows."""
    given = {"family": "v32", "mode": "da", "arena": "smallest", "mtp": "2", "evict": "score"}
    wanted, said = [], []
    for device, made in (("cpu", wanted), ("cuda", said)):
        more = {} if device == "cpu" else {"graphs": "many", "tbo": "on"}
        eng = engines.engine(device, **given, **more)
        for seed in (0, 1):
            prompt = tokens(60 + seed, engines.VOCABULARY, seed=seed)
            made.append(eng.add(prompt, Sampling(tokens_max=10, ignore_eos=True)))
        while not eng.is_idle:
            eng.step()
        eng.check()
        eng.offload.drain()
        missed = eng.offload.stats().miss_count.sum()
        eng.offload.close()
    assert [request.output for request in said] == [request.output for request in wanted]
    line = eng.graph_line()
    assert line.replayed >= 3
    assert eng.tuning.split_count >= line.replayed
    assert missed > 0


def test_steady_steps_wait_for_nothing_that_runs(monkeypatch):
    """In eager, captured and replayed steps neither torch nor the driver is called to wait."""
    asked, wait = [], streams.CudaEvent.wait
    monkeypatch.setattr(
        streams.CudaEvent,
        "wait",
        lambda self, *given: (asked.append("the driver"), wait(self, *given)),
    )
    eng = engines.engine("cuda", mtp="2", depth="1", graphs="many")
    for seed in (0, 1):
        prompt = tokens(20, engines.VOCABULARY, seed=seed)
        eng.add(prompt, Sampling(tokens_max=24, ignore_eos=True))
    replays, waited = eng._flights.replays, []
    while not (replays.replayed_count or eng.is_idle):
        PRETENCE.waited.clear()
        asked.clear()
        eng.step()
        waited.append(dict(PRETENCE.waited) | dict.fromkeys(asked, 1))
    assert replays.replayed_count
    assert replays.captured_count
    assert {name for names in waited[2:] for name in names} == {"an earlier moment"}
    eng.offload.close()
