"""vLLM's cache, built by hand in each form it takes, lands in an Offload's pools bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ess import Offload
from ess.adapters.vllm.blocks import BlockReader, Blocks, CachePlace, all_places, place_of
from ess.adapters.vllm.staging import Staging
from ess.door.sequences.sequence import Sequence
from ess.errors import BadInput
from ess.kernels.cpu import codec
from ess.kernels.reference.formats import e4m3_decode
from ess.kernels.reference.keys import hadamard
from ess.layout import ModelLayout
from ess.transfer.messages import PieceKind
from ess.transfer.runs import Region, page_runs
from ess.transfer.transport import Completed, Transfer
from tests.adapters.vllm_caches import (
    FOREIGN,
    KEYS,
    LAYOUT,
    contents,
    name_of,
    shuffled,
    tensor_of,
    tensors_of,
)
from tests.transfer.rigs import Rig, identity

TOKENS = 64 * 3 + 17
PAGES = range(4)
FORMS = [(64, 64), (64, 16), (128, 64), (32, 32), (1, 1), (256, 128), (48, 16), (96, 32), (32, 64)]


def offload(layout: ModelLayout = LAYOUT) -> Offload:
    return Offload.create(
        layout, slot_bytes="8MiB", host_bytes=16 * layout.host_page_bytes, length_max=1024
    )


def opened(pools: Offload) -> Sequence:
    """Not at the first pages of the pool."""
    pools.open([7] * 65)
    return pools.open(list(range(TOKENS)))


def pushed(reader: BlockReader, blocks: Blocks, pools: Offload, sequence: Sequence) -> None:
    """Every page of every layer, through staging and a transport, into the pools."""
    latent = pools._pools.latent
    staging = Staging(slot_bytes=LAYOUT.page_bytes, slot_count=5)
    rig = Rig("inprocess")
    local, remote = rig.end(identity()), rig.end(identity())
    local.register([staging.region()])
    remote.register([Region(1, latent.rows.reshape(-1)), Region(2, latent.keys.pages.reshape(-1))])
    local.connect(remote.metadata())
    remote.allow(5)
    for place in all_places(LAYOUT):
        unit = reader.unit_bytes(place.kind)
        slots = staging.put(reader.read(place, blocks, PAGES, token_count=TOKENS))
        first = place.layer * latent.pages.page_count
        to = page_runs(int(place.kind), first + sequence.holding.host_pages, page_bytes=unit)
        local.post(
            Transfer(
                peer=remote.epoch,
                local=staging.runs(slots, unit),
                remote=to,
                ticket=5,
                within_s=1.0,
            )
        )
        assert [type(event) for event in local.poll()] == [Completed]
        staging.give_back(staging.runs(slots, unit))
    assert staging.free_count == 5


@pytest.mark.parametrize(("block_rows", "tensor_rows"), FORMS)
def test_blocks_of_every_size_land_as_our_own_rows_and_keys(
    block_rows: int, tensor_rows: int
) -> None:
    made, blocks = contents(TOKENS), shuffled(TOKENS, block_rows)
    reader = BlockReader(LAYOUT, tensors_of(made, blocks, tensor_rows))
    with offload() as theirs, offload() as ours:
        landed, imported = opened(theirs), opened(ours)
        pushed(reader, blocks, theirs, landed)
        for place, records in made.items():
            if place.kind is PieceKind.ROWS:
                imported.import_rows(place.layer, 0, records)
            else:
                imported.import_keys(LAYOUT.groups[place.layer][0], 0, records)
        at, to = landed.holding.host_rows(0, TOKENS), imported.holding.host_rows(0, TOKENS)
        latent, wanted = theirs._pools.latent, ours._pools.latent
        for place in all_places(LAYOUT):
            if place.kind is PieceKind.ROWS:
                assert np.array_equal(latent.rows[place.layer, at], wanted.rows[place.layer, to])
            else:
                keys = latent.keys.read(place.layer, at)
                assert np.array_equal(keys, wanted.keys.read(place.layer, to))


@pytest.mark.parametrize("tensor_rows", [64, 16])
def test_the_rest_of_a_block_stays_at_home(tensor_rows: int) -> None:
    """Behind the prompt lies another prompt's, or the row that the decode worker makes itself."""
    made, blocks = contents(TOKENS), shuffled(TOKENS, 64)
    reader = BlockReader(LAYOUT, tensors_of(made, blocks, tensor_rows))
    rows = reader.read(CachePlace(PieceKind.ROWS, 1), blocks, PAGES, token_count=TOKENS - 1)
    by_row = rows.reshape(-1, 656)
    assert torch.equal(
        by_row[: TOKENS - 1], torch.from_numpy(made[CachePlace(PieceKind.ROWS, 1)][:-1])
    )
    assert not by_row[TOKENS - 1 :].any()
    keys = reader.read(
        CachePlace(PieceKind.INDEX_KEYS, 1), blocks, range(3, 4), token_count=TOKENS - 1
    )
    assert not keys[0, 16 * 128 : 64 * 128].any()
    assert not keys[0, 64 * 128 + 16 * 4 :].any()


@pytest.mark.parametrize(("block_rows", "tensor_rows"), [(64, 64), (48, 16)])
def test_scales_of_rows_are_rounded_so_that_all_kernels_read_the_same_values(
    block_rows: int, tensor_rows: int
) -> None:
    """FlashMLA multiplies codes by scales in bfloat16, our own kernels in float32."""
    place, blocks, made = (
        CachePlace(PieceKind.ROWS, 2),
        shuffled(TOKENS, block_rows),
        contents(TOKENS),
    )
    scales = made[place][:, 512:528].view(np.float32)
    scales *= np.random.default_rng(7).uniform(1.0, 2.0, scales.shape).astype(np.float32)
    scales[3, 1] = np.nan
    reader = BlockReader(LAYOUT, tensors_of(made, blocks, tensor_rows))
    read = reader.read(place, blocks, PAGES, token_count=TOKENS).reshape(-1, 656)[:TOKENS]
    sent, held = read.numpy(), made[place]
    assert np.array_equal(sent[:, :512], held[:, :512])
    assert np.array_equal(sent[:, 528:], held[:, 528:])
    before, after = (
        torch.from_numpy(rows[:, 512:528].copy().view(np.float32)) for rows in (held, sent)
    )
    assert torch.equal(after.nan_to_num(0.0), before.bfloat16().float().nan_to_num(0.0))
    assert (torch.isnan(after) == torch.isnan(before)).all()
    codes = torch.from_numpy(e4m3_decode(sent[:, :512])).view(TOKENS, 4, 128)

    def by_flash_mla(scales: torch.Tensor) -> torch.Tensor:
        return (codes.bfloat16() * scales.bfloat16()[..., None]).nan_to_num(0.0)

    def by_ours(scales: torch.Tensor) -> torch.Tensor:
        return (codes * scales[..., None]).bfloat16().nan_to_num(0.0)

    assert torch.equal(by_flash_mla(after), by_ours(after))
    assert torch.equal(by_flash_mla(after), by_flash_mla(before))
    assert not torch.equal(by_ours(after), by_ours(before))


def test_keys_are_turned_where_the_layout_turns_them() -> None:
    """vLLM encodes keys as they are. Turned, they are what our encoder makes of the turned key."""
    place, blocks = CachePlace(PieceKind.INDEX_KEYS, 0), shuffled(TOKENS, 64)
    made = contents(TOKENS)
    turning = replace(LAYOUT, index=replace(KEYS, hadamard=True))
    reader = BlockReader(turning, tensors_of(made, blocks, 64))
    page = reader.read(place, blocks, range(1), token_count=TOKENS)[0].numpy()
    records = made[place][:64]
    plain = e4m3_decode(records[:, :128]) * records[:, 128:].copy().view(np.float32)
    wanted = codec.encode_keys(hadamard(torch.from_numpy(plain)).numpy(), KEYS)
    assert np.array_equal(page[: 64 * 128].reshape(64, 128), wanted.values)
    assert np.array_equal(page[64 * 128 :].view(np.float32), wanted.scales)


def test_names_say_what_a_tensor_holds() -> None:
    for place in all_places(LAYOUT):
        assert place_of(name_of(place), LAYOUT) == place
    assert place_of("model.layers.3.mtp_block.self_attn.attn", LAYOUT).layer == 3
    for name, wrong in (
        ("model.embed", "names no layer"),
        ("model.layers.4.self_attn.attn", "layer 4 is outside"),
        ("model.layers.1.self_attn.indexer.k_cache", "layer 1 .* has no indexer"),
    ):
        with pytest.raises(BadInput, match=wrong):
            place_of(name, LAYOUT)


def test_tensors_that_are_no_such_cache_are_refused_by_name() -> None:
    blocks, made = shuffled(TOKENS, 64), contents(TOKENS)
    tensors = tensors_of(made, blocks, 64)
    short = dict(tensors)
    del short["model.layers.3.self_attn.indexer.k_cache"]
    with pytest.raises(BadInput, match=r"no cache for 1 of 6 layers .*INDEX_KEYS"):
        BlockReader(LAYOUT, short)
    plain = {"model.layers.0.self_attn.attn": torch.zeros((4, 64, 576), dtype=torch.bfloat16)}
    with pytest.raises(BadInput, match=r"layers\.0.*bfloat16 \(4, 64, 576\).*fp8_ds_mla"):
        BlockReader(LAYOUT, tensors | plain)
    gaps = tensors["model.layers.0.self_attn.attn"][:, ::2]
    with pytest.raises(BadInput, match="gaps inside a block"):
        BlockReader(LAYOUT, tensors | {"model.layers.0.self_attn.attn": gaps})


def test_blocks_may_lie_apart_and_have_a_dimension_of_one_head() -> None:
    """One allocation for several layers: a layer's blocks lie a stride apart."""
    place, blocks = CachePlace(PieceKind.ROWS, 0), shuffled(TOKENS, 64)
    records = contents(TOKENS)[place]
    tensor = tensor_of(place, records, blocks, 64)
    apart = torch.full((len(tensor), 3, 64, 1, 656), FOREIGN, dtype=torch.uint8)
    apart[:, 1] = tensor.unsqueeze(2)
    tensors = tensors_of(contents(TOKENS), blocks, 64)
    reader = BlockReader(LAYOUT, tensors | {name_of(place): apart[:, 1]})
    rows = reader.read(place, blocks, PAGES, token_count=TOKENS).reshape(-1, 656)
    assert torch.equal(rows[:TOKENS], torch.from_numpy(records))


def test_a_prompt_longer_than_its_blocks_is_refused() -> None:
    reader = BlockReader(LAYOUT, tensors_of(contents(TOKENS), shuffled(TOKENS, 64), 64))
    short = Blocks(np.array([0, 1]), 64)
    with pytest.raises(BadInput, match="tokens up to 209 in 2 blocks of 64"):
        reader.read(CachePlace(PieceKind.ROWS, 0), short, PAGES, token_count=TOKENS)
