"""DeepSeek-V4's configuration: both spellings, what is refused, what a request takes of memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ess.errors import BadInput
from ess.models.compressed.form import state_form
from ess.models.compressed.gain import Machine, gain, read_bytes
from ess.models.compressed.memory import entry_bytes, needs
from ess.models.registry import build, read_config
from ess.models.weights.__main__ import main
from ess.models.weights.expected.dry_run import make_plan
from ess.models.weights.expected.dry_run import read_config as published
from ess.models.weights.expected.shapes import expected_tensors
from tests.compressed import world

FLASH = "deepseek-v4-flash"


def flash() -> Any:
    return read_config(published(FLASH))


def test_both_spellings_say_the_same() -> None:
    """transformers writes the second when it reads the first."""
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    listed = {0: kinds[0], 4: kinds[1], 128: kinds[2]}
    old = published(FLASH)
    new = {key: value for key, value in old.items() if key not in ("compress_ratios", "rope_theta")}
    yarn = {key: old["rope_scaling"][key] for key in old["rope_scaling"] if key != "type"}
    new |= {
        "layer_types": [listed[ratio] for ratio in old["compress_ratios"][:43]],
        "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 40,
        "compress_rates": {kinds[1]: 4, kinds[2]: 128},
        "partial_rotary_factor": 0.125,
        "rope_scaling": None,
        "num_hash_layers": None,
        "qk_rope_head_dim": None,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": {
                **yarn,
                "rope_type": "yarn",
                "rope_theta": 160000,
                "partial_rotary_factor": 0.125,
                "attention_factor": 1.0,
            },
        },
    }
    assert read_config(new) == read_config(old)


def test_layers_that_no_list_names() -> None:
    """As transformers builds them."""
    raw = {key: value for key, value in world.RATIOS.items() if key != "compress_ratios"}
    assert read_config(raw).compressed.kinds == (  # type: ignore[union-attr]
        *("heavy", "heavy", "heavy", "sparse", "heavy", "window"),
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"compress_ratios": [0, 128, 4, 2, 128]}, r"compress_ratios has 2, expected one of .0, 4, 12"),
    ({"compress_ratios": [0, 128, 4]}, "compress_ratios is .0, 128, 4., expected one of"),
    ({"compress_ratios": "4"}, "compress_ratios is '4'"),
    ({"compress_ratios": [[4]] * 5}, "compress_ratios has .4., expected one of"),
    ({"compress_ratios": [False, 128, 4, 4, 4]}, "compress_ratios has False"),
    ({"layer_types": ["full_attention"] * 5}, "layer_types has 'full_attention', expected"),
    (
        {"layer_types": ["sliding_attention"] * 5},
        "layer_types and compress_ratios say different layers",
    ),
    ({"mlp_layer_types": ["dense"] * 5}, "mlp_layer_types has 'dense', expected one of"),
    ({"num_hash_layers": -1}, "num_hash_layers is -1, expected a count of layers"),
    ({"num_hash_layers": "3"}, "num_hash_layers is '3'"),
    (
        {"compress_ratios": [0, 128, 4, 4, 128, 4]},
        "compress_ratios has 4 for the MTP module, which",
    ),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers`, got -1"),
    ({"num_hidden_layers": 9}, "compress_ratios is .* expected one of"),
    ({"num_hidden_layers": "x"}, "num_hidden_layers`, got 'x'"),
    ({"num_hidden_layers": 1 << 40}, "num_hidden_layers`, got 1099511627776"),
    ({"head_dim": 0}, "head_dim is 0, expected a positive whole number"),
    ({"head_dim": 8}, "qk_rope_head_dim 8 does not fit head_dim 8"),
    ({"qk_rope_head_dim": "8"}, "qk_rope_head_dim '8' does not fit head_dim 32"),
    ({"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 of head_dim 32 is not qk_r"),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor is 2, expected a share"),
    ({"num_key_value_heads": 2}, "num_key_value_heads 2 is not 1"),
    ({"o_groups": 3}, "o_groups 3 does not divide 4 heads of 32"),
    ({"o_groups": 0}, "o_groups"),
    ({"o_lora_rank": "x"}, "o_lora_rank`, got"),
    ({"sliding_window": 0}, "sliding_window`, got"),
    ({"sliding_window": 1}, "sliding_window 1 is not supported, only windows of several"),
    ({"hc_sinkhorn_iters": 0}, "hc_sinkhorn_iters`, got"),
    ({"hc_mult": 0}, "hc_mult`, got 0"),
    ({"compress_rates": 4}, "compress_rates is 4, expected an object"),
    ({"compress_rate_csa": 0}, "compress_rate_csa`, got"),
    ({"scoring_func": "softmax"}, 'scoring_func "softmax" is not supported, only "sqrtsoftplus"'),
    ({"norm_topk_prob": False}, "norm_topk_prob false is not supported"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings true is not supported"),
    ({"expert_dtype": "int3"}, "expert_dtype`, got"),
    ({"quantization_config": {"expert_dtype": "int3"}}, "expert_dtype`, got"),
    ({"rope_scaling": [1]}, "rope_scaling is .1., expected an object"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling has no factor, which yarn needs"),
    ({"rope_scaling": {"type": "llama3"}}, "rope_type"),
    ({"rope_scaling": {"rope_theta": 5}}, "rope_theta of rope_scaling differs from rope_theta 10"),
    ({"rope_scaling": {"odd": 5}}, "odd in rope_scaling is not supported"),
    (
        {"rope_scaling": None, "rope_parameters": {"main": {}, "compress": {}}},
        "partial_rotary_factor 1 does not make 8 dimensions",
    ),
    ({"compress_rope_theta": -1}, "rope_theta`, got -1"),
    ({"rope_theta": "x"}, "rope_theta`, got"),
    ({"attention_bias": True}, "attention_bias true is not supported"),
    ({"auto_map": {"x": "y"}}, "auto_map runs code from the checkpoint"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_not_computed_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput, match=said) as refusal:
        read_config({**world.RATIOS, **change})
    assert str(refusal.value).startswith("config.json of deepseek_v4: ")


def test_what_the_pools_are_told() -> None:
    """Of the published sizes: entries of the layers whose indexer chooses, a state, and beside it
    two entries of 128 tokens in each of 20 layers for 256 tokens."""
    config = flash()
    layout = config.layout(row="bf16")
    assert (layout.layer_count, layout.row_tokens, layout.page_tokens) == (21, 4, 256)
    assert (layout.row_bytes, layout.top_k, layout.slot_floor) == (1024, 512, 1600)
    assert layout.state_page_bytes == 2 * 20 * 512 * 4
    assert layout.index is not None
    assert layout.index.form == "fp8"
    for modules, verified in ((1, 4), (0, 1)):
        config = msgspec.structs.replace(config, mtp_layer_count=modules)
        layout = config.layout(row="bf16")
        form = state_form(config, drafts=verified)
        assert layout.verified_max == verified
        assert layout.state_bytes == form.byte_count == 4 * (512 + form.values)
        windows = [field.lines for field in form.fields if field.name == "window"]
        assert windows == [127 + verified] * (43 + modules)


def test_rows_in_fp8_are_as_published() -> None:
    """448 codes, 64 values that are turned, 7 scales and a byte."""
    layout = flash().layout(row="fp8")
    assert (layout.row.form, layout.row_bytes, layout.row.scale_count) == ("fp8_64", 584, 7)
    assert layout.row_bytes == entry_bytes(flash())


def test_what_drafts_in_another_way_is_served_without_drafts() -> None:
    """Several modules, or DSpark's: nothing of them is read."""
    config = read_config(world.RATIOS)
    assert (config.mtp_layer_count, config.unread_prefixes) == (1, ("mtp.0.emb.", "mtp.0.head."))
    for more in ({"num_nextn_predict_layers": 3}, {"dspark_block_size": 5}):
        config = read_config({**world.RATIOS, **more})
        assert (config.mtp_layer_count, config.unread_prefixes) == (0, ("mtp.",))
        assert not any(spec.name.startswith("mtp.") for spec in expected_tensors(config))


def test_the_module_s_tensors_are_as_many_as_published() -> None:
    """1,575 names of `mtp.0.`, scales among them."""
    whole, without = (make_plan(published(FLASH), mtp=mtp).whole.tensors for mtp in (True, False))
    assert whole - without == 1575


def test_what_cannot_lie_in_pages_is_refused() -> None:
    odd = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 100}
    with pytest.raises(BadInput, match="entries of 100 tokens do not divide a page of 256 tokens"):
        read_config({**world.LISTED, "compress_rates": odd}).layout(row="f32")
    plain = {**world.LISTED, "layer_types": ["sliding_attention"] * 5}
    with pytest.raises(BadInput, match="no layer has an indexer that chooses entries"):
        read_config(plain).layout(row="f32")
    for dim, rope_dim in ((35, 8), (3, 2)):
        other = {**world.LISTED, "head_dim": dim, "qk_rope_head_dim": rope_dim}
        with pytest.raises(BadInput, match=f"head_dim {dim} is no even number from 4 on"):
            read_config(other).layout(row="f32")


def test_it_is_built_whole() -> None:
    config = read_config(world.LISTED)
    with pytest.raises(BadInput, match="its layers, heads and experts are not divided yet"):
        build(config, {}.__getitem__, tp=2)


def test_the_published_configuration_counts_what_transformers_makes_of_it() -> None:
    """`test_oracle` counts theirs."""
    raw = {**published(FLASH), "quantization_config": None, "expert_dtype": None}
    assert make_plan(raw, mtp=False).whole.values == 284_334_567_511


def test_a_request_of_the_true_sizes() -> None:
    """In bytes that anybody can add up."""
    config = flash()
    assert entry_bytes(config) == 448 + 2 * 64 + 7 + 1 == 584
    sparse, heavy = 8 * 2 * 1024 + 8 * 2 * 256, 128 * 2 * 512
    alone = state_form(config, drafts=0).bytes_of(value_bytes=2, row_bytes=584)
    assert alone == 2 * (21 * sparse + 20 * heavy) + 44 * 127 * 584 == 9_366_432
    entries = 131_072 // 4
    asked = needs(config, tokens=131_072, drafts=0)
    resident = 21 * entries * (584 + 132) + 20 * 1024 * 584 + alone
    assert asked.resident == resident
    assert asked.host == 21 * entries * (584 + 132)
    slots = 21 * 1600 * 584
    assert asked.offloaded == 21 * entries * 136 + slots + 20 * 1024 * 584 + alone
    assert round(asked.resident / asked.offloaded, 1) == 3.8


def test_drafts_are_a_line_of_each_ring() -> None:
    config = read_config(world.LISTED)
    none, some = (state_form(config, drafts=drafts) for drafts in (0, 3))
    assert [b.lines - a.lines for a, b in zip(none.fields, some.fields, strict=True)] == [3] * 12
    with pytest.raises(BadInput, match="-1 drafts"):
        state_form(config, drafts=-1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kinds": ["odd"]}, type(config.compressed))


def test_where_offload_pays() -> None:
    """Short contexts fit resident, and their misses are as dear as those of long ones."""
    plan = make_plan(published(FLASH), ep=8)
    room = (139 << 30) - plan.rank.bytes
    machine = Machine(room_bytes=room, weight_bytes=plan.rank.bytes)
    gains = {k: gain(plan.config, machine, tokens=k << 10) for k in (8, 32, 128, 512, 1024)}
    assert [each.batch_resident for each in gains.values()] == [2955, 894, 236, 59, 30]
    assert [each.batch_offloaded for each in gains.values()] == [3395, 2185, 901, 268, 138]
    shares = [round(each.break_even, 2) for each in gains.values()]
    assert shares == [0.0, 0.03, 0.14, 0.61, 1.2]
    for each in gains.values():
        assert each.at(each.break_even) == pytest.approx(1.0)
        assert each.at(0.0) > each.at(0.1)
    with pytest.raises(BadInput, match="hold no request of 1,048,576 tokens"):
        gain(plan.config, Machine(room_bytes=10, weight_bytes=1), tokens=1 << 20)


def test_a_step_reads_what_its_layers_attend_to() -> None:
    """Of 100 tokens: 25 entries and keys in 21 layers, no entry of 128, 100 rows in each layer and
    in the MTP module."""
    config = flash()
    assert read_bytes(config, tokens=100) == 21 * 25 * (132 + 584) + 44 * 100 * 584
    chosen, heavy = 21 * 512 * 584, 20 * 1024 * 584
    keys, windows = 21 * 32_768 * 132, 44 * 128 * 584
    assert read_bytes(config, tokens=131_072) == keys + chosen + heavy + windows


def test_the_dry_run_says_what_a_request_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", FLASH, "--ep", "8"]) == 0
    said = capsys.readouterr().out
    assert "entries    584 bytes: of 4 tokens in 21 layers" in said
    assert "state      9,540,608 bytes a request" in said
    assert "901 such contexts at the floor, 236 resident" in said
    assert "offload    by bytes alone: 1.61 times the tokens a second" in said
    assert main(["--dry-run", FLASH, "--ep", "8", "--device", "30GiB", "--ctx", "1m"]) == 0
    assert "offload    by bytes" in capsys.readouterr().out
    assert main(["--dry-run", FLASH, "--ep", "8", "--device", "28GiB", "--ctx", "1m"]) == 0
    assert "offload    by bytes" not in capsys.readouterr().out


ODD: list[Any] = ["x", "", -1, 0, 1, 3, True, 1e99, float("nan"), [], {}, [[]], [1, "a"], 1 << 70]
ODD += [{"main": 1}, {"main": {}, "compress": {"rope_theta": []}}, {"type": []}]
LATE = (
    *("head_dim", "compress_rates", "expert_dtype", "quantization_config", "num_hash_layers"),
    *("partial_rotary_factor", "rope_parameters", "rope_scaling", "compress_rate_csa"),
    *("mlp_layer_types", "layer_types", "max_position_embeddings"),
)


def refusal(raw: dict[str, Any]) -> str:
    try:
        read_config(raw)
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("spelling", world.SPELLINGS)
def test_whatever_a_file_says_is_read_or_refused(spelling: str) -> None:
    raw = world.SPELLINGS[spelling]
    names = {*raw, *LATE} - {"model_type"}
    said = [refusal({**raw, name: value}) for name in names for value in ODD]
    assert sum(map(bool, said)) > 200
    assert max(map(len, said)) < 300
