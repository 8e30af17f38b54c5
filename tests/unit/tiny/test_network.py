from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ess.models.tiny.trainer import stages
from ess.models.tiny.trainer.attention import attend, causal_mask
from ess.models.tiny.trainer.experts import Moe, balance
from ess.models.tiny.trainer.losses import cross_entropy, soft_cross_entropy, token_nats
from ess.models.tiny.trainer.network import Network, Trace, rope_tables, softmax_scale
from ess.models.tiny.trainer.shape import ModelShape


def _grown(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def _alive(shape: ModelShape) -> Network:
    torch.manual_seed(0)
    network = Network(shape)
    torch.nn.init.normal_(network.lm_head.weight)
    return network


def test_attention_is_torchs_own() -> None:
    torch.manual_seed(0)
    first = _grown(*(torch.randn(2, 3, 20, 16) for _ in range(3)))
    second = _grown(*first)
    ours = attend(*first, causal_mask(20, torch.device("cpu")), scale=0.3)
    theirs = F.scaled_dot_product_attention(*second, is_causal=True, scale=0.3)
    torch.testing.assert_close(ours, theirs)
    slope = torch.randn_like(ours)
    ours.backward(slope)
    theirs.backward(slope)
    for each, other in zip(first, second, strict=True):
        torch.testing.assert_close(each.grad, other.grad)


def _slow_moe(moe: Moe, x: Tensor) -> Tensor:
    share, chosen = moe.gate(x)
    rows = []
    for row, token in enumerate(x):
        total = moe.shared_experts(token)
        for part, expert in zip(share[row], chosen[row].tolist(), strict=True):
            gate, up = (moe.gate_up[expert] @ token).chunk(2)
            total = total + part * (moe.down[expert] @ (F.silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def test_experts_are_the_loop_over_tokens(small: ModelShape) -> None:
    torch.manual_seed(1)
    moe = Moe(small)
    for weight in (moe.gate_up, moe.down):
        torch.nn.init.normal_(weight, 0, 0.3)
    moe.gate.e_score_correction_bias.normal_(0, 0.1)
    x = torch.randn(40, small.hidden)
    grads = []
    for function in (moe, lambda part: _slow_moe(moe, part)):
        moe.zero_grad()
        part = x.clone().requires_grad_()
        made = function(part)
        made.square().sum().backward()
        grads.append([made, part.grad, *(weight.grad for weight in moe.parameters())])
    for fast, slow in zip(*grads, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


def test_gate_keeps_to_its_groups(small: ModelShape) -> None:
    torch.manual_seed(2)
    gate = Moe(small).gate
    share, chosen = gate(torch.randn(300, small.hidden))
    assert torch.allclose(share.sum(-1), torch.ones(300))
    assert (chosen[:, 0] != chosen[:, 1]).all()
    gate.e_score_correction_bias[3] = 10.0
    assert (gate(torch.randn(50, small.hidden))[1] == 3).any(-1).all()


def test_balance_pushes_against_the_load() -> None:
    biases = torch.zeros(1, 3)
    balance(biases, torch.tensor([[9.0, 3.0, 0.0]]))
    assert biases[0, 0] < 0 < biases[0, 2]


def test_selection_of_everything_is_dense(small: ModelShape) -> None:
    network = _alive(dataclasses.replace(small, top_k=64))
    tokens = torch.randint(0, 96, (2, 30))
    torch.testing.assert_close(network(tokens, mode="sparse"), network(tokens, mode="dense"))


def test_selection_changes_only_what_it_cuts(small: ModelShape) -> None:
    network = _alive(small)
    tokens = torch.randint(0, 96, (1, 30))
    dense, sparse = network(tokens, mode="dense"), network(tokens, mode="sparse")
    torch.testing.assert_close(dense[:, : small.top_k], sparse[:, : small.top_k])
    assert not torch.allclose(dense[:, small.top_k :], sparse[:, small.top_k :])


@pytest.mark.parametrize("mode", ["dense", "sparse"])
def test_nothing_looks_ahead(small: ModelShape, mode: str) -> None:
    network = _alive(small)
    tokens = torch.randint(0, 96, (1, 24))
    other = tokens.clone()
    other[0, 15:] = (other[0, 15:] + 1) % 96
    first, second = network(tokens, mode=mode), network(other, mode=mode)
    torch.testing.assert_close(first[:, :15], second[:, :15])
    assert not torch.allclose(first[:, 15:], second[:, 15:])


def test_indexer_learns_alone(small: ModelShape) -> None:
    network = _alive(small)
    trace = Trace()
    network(torch.randint(0, 96, (1, 20)), mode="warm", trace=trace)
    assert len(trace.losses) == small.layer_count
    torch.stack(trace.losses).sum().backward()
    moved = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert moved
    assert all(".indexer." in name for name in moved)


def test_rope_stretches_only_slow_pairs() -> None:
    shape = ModelShape()
    cos, sin = rope_tables(shape, 3)
    angle = torch.atan2(sin[1], cos[1])
    plain = shape.rope_base ** (-torch.arange(0, shape.rope, 2) / shape.rope)
    torch.testing.assert_close(angle[:11], plain[:11])
    torch.testing.assert_close(angle[23:], plain[23:] / shape.rope_factor)
    assert softmax_scale(shape) == pytest.approx(128**-0.5 * 1.3465736**2)


def test_sliced_losses_are_torchs_own() -> None:
    torch.manual_seed(3)
    target, teacher = torch.randint(0, 50, (2, 700)), torch.randn(2, 700, 12)
    first = _grown(torch.randn(2, 700, 12), torch.randn(50, 12))
    second = _grown(*first)
    ours = cross_entropy(*first, target) + soft_cross_entropy(*first, teacher)
    logits = second[0] @ second[1].t()
    aim = (teacher @ second[1].detach().t()).log_softmax(-1)
    theirs = F.cross_entropy(logits.flatten(0, 1), target.flatten()) + F.kl_div(
        logits.log_softmax(-1).flatten(0, 1),
        aim.flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    torch.testing.assert_close(ours, theirs)
    ours.backward()
    theirs.backward()
    for each, other in zip(first, second, strict=True):
        torch.testing.assert_close(each.grad, other.grad)
    nats = token_nats(first[0], first[1], target)
    assert nats.mean() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), target.flatten()).item()
    )


def test_drafts_do_not_move_the_trunk(small: ModelShape) -> None:
    network = _alive(small)
    mtp = f"model.layers.{small.layer_count}."
    for name, weight in network.named_parameters():
        weight.requires_grad_(name.startswith(mtp))
    stage = next(stage for stage in stages.STAGES if stage.kind == "mtp")
    loss, _ = stages.stage_loss(network, stage, torch.randint(0, 96, (2, 25)))
    loss.backward()
    for name, weight in network.named_parameters():
        assert (weight.grad is not None) == name.startswith(mtp), name


def test_rates_end_at_zero() -> None:
    shares = [stage.share for stage in stages.STAGES]
    assert sum(shares) == pytest.approx(1.0)
    trunk = [at for at, stage in enumerate(stages.STAGES) if stage.kind in ("lm", "sparse")]
    assert stages.rate_factor(stages.STAGES, trunk[0], 0.3, 1000) == 1.0
    assert stages.rate_factor(stages.STAGES, trunk[-1], 1.0, 1000) == pytest.approx(0.0, abs=1e-12)
    ends = [stages.rate_factor(stages.STAGES, at, 1.0, 1000) for at in trunk[:-1]]
    starts = [stages.rate_factor(stages.STAGES, at, 0.0, 1000) for at in trunk[1:]]
    assert ends == pytest.approx(starts)
