"""Engines that divide the experts, as processes over gloo: the model in the box, in float32."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from ess.engine.process.messages import Add, Fault, Stop
from ess.engine.ranks.placing import read_loads
from ess.engine.tokens.sampling import Sampling
from ess.models.load import EMBEDDED, load_model
from ess.models.weights.checkpoint import Checkpoint
from ess.ports import kept_port
from tests.pd.processes import EngineProcess, engines
from tests.support.few import few
from tests.support.greedy import greedy

pytestmark = pytest.mark.slow
COUNT = 12
CASES = [(2, 2, "on", "combine-down", 2), (4, 1, "off", "off", 4)]


@functools.cache
def expected(length: int) -> list[int]:
    return greedy(load_model(form="f32"), prompt(length), COUNT)


def prompt(length: int) -> list[int]:
    return [5 + 7 * at % 90 for at in range(length)]


def add(number: int, length: int, count: int = COUNT) -> Add:
    return Add(number, prompt(length), Sampling(tokens_max=count))


@contextlib.contextmanager
def ranks(folder: Path, size: int, *own: dict, **config: object) -> Iterator[list[EngineProcess]]:
    """`own` are settings of single ranks, the first ones first."""
    with kept_port("127.0.0.1") as port:
        common = {
            "module": "ess.engine.process.rank",
            "dp_size": size,
            "dist_init_addr": f"127.0.0.1:{port}",
            **config,
        }
        others = [{}] * (size - len(own))
        told = [{**common, "dp_rank": rank, **mine} for rank, mine in enumerate([*own, *others])]
        with engines(folder, *told) as made:
            yield made


def fault(engine: EngineProcess) -> str:
    while not isinstance(message := engine.hear(), Fault):
        pass
    assert engine.process.wait(180) != 0
    return message.sentence


@pytest.mark.parametrize(
    ("size", "mtp", "tbo", "sbo", "redundant"),
    few(CASES[:1], all_of=CASES),
)
def test_ranks_give_the_tokens_of_one_process(tmp_path, size, mtp, tbo, sbo, redundant):
    """Requests come to rank 0 alone, then also to the last, while others only stand by. With copies
    of experts too; what was chosen is recorded at the end."""
    path, common = tmp_path / "loads.json", {"mtp": mtp, "tbo": tbo, "sbo": sbo}
    record = {"redundant_experts": redundant, "record_expert_load": str(path)}
    with ranks(tmp_path, size, **common, **record) as made:
        for engine in made:
            engine.ready()
        first, last = made[0], made[-1]
        first.say(add(0, 40))
        first.say(add(1, 130))
        first.until(lambda _: bool(first.tokens(1)))
        last.say(add(2, 90))
        first.ended(0, 1)
        first.say(add(3, 1))
        last.ended(2)
        first.ended(3)
        for engine, number, length in (
            (first, 0, 40),
            (first, 1, 130),
            (last, 2, 90),
            (first, 3, 1),
        ):
            assert engine.tokens(number) == expected(length), length
        for engine in made[1:]:
            engine.say(Stop())
        assert [first.stop(), *(engine.process.wait(180) for engine in made[1:])] == [0] * size
    with Checkpoint(EMBEDDED) as checkpoint:
        loads = read_loads(path, checkpoint.model_config)
        assert all(sum(chosen) > 200 for chosen in loads.values())


@pytest.mark.parametrize(
    ("number", "victim"),
    few(
        [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)],
        all_of=product((signal.SIGKILL, signal.SIGSTOP), (0, 1)),
    ),
)
def test_a_rank_that_is_lost_ends_the_others_in_words(tmp_path, number, victim):
    """While ranks run requests and while none has any; the rank is killed, or stopped by a
    signal."""
    with ranks(tmp_path, 2) as made:
        for engine in made:
            engine.ready()
        other = made[1 - victim]
        if victim:
            other.say(add(0, 100, 500))
            other.until(lambda _: bool(other.tokens(0)))
        made[victim].process.send_signal(number)
        said = fault(other)
        assert "LinkLost" in said
        assert "is lost" in said
        assert other.reason(0) is None, "a request ended as if all were well"


def test_ranks_of_other_settings_are_refused_by_name(tmp_path):
    with ranks(tmp_path, 2, {}, {"sbo": "combine-down"}) as made:
        assert "sbo is combine-down on rank 1, off on rank 0" in fault(made[0])
        assert "sbo is combine-down on rank 1" in fault(made[1])
