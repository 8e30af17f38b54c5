"""The measured rows that the set `silicon` rests on, and how they are thinned.

    python -m ess.sim.operators.silicon.selection PACKAGE_FOLDER SYSTEM OUT_FOLDER

SYSTEM is h100_sxm, h200_sxm or b200_sxm. Rows are selected and renamed, times become microseconds;
nothing else is computed. Kernels are those that SGLang runs by default on the GPU: FlashAttention 3
or FlashMLA on Hopper, TRT-LLM's on Blackwell. Contexts below 256 tokens are left out, prompts are
kept on the grids below, tokens of experts and products on every power of two and a few between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final

from ess.sim.operators import derive
from ess.sim.operators.derive import Derivation, Source, exchanged, timed

MODELS: Final = {
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "zai-org/GLM-5-FP8": "glm-5",
    "zai-org/GLM-5": "glm-5",
}
SHARING: Final = "zai-org/GLM-5.2-FP8"
WIDTHS: Final = {7168: "deepseek", 6144: "glm"}
CONTEXT_MIN: Final = 255
PROMPT_TOKENS: Final = {128, 256, 512, 1024, 2048, 4096, 8192}
PREFIXES: Final = {0, 2048, 8192, 16_384, 32_768, 65_536, 131_072}
PREFIX_FAR: Final = 150_000
PROMPTS: Final = {1, 4, 16}
TOKENS: Final = {1 << power for power in range(18)} | {48, 96, 160, 192, 320, 384, 768, 1536, 3072}
PLACES_MAX: Final = 64
HEADS_MIN: Final = 16
"""A kernel takes as long with fewer heads."""
BULK_SMS: Final = 24
NODES: Final = ("nodes", "node_num")
"""Not every GPU was measured over several nodes."""

FP8_PRODUCTS: Final = {
    *((n, k) for k in WIDTHS for n in (16_384, 4096)),
    *((n, k) for n in WIDTHS for k in (16_384, 2048)),
}
BF16_PRODUCTS: Final = {(n, k) for k in WIDTHS for n in (65_536, 256)}


def is_block_fp8(row: Source) -> bool:
    return bool(row["gemm_type"] == "fp8_block")


def _is_selecting(row: Source) -> bool:
    return is_block_fp8(row) and row["model"] in ("deepseek-ai/DeepSeek-V3.2", "zai-org/GLM-5-FP8")


def _is_sharing(row: Source) -> bool:
    return bool(row["model"] == SHARING and "skip_indexer" in row["op_name"])


def _is_replayed(row: Source) -> bool:
    """Whether it ran in a graph: larger batches launched kernel by kernel, for 1.3 ms each."""
    return bool(row["batch_size"] <= (512 if "B200" in row["device"] else 256))


def _is_default_kernel(row: Source) -> bool:
    return row["kernel_source"] in ("fa3", "trtllm_mla")


def _is_whole_model(row: Source) -> bool:
    """Attention of one GPU with all heads: only its index keys grow with the context."""
    whole = {"deepseek-ai/DeepSeek-V3.2": 128, "zai-org/GLM-5": 64}
    return bool(
        row["num_heads"] == whole.get(row["model"])
        and row["kv_cache_dtype"] == "fp8"
        and is_block_fp8(row)
    )


def _is_kept_prompt(row: Source) -> bool:
    return bool(
        (_is_selecting(row) or (is_block_fp8(row) and _is_sharing(row)))
        and row["batch_size"] in PROMPTS
        and row["isl"] in PROMPT_TOKENS
        and (row["step"] in PREFIXES or row["step"] > PREFIX_FAR)
    )


def _kv(row: Source) -> str:
    return "fp8" if row["kv_cache_dtype"] == "fp8" else "bf16"


def _model(row: Source) -> str:
    return "glm-5.2" if _is_sharing(row) else MODELS[row["model"]]


def _is_native_kv(row: Source) -> bool:
    """Whether the kernel alone has the row form in which the module around it was measured."""
    return _kv(row) == ("fp8" if "B200" in row["device"] else "bf16")


def _is_kept_mixture(row: Source) -> bool:
    kernels = ("sglang_fused_moe_triton", "sglang_flashinfer_trtllm_moe")
    return is_kept_shape(row) and bool(row["kernel_source"] == kernels["B200" in row["device"]])


def is_kept_shape(row: Source) -> bool:
    """Whether these are experts of our families, with tokens spread as within a node."""
    return bool(
        row["moe_dtype"] == "fp8_block"
        and row["hidden_size"] in WIDTHS
        and (row["inter_size"], row["num_experts"], row["topk"]) == (2048, 256, 8)
        and row["distribution"] == "power_law_1.01"
        and row["moe_ep_size"] * row["moe_tp_size"] <= PLACES_MAX
        and row["num_tokens"] in TOKENS
    )


def is_kept_product(row: Source) -> bool:
    shapes = {"fp8_block": FP8_PRODUCTS, "bfloat16": BF16_PRODUCTS}.get(row["gemm_dtype"], set())
    return (row["n"], row["k"]) in shapes and row["m"] in TOKENS


def _is_kept_bulk(row: Source) -> bool:
    return bool(
        row["num_experts"] == 256
        and row["hidden_size"] == max(WIDTHS)
        and row["num_topk"] == 8
        and row["num_token"] in TOKENS
        and row["dispatch_sms"] == row["combine_sms"] == BULK_SMS
    )


def _width(row: Source) -> str:
    return WIDTHS[row["hidden_size"]]


def _form(row: Source) -> str:
    return "fp8" if row["gemm_dtype"] == "fp8_block" else "bf16"


def _wide_experts(name: str, *, phase: str) -> Derivation:
    return Derivation(
        name=name,
        path=f"moe/sglang/0.5.10/wideep_{phase}_moe_perf.parquet",
        columns=("ranks", "balance", "group_tokens", "us"),
        keep=lambda row: row["distribution"] in ("uniform", "power_law_0.6", "power_law_1.01"),
        entry=timed("moe_ep_size", "distribution", "num_tokens"),
    )


def _exchange(
    name: str,
    *,
    file: str,
    keep: Callable[[Source], bool],
    time: str,
    first: tuple[str, str] | None = None,
) -> Derivation:
    """An exchange table; `first` is a column before the tokens, by our name and the package's."""
    ours, theirs = zip(*(pair for pair in (first, ("tokens", "num_token")) if pair), strict=True)
    return Derivation(
        name=name,
        path=f"comm/sglang/{file}.parquet",
        columns=(*ours, "dispatch_us", "combine_us"),
        keep=keep,
        entry=exchanged(*theirs, dispatch=f"dispatch_{time}_us", combine=f"combine_{time}_us"),
        is_optional=first == NODES,
    )


SELECTION: Final = (
    Derivation(
        name="sparse_decode",
        path="sparse_attention/sglang/0.5.14/dsa_generation_module_perf.parquet",
        columns=("model", "heads", "kv", "context", "queries", "us"),
        keep=lambda row: (
            is_block_fp8(row)
            and (_is_selecting(row) or _is_sharing(row))
            and _is_replayed(row)
            and row["step"] > CONTEXT_MIN
        ),
        entry=timed(_model, "num_heads", _kv, "step", "batch_size"),
    ),
    Derivation(
        name="index_growth",
        path="sparse_attention/vllm/0.24.0/dsa_generation_module_perf.parquet",
        columns=("model", "context", "queries", "us"),
        keep=lambda row: _is_whole_model(row) and row["step"] > CONTEXT_MIN,
        entry=timed(_model, "step", "batch_size"),
    ),
    Derivation(
        name="dense_decode",
        path="mla/sglang/0.5.10/wideep_generation_mla_perf.parquet",
        columns=("heads", "context", "queries", "us"),
        keep=lambda row: _is_default_kernel(row) and row["isl"] > CONTEXT_MIN,
        entry=timed("num_heads", "isl", "batch_size"),
    ),
    Derivation(
        name="dense_kernel",
        path="mla/sglang/0.5.14/generation_mla_perf.parquet",
        columns=("heads", "context", "queries", "us"),
        keep=lambda row: (
            _is_native_kv(row) and row["num_heads"] >= HEADS_MIN and row["step"] >= CONTEXT_MIN
        ),
        entry=timed("num_heads", lambda row: row["step"] + 1, "batch_size"),
    ),
    Derivation(
        name="sparse_prompt",
        path="sparse_attention/sglang/0.5.14/dsa_context_module_perf.parquet",
        columns=("model", "heads", "kv", "prompts", "prefix", "tokens", "us"),
        keep=_is_kept_prompt,
        entry=timed(_model, "num_heads", _kv, "batch_size", "step", "isl"),
    ),
    Derivation(
        name="dense_prompt",
        path="mla/sglang/0.5.10/wideep_context_mla_perf.parquet",
        columns=("heads", "prompts", "tokens", "us"),
        keep=lambda row: _is_default_kernel(row) and row["isl"] > CONTEXT_MIN,
        entry=timed("num_heads", "batch_size", "isl"),
    ),
    _wide_experts("wide_experts", phase="generation"),
    _wide_experts("wide_experts_prompt", phase="context"),
    Derivation(
        name="fused_experts",
        path="moe/sglang/0.5.14/moe_perf.parquet",
        columns=("model", "ep", "tp", "group_tokens", "us"),
        keep=_is_kept_mixture,
        entry=timed(_width, "moe_ep_size", "moe_tp_size", "num_tokens"),
    ),
    _exchange(
        "exchange_near",
        file="0.5.12/wideep_deepep_ll_perf",
        time="avg_t",
        first=("hidden", "hidden_size"),
        keep=lambda row: (
            row["num_experts"] == 256 and row["num_topk"] == 8 and row["hidden_size"] in WIDTHS
        ),
    ),
    _exchange(
        "exchange_far",
        file="0.5.6.post2/wideep_deepep_ll_perf",
        time="avg_t",
        first=NODES,
        keep=lambda row: row["num_experts"] == 256 and row["node_num"] > 1,
    ),
    _exchange(
        "bulk_near",
        file="0.5.12/wideep_deepep_normal_perf",
        time="transmit",
        keep=_is_kept_bulk,
    ),
    _exchange(
        "bulk_far",
        file="0.5.6.post2/wideep_deepep_normal_perf",
        time="transmit",
        first=NODES,
        keep=lambda row: _is_kept_bulk(row) and row["node_num"] > 1,
    ),
    Derivation(
        name="reduce",
        path="comm/sglang/0.5.14/custom_allreduce_perf.parquet",
        columns=("gpus", "bytes", "us"),
        keep=lambda row: row["backend"] == "sglang_graph",
        entry=timed("num_gpus", "message_size"),
    ),
    Derivation(
        name="gather",
        path="comm/nccl/2.29.2/nccl_perf.parquet",
        columns=("verb", "gpus", "bytes", "us"),
        keep=lambda row: (
            row["nccl_dtype"] == "half" and row["op_name"] in ("all_gather", "reduce_scatter")
        ),
        entry=timed("op_name", "num_gpus", "message_size"),
    ),
    Derivation(
        name="products",
        path="gemm/sglang/0.5.14/gemm_perf.parquet",
        columns=("form", "n", "k", "tokens", "us"),
        keep=is_kept_product,
        entry=timed(_form, "n", "k", "m"),
    ),
)


if __name__ == "__main__":
    derive.main(sys.argv[1:], SELECTION)
