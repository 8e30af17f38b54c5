"""Whole steps on the pretended device: run by `test_pretended_steps`, in a process of its own."""

from __future__ import annotations

import pytest
import torch

from ess.engine.layers import selected
from ess.engine.requests.request import Take
from ess.engine.tokens.sampling import Sampling
from tests.device import engines
from tests.support.checkpoints import tokens
from tests.support.few import few
from tests.support.pairwise import all_pairs, pairs_of, pairwise

pytestmark = pytest.mark.usefixtures("alone")

FACTORS = {**engines.FACTORS, "evict": ("lru", "score")}
CASES = pairwise(FACTORS)


def close(said, wanted):
    assert [tokens for tokens, _ in said] == [tokens for tokens, _ in wanted]
    for (_, chances), (_, others) in zip(said, wanted, strict=True):
        assert [chance.rank for chance in chances] == [chance.rank for chance in others]
        for chance, other in zip(chances, others, strict=True):
            assert chance.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in chance.top] == [token for token, _ in other.top]
            for (_, mine), (_, theirs) in zip(chance.top, other.top, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-4)


def test_every_pair_of_settings_meets():
    met = set().union(*(pairs_of(case) for case in CASES))
    assert met == all_pairs(FACTORS)


@pytest.mark.parametrize(
    "case", few(CASES[::2], all_of=CASES), ids=lambda case: "-".join(case.values())
)
def test_the_tokens_are_those_of_the_host(case):
    said = engines.scenario(engines.engine("cuda", door=False, **case))
    close(said, engines.expected(case["family"]))


@pytest.mark.parametrize("mtp", ["1", "3"])
def test_what_the_host_changes_runs_at_depth_0(mtp):
    eng = engines.engine("cuda", mtp=mtp, depth="1", door=False)
    said = engines.scenario(eng, penalised=True)
    close(said, engines.expected("v32", penalised=True))


WAITS = {
    "item": lambda there: there.sum().item(),
    "nonzero": torch.nonzero,
    "where": lambda there: torch.where(there > 0),
    "cpu": torch.Tensor.cpu,
    "copy_": lambda there: there.copy_(torch.zeros(there.shape, dtype=there.dtype)),
    "__getitem__": lambda there: there[:, : there[0, 0]],
}


@pytest.mark.parametrize("name", WAITS)
def test_a_step_in_which_torch_waits_fails(name, monkeypatch):
    """Else no test would tell that the host waits for the device in each step."""
    real = selected.select

    def waits(*given, **form):
        chosen, logits = real(*given, **form)
        WAITS[name](chosen)
        return chosen, logits

    monkeypatch.setattr(selected, "select", waits)
    eng = engines.engine("cuda", door=False)
    eng.add(tokens(5, engines.VOCABULARY, seed=0), Sampling(tokens_max=4, ignore_eos=True))
    eng.step()
    with pytest.raises(RuntimeError, match=f"the host waits for the device: {name}"):
        eng.step()


def test_invented_rows_are_those_of_the_host():
    said = []
    for device in ("cpu", "cuda"):
        eng = engines.engine(device, mtp="2", depth="1", door=False, fake_prefill=True)
        wish = Sampling(tokens_max=5, ignore_eos=True)
        taken = eng.add(tokens(150, 99, seed=0), wish, take=Take(uid=5, fake=True))
        while not eng.is_idle:
            eng.step()
        said.append((taken.refusal, taken.output))
    assert said[0] == said[1]
    assert len(said[1][1]) == 5
