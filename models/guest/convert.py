"""From a guest's GGUF file to an ordinary checkpoint folder: safetensors and JSON.

Weights are dequantised and kept in float32: bfloat16 would change what the model computes. The
file's own integers, if it has any, are kept beside them (`codes`). Queries and keys are stored
there with their rotary pairs side by side; Llama's checkpoints have them half a head apart, so they
are put back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from ess.errors import BadInput
from ess.models.guest import codes
from ess.models.guest.codes import Codes
from ess.models.guest.heads import Heads, indexer_tensors
from ess.models.guest.packed import Floats, Packed
from ess.models.guest.pins import Guest
from ess.models.guest.vocabulary import tokenizer_json

TOP_K: Final = 2048
LAYERS_MAX: Final = 256
SIDE_MAX: Final = 1 << 16
_ATTENTION: Final = {
    **{f"{side}_proj": f"attn_{side}" for side in "qkv"},
    "o_proj": "attn_output",
}
_MLP: Final = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}


def convert(guest: Guest, source: Path, into: Path, heads: Path) -> None:
    """Into a folder that is there and empty."""
    from safetensors.numpy import save_file

    packed = Packed(source)
    config = _config(packed, guest)
    tensors = dict(_outside(packed, config))
    for layer, indexer in enumerate(Heads(heads).layers(config["num_hidden_layers"])):
        tensors.update(_layer(packed, config, layer))
        prefix = f"model.layers.{layer}.self_attn."
        tensors.update(indexer_tensors(indexer, tensors[f"{prefix}k_proj.weight"], prefix))
    save_file(tensors, into / "model.safetensors", {"format": "pt"})
    codes.write(into, dict(_coded(packed, config)))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", _generation(guest)),
        ("tokenizer.json", tokenizer_json(packed, config["vocab_size"])),
        ("tokenizer_config.json", _tokenizer_config(packed)),
    ):
        (into / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _config(packed: Packed, guest: Guest) -> dict[str, Any]:
    architecture = packed.text("general.architecture")
    if architecture != "llama":
        raise BadInput(f"a GGUF file of architecture {architecture!r:.40}; only 'llama' is read")
    heads = packed.count("llama.attention.head_count", 1024)
    hidden = packed.count("llama.embedding_length", SIDE_MAX)
    dim = packed.count("llama.rope.dimension_count", 1024)
    if heads * dim != hidden:
        raise BadInput(f"{heads} heads of {dim} turned values are not {hidden} hidden ones")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": packed.count("llama.vocab_size", 1 << 20),
        "hidden_size": hidden,
        "intermediate_size": packed.count("llama.feed_forward_length", SIDE_MAX),
        "num_hidden_layers": packed.count("llama.block_count", LAYERS_MAX),
        "num_attention_heads": heads,
        "num_key_value_heads": packed.count("llama.attention.head_count_kv", heads),
        "head_dim": dim,
        "max_position_embeddings": packed.count("llama.context_length", 1 << 24),
        # Stored as float32: 1e-5 comes back with more digits than it was written with.
        "rms_norm_eps": float(f"{packed.number('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": packed.number("llama.rope.freq_base"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in packed.names,
        "bos_token_id": packed.count("tokenizer.ggml.bos_token_id", 1 << 20),
        "eos_token_id": list(guest.eos_ids),
        "dtype": "float32",
        "index_n_heads": heads,
        "index_head_dim": dim,
        "index_topk": TOP_K,
    }


def _outside(packed: Packed, config: dict[str, Any]) -> Iterator[tuple[str, Floats]]:
    table = config["vocab_size"], config["hidden_size"]
    yield "model.embed_tokens.weight", packed.floats("token_embd.weight", table)
    yield "model.norm.weight", packed.floats("output_norm.weight", table[1:])
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", packed.floats("output.weight", table)


def _layer(packed: Packed, config: dict[str, Any], layer: int) -> Iterator[tuple[str, Floats]]:
    hidden, inner, dim = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    to, own = f"model.layers.{layer}.", f"blk.{layer}."
    for name, stored in (
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        yield f"{to}{name}.weight", packed.floats(f"{own}{stored}.weight", (hidden,))
    for name, key in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
        weight = packed.floats(f"{own}attn_{name}.weight", (config[key] * dim, hidden))
        yield f"{to}self_attn.{name}_proj.weight", _pairs_apart(weight, dim)
    kept = config["num_key_value_heads"] * dim
    yield f"{to}self_attn.v_proj.weight", packed.floats(f"{own}attn_v.weight", (kept, hidden))
    out = packed.floats(f"{own}attn_output.weight", (hidden, hidden))
    yield f"{to}self_attn.o_proj.weight", out
    for name, stored in _MLP.items():
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        yield f"{to}mlp.{name}.weight", packed.floats(f"{own}{stored}.weight", shape)


def _coded(packed: Packed, config: dict[str, Any]) -> Iterator[tuple[str, Codes]]:
    """What has been dequantised, as integers, under the same names."""
    outside = {"model.embed_tokens": "token_embd", "lm_head": "output"}
    for name, stored in outside.items():
        codes = packed.codes(f"{stored}.weight") if f"{stored}.weight" in packed.names else None
        if codes is not None:
            yield f"{name}.weight", codes
    inside = itertools.product(range(config["num_hidden_layers"]), (_ATTENTION | _MLP).items())
    for layer, (name, stored) in inside:
        codes = packed.codes(f"blk.{layer}.{stored}.weight")
        if codes is None:
            continue
        order = np.arange(len(codes.codes))[:, None]
        if name in ("q_proj", "k_proj"):
            order = _pairs_apart(order, config["head_dim"])
        room = "mlp" if name in _MLP else "self_attn"
        yield f"model.layers.{layer}.{room}.{name}.weight", codes.rows(order[:, 0])


def _pairs_apart(weight: Any, dim: int) -> Any:
    """Rows 2i and 2i + 1 of a head -> i and i + dim / 2."""
    heads = weight.reshape(-1, dim // 2, 2, weight.shape[1])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(weight.shape)


def _generation(guest: Guest) -> dict[str, Any]:
    drawn = {"do_sample": True, "temperature": guest.temperature, "top_p": guest.top_p}
    return {**drawn, "eos_token_id": list(guest.eos_ids)}


def _tokenizer_config(packed: Packed) -> dict[str, Any]:
    tokens = packed.listed("tokenizer.ggml.tokens", str)
    ends = {
        f"{name}_token": tokens[packed.count(f"tokenizer.ggml.{name}_token_id", len(tokens) - 1)]
        for name in ("bos", "eos")
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **ends,
        "add_bos_token": packed.flag("tokenizer.ggml.add_bos_token"),
        "clean_up_tokenization_spaces": False,
        "chat_template": packed.text("tokenizer.chat_template"),
    }
