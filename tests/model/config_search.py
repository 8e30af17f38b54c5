"""Configurations drawn from seeds: transformers' logits, and engines that say what our model says.

    python -m tests.model.config_search --seeds 300
    python -m tests.model.config_search --first 17 --seeds 1 --family glm_moe_dsa

A seed stands for a family, for odd sizes and other words of its config.json, and for an engine.
What either side refuses is counted. A seed fails where logits differ for several texts, for one
text may hang on a selection that rounding decides, or where the engine's tokens are not the plain
model's.

Equal scores are kept out: with few index heads many scores are zero, and where the first layer
turns nothing, the same token has the same score everywhere.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from ess.door import Offload
from ess.engine.engine import Engine, EngineConfig
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.models.compressed import plain as compressed_plain
from ess.models.compressed.model import CompressedModel
from ess.models.families import deepseek_v4 as compressed_family
from ess.models.model import Model
from ess.models.plain import Plain
from ess.models.registry import read_config
from tests.compressed import world as compressed_world
from tests.model.grid import slot_bytes
from tests.support import checkpoints
from tests.support.greedy import greedy
from tests.support.manual_lane import ManualLane

Raw = dict[str, Any]
LENGTH: Final = 90
PIECES: Final = [70, 1, 1, 1, 5, 12]
TOLERANCE: Final = 2e-4
TEXTS: Final = 4
PROMPT, MADE = 70, 10
EPS: Final = {"deepseek_v32": 1e-6, "glm_moe_dsa": 1e-6, "axk2": 1e-6, "hy_v4": 1e-6}
"""Of the norms on the two latents, in transformers; elsewhere the model's."""


def sizes(draw: random.Random) -> Raw:
    """Odd ones, and those at which something ends."""
    heads = draw.choice((1, 2, 3, 5, 8))
    groups = draw.choice((1, 1, 2, 4))
    experts = groups * draw.choice((2, 3, 5))
    kept = draw.randint(1, groups)
    chosen = draw.randint(1, min(kept * experts // groups, 6))
    return {
        "hidden_size": draw.choice((40, 64, 104, 136)),
        "intermediate_size": draw.choice((32, 72, 136)),
        "moe_intermediate_size": draw.choice((8, 16, 40)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw.choice((8, 24, 33, 96)),
        "kv_lora_rank": draw.choice((16, 50, 64, 132, 512)),
        "qk_rope_head_dim": draw.choice((2, 6, 16, 30, 64)),
        "qk_nope_head_dim": draw.choice((5, 16, 32, 70)),
        "v_head_dim": draw.choice((3, 16, 33, 64)),
        "index_head_dim": draw.choice((64, 96, 128, 64)),
        "index_n_heads": draw.choice((12, 16, 20, 64)),
        "index_topk": draw.choice((1, 2, 5, 16, 63, 64, 65, 128)),
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": chosen,
        "n_shared_experts": draw.choice((0, 1, 1, 2)),
        "norm_topk_prob": draw.random() < 0.7,
        "routed_scaling_factor": draw.choice((1.0, 2.5, 0.3)),
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": draw.random() < 0.3,
        "vocab_size": draw.choice((65, 128, 131)),
    }


def rope(draw: random.Random) -> Raw:
    theta = draw.choice((10000.0, 500.0, 1e6))
    if draw.random() < 0.3:
        return {"rope_type": "default", "rope_theta": theta}
    yarn: Raw = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": draw.choice((1.0, 4.0, 40)),
        "original_max_position_embeddings": draw.choice((4, 32, 64, 1024)),
        "beta_fast": draw.choice((32, 8, 1)),
        "beta_slow": draw.choice((1, 2.5, 4)),
        "mscale": draw.choice((1.0, 0.707, 0)),
        "mscale_all_dim": draw.choice((1.0, 0.707, 0)),
        "truncate": draw.random() < 0.7,
    }
    if draw.random() < 0.3:
        yarn["attention_factor"] = draw.choice((0.75, 1.25))
    kept = [*yarn][:4] + [name for name in [*yarn][4:] if draw.random() < 0.5]
    return {name: yarn[name] for name in kept}


def layers(draw: random.Random, count: int) -> Raw:
    said: Raw = {"num_hidden_layers": count}
    if draw.random() < 0.5:
        said["first_k_dense_replace"] = draw.choice((0, 1, count - 1, count + 3))
    else:
        said["mlp_layer_types"] = [draw.choice(("dense", "sparse")) for _ in range(count)]
    return said


def indexers(draw: random.Random, count: int) -> Raw:
    if draw.random() < 0.5:
        freq = draw.randint(1, count)
        return {"index_topk_freq": freq, "index_skip_topk_offset": draw.randint(0, count)}
    kinds = ["full", *(draw.choice(("full", "shared")) for _ in range(count - 1))]
    return {"indexer_types": kinds}


def deepseek_v32(draw: random.Random) -> Raw:
    count = draw.randint(1, 4)
    base = {key: checkpoints.TINY_V32[key] for key in checkpoints.TINY_V32 if "rope_s" not in key}
    said = {"rope_parameters": rope(draw), "num_nextn_predict_layers": draw.choice((0, 1))}
    base.pop("rope_theta")
    return {**base, **sizes(draw), **layers(draw, count), **said}


def glm_moe_dsa(draw: random.Random) -> Raw:
    count = draw.randint(1, 5)
    more = {**layers(draw, count), **indexers(draw, count), "rope_parameters": rope(draw)}
    base = checkpoints.TINY_GLM.items()
    kept = {key: value for key, value in base if key not in ("index_topk_freq",)}
    kept.pop("index_skip_topk_offset")
    more["num_nextn_predict_layers"] = draw.choice((0, 1))
    return {**kept, **sizes(draw), **more}


def axk2(draw: random.Random) -> Raw:
    base = {key: checkpoints.TINY_AXK2[key] for key in checkpoints.TINY_AXK2 if "rope_s" not in key}
    base.pop("rope_theta")
    more = {"gated_norm_rank": draw.choice((1, 3, 16)), "rope_parameters": rope(draw)}
    return {**base, **sizes(draw), **layers(draw, draw.randint(1, 3)), **more}


def hy_v4(draw: random.Random) -> Raw:
    count = draw.randint(1, 4)
    more = {**layers(draw, count), **indexers(draw, count), "rope_parameters": rope(draw)}
    more |= {"hc_mult": draw.choice((2, 3, 5)), "swiglu_limit": draw.choice((0.3, 1.0, 7.0))}
    base = checkpoints.TINY_HY4.items()
    kept = {key: value for key, value in base if not key.startswith(("index_topk_f", "index_sk"))}
    return {**kept, **sizes(draw), **more}


def mistral_large4(draw: random.Random) -> Raw:
    count = draw.randint(1, 5)
    base = checkpoints.TINY_MISTRAL4["text_config"]
    drawn = {key: value for key, value in sizes(draw).items() if key != "q_lora_rank"}
    kinds = ["full", *(draw.choice(("full", "shared")) for _ in range(count - 1))]
    more = {
        "indexer_types": kinds,
        "norm_topk_prob": True,
        "final_logit_softcapping": draw.choice((2.0, 30.0)),
        "no_rope_layers": [1, *(draw.randint(0, 1) for _ in range(count - 1))],
    }
    yarn = {**base["rope_parameters"], "factor": draw.choice((1.0, 8.0, 32.0))}
    more["rope_parameters"] = yarn
    return checkpoints.of_text({**base, **drawn, **layers(draw, count), **more})


def dots3(draw: random.Random) -> Raw:
    count = draw.randint(1, 6)
    drawn = sizes(draw)
    drawn["n_shared_experts"] = max(1, drawn["n_shared_experts"])
    heads = draw.choice((1, 2, 5))
    local = {
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": heads,
        "swa_q_lora_rank": draw.choice((16, 40)),
        "swa_kv_lora_rank": draw.choice((16, 64, 256)),
        "swa_qk_nope_head_dim": draw.choice((5, 16)),
        "swa_qk_rope_head_dim": drawn["qk_rope_head_dim"],
        "swa_v_head_dim": draw.choice((8, 24)),
        "sliding_window": draw.randint(1, drawn["index_topk"]),
        "shared_experts_intermediate_size": draw.choice((16, 64)),
    }
    local["swa_head_dim"] = local["swa_qk_nope_head_dim"] + local["swa_qk_rope_head_dim"]
    kinds = ["full_attention", "sliding_attention"]
    local["layer_types"] = [draw.choice(kinds) for _ in range(count - 1)] + kinds[:1]
    local["head_dim"] = drawn["qk_nope_head_dim"] + drawn["qk_rope_head_dim"]
    return {**checkpoints.TINY_DOTS3, **drawn, **layers(draw, count), **local}


def glm5_next(draw: random.Random) -> Raw:
    kinds = "".join(draw.choice("LI") for _ in range(draw.randint(0, 4))) + "I"
    drawn = {key: value for key, value in sizes(draw).items() if "rope" not in key}
    pool = draw.choice((1, 2, 4, 8, 16))
    drawn |= {
        "index_kpool": pool,
        "index_topk": pool * draw.choice((1, 2, 4, 9)),
        "hc_mult": draw.choice((1, 2, 3)),
        "linear_num_heads": draw.choice((1, 2, 3)),
        "linear_head_dim": draw.choice((8, 16, 24)),
        "linear_conv_kernel_dim": draw.choice((2, 3, 4)),
        "mlp_layer_types": [draw.choice(("dense", "sparse")) for _ in kinds],
    }
    return checkpoints.tiny_glm5_next(kinds, **drawn)


def deepseek_v4(draw: random.Random) -> Raw:
    """Entries of few tokens, so that a text of 90 has many."""
    count, groups = draw.randint(1, 5), draw.choice((1, 2, 3))
    experts, rope_dim = draw.choice((2, 3, 8)), draw.choice((2, 6, 8, 16))
    kinds, routings = [*compressed_family.KINDS], [*compressed_family.ROUTINGS]
    _, sparse, heavy = kinds
    yarn = {"rope_type": "yarn", "factor": draw.choice((1.0, 4.0, 16.0))}
    yarn["original_max_position_embeddings"] = draw.choice((32, 64, 1024))
    return {
        **compressed_world.TINY,
        "vocab_size": draw.choice((65, 96, 131)),
        "hidden_size": draw.choice((40, 64, 104)),
        "moe_intermediate_size": draw.choice((8, 32, 40)),
        "num_hidden_layers": count,
        "num_attention_heads": groups * draw.choice((1, 2, 3)),
        "head_dim": rope_dim + draw.choice((2, 8, 24, 32)),
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": draw.choice((8, 33, 64)),
        "o_groups": groups,
        "o_lora_rank": draw.choice((3, 16, 40)),
        "n_routed_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "routed_scaling_factor": draw.choice((1.0, 1.5, 0.3)),
        "rms_norm_eps": draw.choice((1e-6, 1e-2)),
        "swiglu_limit": draw.choice((0.3, 1.0, 10.0)),
        "index_n_heads": draw.choice((12, 16, 64)),
        "index_head_dim": draw.choice((16, 64, 128)),
        "index_topk": draw.choice((1, 2, 3, 16)),
        "sliding_window": draw.choice((1, 2, 5, 6, 20)),
        "hc_mult": draw.choice((2, 3, 4)),
        "hc_sinkhorn_iters": draw.choice((1, 5, 20)),
        "layer_types": [sparse, *(draw.choice(kinds) for _ in range(count - 1))],
        "compress_rates": {
            sparse: draw.choice((1, 2, 4, 8)),
            heavy: draw.choice((1, 2, 8, 16, 32)),
        },
        "mlp_layer_types": [draw.choice(routings) for _ in range(count)],
        "num_nextn_predict_layers": draw.choice((0, 1)),
        "rope_theta": draw.choice((500.0, 10000.0)),
        "compress_rope_theta": draw.choice((500.0, 160000.0)),
        "rope_parameters": draw.choice((yarn, {"rope_type": "default"})),
    }


FAMILIES: Final[dict[str, Callable[[random.Random], Raw]]] = {
    each.__name__: each
    for each in (
        *(deepseek_v32, glm_moe_dsa, axk2, hy_v4, mistral_large4, dots3, glm5_next),
        deepseek_v4,
    )
}


def made(family: str, raw: Raw) -> Any:
    """The model, of drawn weights."""
    if family != "deepseek_v4":
        return checkpoints.model(raw, latent_norm_eps=EPS.get(family))
    config = read_config(raw)
    return CompressedModel(config, compressed_world.weights(config).__getitem__)


def stored(model: Any) -> dict[str, torch.Tensor]:
    """Its weights by the names that a checkpoint has."""
    if isinstance(model, CompressedModel):
        return compressed_world.published(compressed_world.weights(model.config))
    return checkpoints.published(checkpoints.tensors(model.config), model.config)


def logits_of(model: Any, text: list[int]) -> torch.Tensor:
    if isinstance(model, CompressedModel):
        return compressed_plain.Plain(model).run(text)
    return Plain(model).run(text).logits


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / max(1.0, float(theirs.abs().max())))


class Refused(Exception):
    """By transformers, which computes no logits."""


def unlike_transformers(family: str, raw: Raw, model: Model, folder: Path) -> str:
    """A sentence where logits of the same tokens differ."""
    from tests.support.oracle import Oracle

    least, oracle = float("inf"), None
    for seed in range(TEXTS):
        text = checkpoints.tokens(LENGTH, model.config.vocab_size, seed=seed)
        ours = logits_of(model, text)
        try:
            oracle = oracle or Oracle(folder, raw, stored(model))
            theirs = oracle.logits(text, PIECES)
        except (ValueError, TypeError, RuntimeError, KeyError) as error:
            raise Refused(f"transformers: {type(error).__name__}: {error!s:.100}") from error
        least = min(least, far(ours, theirs))
        if least < TOLERANCE:
            return ""
    return f"logits of {family} are {least:.2g} from those of transformers, {TEXTS} texts alike"


def unlike_plain(model: Model, draw: random.Random) -> str:
    """A sentence where an engine says other tokens than the plain model."""
    mtp = draw.choice((1, 2, 4)) if model.config.mtp_layer_count else 1
    layout = model.config.layout(row="f32", index="f32", has_mtp=mtp > 1)
    offload = Offload.create(
        layout,
        slot_bytes=slot_bytes(layout, draw.choice(("ample", "tight", "tight"))),
        host_bytes=20 * layout.host_page_bytes,
        length_max=256,
        slot_floor=min(24, layout.top_k),
        lane=ManualLane(seed=1, delay_max=3),
        poison=True,
    )
    has_stages = not isinstance(model, CompressedModel)
    settings = EngineConfig(
        modes=draw.choice(("resident", "none", "da", "dba", "layerwise")),
        mtp=mtp,
        tbo=draw.choice(("off", "on") if has_stages else ("off",)),
        sbo=draw.choice(("off", "combine-down", "dispatch-shared") if has_stages else ("off",)),
        depth=draw.choice((0, 1)),
        chunk_tokens=draw.choice((7, 32, 64, 96)),
    )
    engine, unlike = Engine(model, offload, settings), ""
    try:
        for seed in range(TEXTS):
            prompt = checkpoints.tokens(PROMPT, model.config.vocab_size, seed=seed)
            request = engine.add(prompt, Sampling(tokens_max=MADE, ignore_eos=True))
            for _ in engine.run():
                offload.check()
            wanted = greedy(model, prompt, MADE)
            if request.output == wanted:
                return ""
            unlike = f"{settings} says {request.output}, not {wanted}, of text {seed}"
        return unlike
    finally:
        engine.close()
        offload.close()


def tried(seed: int, family: str, folder: Path) -> tuple[str, str]:
    """What became of a seed in a word, and why it fails."""
    draw = random.Random(seed)
    raw = FAMILIES[family](draw)
    try:
        model = made(family, raw)
        model.config.layout(row="f32", index="f32")
    except BadInput as refusal:
        return f"refused: {str(refusal).partition(': ')[2]}", ""
    try:
        unlike = unlike_transformers(family, raw, model, folder)
    except Refused as refusal:
        return str(refusal), ""
    unlike = unlike or unlike_plain(model, draw)
    return ("differs" if unlike else "same"), unlike and f"{unlike}: {raw}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--family", choices=FAMILIES, action="append")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    families, seen = asked.family or [*FAMILIES], Counter[str]()
    failed, began_s = 0, time.monotonic()
    for seed in range(asked.first, asked.first + asked.seeds):
        family = families[seed % len(families)]
        folder = Path(tempfile.mkdtemp())
        try:
            word, why = tried(seed, family, folder)
        except Exception as error:  # a search reports any failure and goes on
            word, why = "crashes", f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder)
        seen[word] += 1
        failed += bool(why)
        if why:
            print(f"seed {seed}, {family}: {why}", flush=True)
    for word, count in seen.most_common():
        print(f"{count:>5} {word}")
    print(f"{asked.seeds:,} seeds, {failed} failed, {time.monotonic() - began_s:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
