"""Weights on the pretended device, in every form that they may have there."""

from __future__ import annotations

import pytest
import torch

from ess.comm.experts.balance import balanced
from ess.comm.experts.fixed import FixedExpertRanks
from ess.comm.experts.placement import Placement
from ess.comm.local import local_group
from ess.door.device.memory.uploads import Download
from ess.errors import BadInput
from ess.models.load import load_model
from ess.models.weights.blocks import quantise
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.models.weights.kept import Fp8Weight, plain, stacked
from ess.server.commands.start.files.checkpoint import read_entries
from tests.device.memory import tensor_bytes
from tests.support.checkpoints import TINY_GLM, TINY_LLAMA
from tests.support.held import held
from tests.support.pretended import is_there
from tests.unit.weights.conftest import EMBEDDED, SMALL, write_checkpoint

pytestmark = pytest.mark.usefixtures("alone")

UNTIED = {**TINY_LLAMA, "tie_word_embeddings": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, SMALL)
    return path


def layers(model):
    return [*model.layers, model.mtp.layer]


@pytest.mark.parametrize("form", ["bf16", "f32", "stored"])
def test_all_of_a_model_is_on_the_device(form, folder):
    made = load_model(folder, form=form, device="cuda")
    tensors = list(held(made, set()))
    assert len(tensors) > 40
    assert all(map(is_there, tensors))
    assert made.device.type == "cuda"
    assert made.rotation(torch.arange(3).to("cuda")).cos.device.type == "cuda"


@pytest.fixture
def loose():
    """A process as an image of NVIDIA's starts it."""
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    matmul.allow_bf16_reduced_precision_reduction = True
    yield matmul
    torch.set_float32_matmul_precision(before)


def test_products_of_a_device_are_added_up_in_float32(folder, loose):
    load_model(folder, form="f32")
    assert loose.fp32_precision == "tf32", "a host's model changes nothing"
    load_model(folder, form="f32", device="cuda")
    assert loose.fp32_precision == "ieee"
    assert not loose.allow_tf32
    assert not loose.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("form", ["bf16", "f32", "stored"])
@pytest.mark.parametrize("raw", [SMALL, EMBEDDED, TINY_GLM, UNTIED])
def test_a_plan_says_what_a_model_takes(form, raw, tmp_path):
    write_checkpoint(tmp_path, raw)
    entries, before = read_entries(tmp_path), tensor_bytes()
    made = load_model(tmp_path, form=form, device="cuda")
    assert tensor_bytes() - before == kept_bytes(made.config, entries, form)


@pytest.mark.parametrize("form", ["f32", "stored"])
def test_a_plan_says_what_a_rank_takes(form, tmp_path):
    """It has its own experts and no others, among them one of two copies."""
    write_checkpoint(tmp_path, EMBEDDED)
    entries = read_entries(tmp_path)
    config = load_model(tmp_path, form=form, device="cuda").config
    placed = balanced([*range(config.expert_count)], 2, 2)
    team, home = local_group(2, team=2)[1].team, torch.device("cuda", 0)
    expert_ranks = FixedExpertRanks(
        team, Placement(placed), home, lambda there: Download(there).read
    )
    for layer in range(config.layer_total):
        expert_ranks.own(layer)
    before = tensor_bytes()
    made = load_model(tmp_path, form=form, device="cuda", expert_ranks=expert_ranks)
    planned = kept_bytes(config, entries, form, rank_count=2, redundant=2)
    assert tensor_bytes() - before == planned
    assert made.layers[-1].experts.own_count == (config.expert_count + 2) // 2


def test_blocks_are_kept_for_products_and_nothing_else(folder):
    stored = load_model(folder, form="stored", device="cuda")
    for layer in layers(stored):
        for weight in (layer.mla._query_up, layer.mla._out, layer.indexer._query_up):
            assert isinstance(weight, Fp8Weight)
            assert weight.values.element_size() == 1
        assert layer.mla._key_up.dtype == layer.mla.dtype == torch.bfloat16
    for layer in layers(stored)[1:]:
        inner, outer = layer.experts._gate_up, layer.experts._down
        assert inner[0].element_size() == outer[0].element_size() == 1
        assert len(inner[1]) == len(outer[1]) == len(inner[0])


def alike(got, wanted):
    """Both sides of a product of blocks have three bits behind the point."""
    apart = (got.cpu().float() - wanted.cpu().float()).pow(2).mean().sqrt()
    return apart < 0.06 * wanted.cpu().float().pow(2).mean().sqrt()


def test_products_of_blocks_are_close_to_those_of_bf16(folder):
    stored, wide = (load_model(folder, form=form, device="cuda") for form in ("stored", "bf16"))
    hidden = torch.randn(5, SMALL["hidden_size"]).to("cuda")
    rotation = stored.rotation(torch.arange(5).to("cuda"))
    for mine, theirs in zip(layers(stored), layers(wide), strict=True):
        entry, other = mine.enter(hidden), theirs.enter(hidden)
        for got, wanted in zip(entry, other, strict=True):
            assert alike(got, wanted)
        asked, probe = mine.pre_attn(entry, rotation), mine.index(entry, rotation)
        assert alike(asked.queries, theirs.pre_attn(other, rotation).queries)
        assert alike(probe.keys, theirs.index(other, rotation).keys)
        assert alike(mine.mlp(hidden) - hidden, theirs.mlp(hidden) - hidden)


def test_logits_are_not_rounded_to_bf16(folder):
    """Of the same factors, summed in float32."""
    made = load_model(folder, form="bf16", device="cuda")
    finished = torch.randn(5, SMALL["hidden_size"]).to("cuda")
    logits = made.logits(finished).cpu()
    factors = finished.cpu().bfloat16().double(), made._head.cpu().double()
    torch.testing.assert_close(logits.double(), factors[0] @ factors[1].T, atol=1e-4, rtol=1e-4)
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9


def test_matrices_are_stacked_in_blocks_where_no_block_has_rows_of_two():
    first, second, third = (
        Fp8Weight(*quantise(torch.randn(rows, 200))) for rows in (256, 100, 128)
    )
    joint = stacked((first, second))
    assert isinstance(joint, Fp8Weight)
    assert torch.equal(plain(joint), torch.cat((first.plain(), second.plain())))
    uneven = stacked((second, third))
    assert isinstance(uneven, torch.Tensor)
    assert torch.equal(uneven, torch.cat((second.plain(), third.plain())))
    assert isinstance(stacked((first, second.plain())), torch.Tensor)


def test_the_host_computes_in_no_stored_form(folder):
    with pytest.raises(BadInput, match="form 'stored' is for a device"):
        load_model(folder, form="stored")
