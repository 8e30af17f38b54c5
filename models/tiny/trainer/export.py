"""`python -m ess.models.tiny.trainer.export --folder FOLDER --into CHECKPOINT`: to a checkpoint.

Writes what a published model has: model.safetensors in the fp8 block form under the real tensor
names (MTP at index num_layers, with its copies of embedding and head), config.json,
generation_config.json, tokenizer.json, tokenizer_config.json. The card is written by evaluate.py.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from ess.errors import BadInput
from ess.models.tiny.trainer.experts import Gate
from ess.models.tiny.trainer.network import Network
from ess.models.tiny.trainer.optimiser import pieces_of
from ess.models.tiny.trainer.shape import ModelShape
from ess.models.tiny.trainer.stored import Form, stored_form, write_checkpoint
from ess.models.tiny.trainer.texts.vocabulary import BEGIN, BEGIN_ID, END, END_ID

CHECKPOINT: Final = Path(__file__).parent.parent / "checkpoint"
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
)
GENERATION: Final = {
    "bos_token_id": BEGIN_ID,
    "eos_token_id": END_ID,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
}


def state_network(path: Path, shape: ModelShape) -> Network:
    """The network in f32 with the weights of a training state."""
    network = Network(shape)
    gates = [part for part in network.modules() if isinstance(part, Gate)]
    with safe_open(path, framework="pt") as held, torch.no_grad():
        truth, biases = held.get_tensor("truth"), held.get_tensor("biases")
        for piece, (_, weight) in zip(pieces_of(network), network.named_parameters(), strict=True):
            weight.copy_(piece.view(truth))
        for gate, bias in zip(gates, biases, strict=True):
            gate.e_score_correction_bias.copy_(bias)
    return network


def published_tensors(network: Network) -> dict[str, Tensor]:
    """The network's weights under the published names, experts taken apart, f32."""
    shape, made = network.shape, {}
    for name, tensor in network.state_dict().items():
        stem, _, last = name.rpartition(".")
        if last == "gate_up":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                made[f"{stem}.experts.{expert}.gate_proj.weight"] = gate
                made[f"{stem}.experts.{expert}.up_proj.weight"] = up
        elif last == "down":
            for expert, down in enumerate(tensor):
                made[f"{stem}.experts.{expert}.down_proj.weight"] = down
        else:
            made[name] = tensor
    for layer in range(shape.layer_count, shape.layer_count + shape.mtp_layer_count):
        prefix = f"model.layers.{layer}."
        made[f"{prefix}embed_tokens.weight"] = made["model.embed_tokens.weight"]
        made[f"{prefix}shared_head.head.weight"] = made["lm_head.weight"]
    return {name: tensor.detach().clone() for name, tensor in made.items()}


def load_network(shape: ModelShape, tensors: dict[str, Tensor]) -> Network:
    """The other way: published tensors (f32) stacked into a network."""
    network = Network(shape)
    wanted = published_tensors(network)
    if missing := sorted(set(wanted) - set(tensors)):
        raise BadInput(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            stem, _, last = name.rpartition(".")
            experts = f"{stem}.experts."
            for expert in range(shape.expert_count if last in ("gate_up", "down") else 0):
                parts = ("gate_proj", "up_proj") if last == "gate_up" else ("down_proj",)
                rows = [tensors[f"{experts}{expert}.{part}.weight"] for part in parts]
                tensor[expert].copy_(torch.cat(rows))
            if last not in ("gate_up", "down"):
                tensor.copy_(tensors[name])
    return network


def tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "add_bos_token": True,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        "chat_template": CHAT_TEMPLATE,
    }


def export(network: Network, tokenizer: Path, into: Path, *, form: Form = "fp8") -> None:
    config = network.shape.config(fp8=form == "fp8")
    write_checkpoint(into, config, stored_form(config, published_tensors(network), form))
    for name, content in (
        ("generation_config.json", GENERATION),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (into / name).write_text(json.dumps(content, indent=1) + "\n")
    shutil.copyfile(tokenizer, into / "tokenizer.json")


def main(*, folder: Path, into: Path = CHECKPOINT, form: Form = "fp8") -> None:
    """Write a checkpoint folder from a training state.

    Parameters
    ----------
    folder: where train.py left state.safetensors and vocabulary.py left tokenizer.json.
    into: the checkpoint folder.
    form: fp8 blocks as the published model has them, or bf16, or f32.
    """
    network = state_network(folder / "state.safetensors", ModelShape())
    export(network, folder / "tokenizer.json", into, form=form)
    size = sum(path.stat().st_size for path in into.iterdir())
    print(f"{into}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
