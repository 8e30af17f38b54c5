"""How many bytes of weights an engine on a CPU holds, from the files' headers alone.

The engine holds each weight as its ops read it, and a packed copy of each that compiled stages
multiply (`ess.kernels.cpu.stage`): in bfloat16 where the machine multiplies that, else in float32.
A guest's codes are held and packed as codes. Layers whose experts are divided among ranks have no
stages, nor have compressed models. The count is 0.1 % less than the model in the box takes, because
packed matrices are rounded up, and 3 % more than SmolLM2 takes, whose padding is codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from ess.kernels.cpu import native
from ess.models.config import ModelConfig
from ess.models.weights.expected.kept_bytes import BF16_BYTES, COMPUTED, EMBEDDING, kept_bytes
from ess.models.weights.files.header import Entry

CODES: Final = ".codes"
STEPS: Final = ".steps"
JOINED: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Matrices that are multiplied as one: as codes where all have codes of one size."""


def host_bytes(
    config: ModelConfig,
    entries: Mapping[str, Entry],
    form: str,
    *,
    coded: Mapping[str, Entry],
    rank_count: int = 1,
    redundant: int = 0,
) -> int:
    """Of one rank, if ranks divide the experts. `coded` are the tensors of a guest's codes."""
    kept = kept_bytes(config, entries, form, rank_count=rank_count, redundant=redundant)
    if config.compressed is not None or not native.available():
        return kept
    is_widened = form == "bf16" and native.kernels() != "avx512_bf16"
    packed_each = 2 if is_widened else 1  # bytes of the packed copy for each byte that is held
    if rank_count > 1:
        whole = sum(not config.has_experts(layer) for layer in range(config.layer_count))
        return kept + packed_each * kept_bytes(config, entries, form, layers=range(whole))
    table = config.vocab_size * config.hidden_dim * COMPUTED.get(form, BF16_BYTES)
    multiplied = kept if config.tie_head else kept - table
    if form != "bf16" or not config.is_grouped:
        return kept + packed_each * multiplied
    plain_bytes, code_bytes = _coded(config, entries, coded)
    held = kept - plain_bytes + code_bytes
    if config.tie_head and EMBEDDING + CODES in coded:
        held += table  # ids are looked up in the plain table
    return held + packed_each * (multiplied - plain_bytes) + code_bytes


def _coded(
    config: ModelConfig, entries: Mapping[str, Entry], coded: Mapping[str, Entry]
) -> tuple[int, int]:
    """Bytes of the weights that are held as codes: what they would take as bfloat16, and take."""
    plain_bytes = code_bytes = 0
    for name, entry in entries.items():
        if _is_held_as_codes(name, coded) and (name != EMBEDDING or config.tie_head):
            plain_bytes += BF16_BYTES * math.prod(entry.shape)
            code_bytes += coded[name + CODES].bytes + coded[name + STEPS].bytes
    return plain_bytes, code_bytes


def _is_held_as_codes(name: str, coded: Mapping[str, Entry]) -> bool:
    if not {name + CODES, name + STEPS} <= coded.keys():
        return False
    module, _, own = name.removesuffix(".weight").rpartition(".")
    joined = next((names for names in JOINED if own in names), (own,))
    beside = [coded.get(f"{module}.{each}.weight{CODES}") for each in joined]
    return len({entry.shape[1:] if entry else () for entry in beside}) == 1
