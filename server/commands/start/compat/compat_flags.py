"""Flags, variables and values that operators bring from scripts for vLLM and SGLang.

Where ESS has the same notion, their name sets our setting. For any other known name, and any
unknown variable with their prefix, a sentence says why it has no effect, or it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

from cyclopts import Parameter

from ess.errors import BadInput
from ess.server.commands.start.compat.compat_answers import (
    ANSWER_OF,
    AS_DONE,
    HEEDED,
    NAMES,
    NO_EFFECT,
    NOT_HERE,
    NUMBERS,
    SWITCHES,
    WHOLE,
)

FAMILY: Final = ("VLLM_", "SGLANG_", "SGL_")

# Our setting, and their flags for it.
FLAGS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("--model", "--model-path"),
    "role": ("--disaggregation-mode",),
    "bootstrap_port": ("--disaggregation-bootstrap-port",),
    "tls_cert": ("--ssl-certfile",),
    "tls_key": ("--ssl-keyfile",),
    "tls_ca": ("--ssl-ca-certs",),
    "server_processes": ("--api-server-count", "--tokenizer-worker-num"),
    "header_bytes": ("--h11-max-incomplete-event-size",),
    "default_sampling": ("--override-generation-config", "--preferred-sampling-params"),
    "request_log": ("--enable-log-requests", "--log-requests"),
    "stream_usage": ("--enable-force-include-usage", "--stream-response-default-include-usage"),
    "max_model_len": ("--max-ctx", "--context-length"),
    "max_running": ("--max-running-requests", "--max-num-seqs"),
    "max_waiting": ("--max-queued-requests", "--max-num-queued-reqs"),
    "host_bytes": ("--host-pool", "--mem-fraction-static"),
    "device_bytes": ("--gpu-memory-utilization",),
    "chunk_tokens": ("--chunked-prefill-size", "--max-num-batched-tokens", "--chunk"),
    "mtp": ("--speculative-num-draft-tokens",),
    "graph_sizes": ("--cuda-graph-bs", "--cudagraph-capture-sizes"),
    "tpot_ms": ("--tpot",),
    "deterministic": ("--enable-deterministic-inference",),
    "form": ("--dtype",),
    "row": ("--kv-cache-dtype",),
    "keep_alive_s": ("--sse-keep-alive",),
    "transport": ("--disaggregation-transfer-backend",),
    "drain_s": ("--drain", "--shutdown-timeout"),
    "pp_size": ("--pipeline-parallel-size", "--pp", "-pp"),
    "tp_size": ("--tensor-parallel-size", "--tp", "-tp"),
    "dp_size": ("--data-parallel-size", "--dp", "-dp"),
    "dp_rank": ("--data-parallel-rank", "-dpn"),
    "ep_size": ("--expert-parallel-size", "--ep"),
    "redundant_experts": (
        "--ep-num-redundant-experts",
        "--num-redundant-experts",
        "--eplb-config.num_redundant_experts",
    ),
    "executor": ("--distributed-executor-backend",),
    "dist_init_addr": ("--nccl-init-addr",),
    "cp_size": (
        *("--prefill-context-parallel-size", "-pcp"),
        *("--attention-context-parallel-size", "--attn-cp-size"),
    ),
    "dynamic_chunking": ("--enable-dynamic-chunking",),
    "watchdog_s": ("--watchdog-timeout",),
    "nvtx": ("--enable-layerwise-nvtx-tracing", "--enable-layerwise-nvtx-marker"),
    "otlp_endpoint": ("--otlp-traces-endpoint",),
}

# The other project's variable, our setting, and how to write the value for it.
SAME: Final[Mapping[str, tuple[str, str]]] = {
    "VLLM_API_KEY": ("api_key", "{}"),
    "VLLM_BATCH_INVARIANT": ("deterministic", "{}"),
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": ("deterministic", "{}"),
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": ("watchdog_s", "{}"),
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": ("idle_s", "{}"),
    "SGLANG_TIMEOUT_KEEP_ALIVE": ("idle_s", "{}"),
    "VLLM_CPU_KVCACHE_SPACE": ("host_bytes", "{}GiB"),
    "VLLM_PP_LAYER_PARTITION": ("pp_layer_partition", "{}"),
    "SGLANG_PP_LAYER_PARTITION": ("pp_layer_partition", "{}"),
    "SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR": ("smooth", "{}"),
}

# Our setting, and their values with our names for these.
VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "device": {"auto": "cpu"},
    "executor": {"mp": "processes"},
    "device_bytes": {"1": "100%", "1.0": "100%"},
    "backend": {"auto": "cpu"},
    "form": {"auto": "bf16", "bfloat16": "bf16", "float32": "f32"},
    "role": {"null": "both"},
    "row": {"auto": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8", "bfloat16": "bf16"},
}

ALWAYS_SO: Final = frozenset({"VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"})

WHY_NOT: Final[Mapping[str, str]] = {
    "SGLANG_DISABLE_HISPARSE_PREFETCH": "--modes none fetches without anything beside it",
    "SGLANG_BOOTSTRAP_PORT": "--bootstrap-port of ess prefill says it",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "--transfer-port of ess prefill and ess decode says it",
    "VLLM_LOGGING_LEVEL": "only errors are logged",
    "VLLM_ATTENTION_BACKEND": "ess doctor shows the kernels, which are chosen by the machine",
}

# Kubernetes gives every container the addresses of its services; a service called ess gets ESS_...
OF_CLUSTER: Final = re.compile(r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")


def is_of_cluster(variable: str, value: str) -> bool:
    """
    >>> is_of_cluster("ESS_PORT", "tcp://10.0.0.1:8000"), is_of_cluster("ESS_PORT", "8000")
    (True, False)
    """
    return OF_CLUSTER.fullmatch(variable) is not None or value.startswith(("tcp://", "udp://"))


def read_foreign(environment: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Settings that their variables set, and a sentence for each variable without an effect."""
    settings: dict[str, str] = {}
    notes = []
    for variable, value in sorted(environment.items()):
        if not variable.startswith(FAMILY) or value == "" or variable in ALWAYS_SO:
            continue
        if is_of_cluster(variable, value):
            continue
        if variable in SAME:
            name, form = SAME[variable]
            given = form.format(value)
            if settings.setdefault(name, given) != given:
                raise BadInput(
                    f"{variable} and another variable give {name} different values:"
                    " unset one of them"
                )
        else:
            why = WHY_NOT.get(variable, "nothing here has that name")
            notes.append(f"the variable {variable} has no effect: {why}")
    return settings, notes


def _flag(name: str) -> Any:
    kinds = ((SWITCHES, bool), (WHOLE, int | None), (NUMBERS, float | None))
    kind: Any = next((kind for names, kind in kinds if name in names), str)
    flag = "--" + name.replace("_", "-")
    return Annotated[kind, Parameter(name=(flag, *NAMES.get(name, ())), show=False)]


if TYPE_CHECKING:
    ForeignFlags = dict[str, Any]
else:
    ForeignFlags = TypedDict("ForeignFlags", {name: _flag(name) for name in ANSWER_OF}, total=False)

DP_ATTENTION: Final = "enable_dp_attention"


def of_each_rank(devices: int, ranks: int) -> int:
    """SGLang's --tp-size counts all GPUs where attention is divided by requests: here each rank of
    --dp-size has its share of them.

    >>> of_each_rank(16, 8)
    2
    """
    if devices % ranks:
        raise BadInput(
            f"tp_size is {devices} and dp_size is {ranks}: with --enable-dp-attention tp_size"
            " counts the GPUs of all ranks, and each needs equally many"
        )
    return devices // ranks


def check_foreign(flags: Mapping[str, Any]) -> list[str]:
    """A sentence for each given flag, what it changes or why nothing; refuses flags for things not
    served."""
    sentences = []
    for name, value in flags.items():
        answer = ANSWER_OF[name]
        if value in (None, False) or value in AS_DONE.get(answer, ()):
            continue
        flag = "--" + name.replace("_", "-")
        if answer in NOT_HERE:
            raise BadInput(f"the flag {flag} {NOT_HERE[answer]}")
        remark = HEEDED.get(answer) or f"has no effect: {NO_EFFECT[answer]}"
        sentences.append(f"the flag {flag} {remark}")
    return sentences
