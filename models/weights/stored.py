"""What config.json says about the files beside it: are linear weights in DeepSeek's fp8 blocks?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from ess.errors import BadInput

QUANT_BLOCK: Final = 128

# linear: may be stored as fp8 blocks with scales. table: never quantised. norm: f32 or bf16.
# correction: the gate's bias, f32 in every release. numbers: whole ones.
Role = Literal["linear", "table", "norm", "correction", "numbers"]


def stores_fp8(raw: Mapping[str, Any]) -> bool:
    """Anything packed in another way is refused."""
    quantised = raw.get("quantization_config")
    if quantised is None:
        return False
    if not isinstance(quantised, Mapping):
        raise BadInput("config.json: quantization_config is not an object")
    method = quantised.get("quant_method")
    if method != "fp8":
        raise BadInput(
            f"config.json: quantization_config.quant_method is {str(method)[:80]!r};"
            " ESS reads DeepSeek's fp8 blocks ('fp8') and plain bf16, f16 or f32"
        )
    if quantised.get("fmt", "e4m3") != "e4m3":
        raise BadInput(
            f"config.json: quantization_config.fmt is {str(quantised['fmt'])[:80]!r},"
            " expected 'e4m3'"
        )
    blocks = quantised.get("weight_block_size", [QUANT_BLOCK, QUANT_BLOCK])
    if blocks != [QUANT_BLOCK, QUANT_BLOCK]:
        raise BadInput(f"config.json: weight_block_size is {str(blocks)[:80]}, expected [128, 128]")
    return True
