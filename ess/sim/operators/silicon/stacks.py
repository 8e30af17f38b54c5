"""Tables of frameworks other than SGLang, as far as the package has them.

    python -m ess.sim.operators.silicon.stacks PACKAGE_FOLDER SYSTEM OUT_FOLDER STACK

Each framework has its own attention modules, experts within a node, products and reduction.
SGLang's fill its gaps: exchanges and experts beyond a node (all use DeepEP), attention behind a
prefix, the kernel of dense attention alone and `HOST_TIMES`. vLLM's dense modules were measured
over rows in bf16 and in fp8; bf16 is used here, as for SGLang. TensorRT-LLM's sparse module has no
fp8 rows on Hopper, so SGLang's is used instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from ess.errors import BadInput
from ess.sim.operators.derive import Derivation, Source, timed, write
from ess.sim.operators.silicon.selection import (
    CONTEXT_MIN,
    HEADS_MIN,
    SELECTION,
    is_block_fp8,
    is_kept_product,
    is_kept_shape,
)

Stack = Literal["sglang", "vllm", "trtllm"]

SGLANG: Final = "sglang"
BY_NAME: Final = MappingProxyType({derivation.name: derivation for derivation in SELECTION})


def _is_dense_module(row: Source) -> bool:
    return _has_heads(row) and bool(row["kv_cache_dtype"] == "bfloat16")


def _has_heads(row: Source) -> bool:
    return is_block_fp8(row) and bool(row["num_heads"] >= HEADS_MIN)


def _tables(
    stack: str, version: str, *, is_reduced: Callable[[Source], bool]
) -> tuple[Derivation, ...]:
    def table(name: str, file: str, keep: Callable[[Source], bool]) -> Derivation:
        folder, _, measured = file.partition("/")
        path = f"{folder}/{stack}/{version}/{measured}_perf.parquet"
        return replace(BY_NAME[name], path=path, keep=keep)

    dense = table(
        "dense_decode",
        "mla/mla_generation_module",
        lambda row: _is_dense_module(row) and row["step"] > CONTEXT_MIN,
    )
    return (
        replace(dense, entry=timed("num_heads", "step", "batch_size")),
        table(
            "dense_prompt",
            "mla/mla_context_module",
            lambda row: _is_dense_module(row) and row["isl"] > CONTEXT_MIN,
        ),
        table("fused_experts", "moe/moe", is_kept_shape),
        table("reduce", "comm/custom_allreduce", is_reduced),
        table("products", "gemm/gemm", is_kept_product),
    )


VLLM: Final = (
    *_tables("vllm", "0.24.0", is_reduced=lambda row: bool(row["backend"] == "vllm_graph")),
    replace(
        BY_NAME["sparse_decode"],
        path="sparse_attention/vllm/0.24.0/dsa_generation_module_perf.parquet",
        keep=lambda row: _has_heads(row) and row["step"] > CONTEXT_MIN,
    ),
)
TRTLLM: Final = _tables("trtllm", "1.3.0rc20", is_reduced=lambda row: True)

STACKS: Final[Mapping[str, tuple[Derivation, ...]]] = MappingProxyType(
    {SGLANG: SELECTION, "vllm": VLLM, "trtllm": TRTLLM}
)


def tables_of(stack: str) -> tuple[Derivation, ...]:
    if stack not in STACKS:
        raise BadInput(f"no operator tables of {stack!r}; there are {', '.join(STACKS)}")
    return STACKS[stack]


HOST_TIMES: Final = MappingProxyType({("vllm", "b200"): frozenset({"products"})})
"""Tables not used: there a product in fp8 takes 170 to 280 us whatever its shape, which is the
host's time of a launch. In bf16 it takes 6, in other frameworks 7 to 27."""


def own_names(stack: str, gpu: str) -> frozenset[str]:
    """The names of the tables that a stack has itself on a GPU."""
    names = frozenset(table.name for table in tables_of(stack))
    return frozenset() if stack == SGLANG else names - HOST_TIMES.get((stack, gpu), frozenset())


def main(arguments: list[str]) -> None:
    if len(arguments) != 4:
        raise BadInput("give the unpacked package, the GPU's name in it, a folder and the stack")
    package, system, folder, stack = arguments
    write(Path(package), tables_of(stack), system=system, folder=Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
