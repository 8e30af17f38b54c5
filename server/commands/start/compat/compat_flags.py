"""Flags, variables and values that operators bring from scripts for vLLM and SGLang.

Where ESS has the same notion, their name sets our setting. For any other known name, and any
unknown variable with their prefix, a sentence says why it has no effect, or it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Final

from cyclopts import Parameter

from ess.errors import BadInput
from ess.server.commands.start.compat.compat_answers import (
    ALSO,
    AS_DONE,
    HEEDED,
    NO_EFFECT,
    NOT_HERE,
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


@Parameter(name="*", show=False)
@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignFlags:
    """Their flags that set nothing here: what they ask for is always so, or is not served."""

    trust_remote_code: bool = False
    enforce_eager: bool = False
    disable_cuda_graph: bool = False
    disable_log_requests: bool = False
    no_enable_log_requests: bool = False
    enable_metrics: bool = False
    enable_prefix_caching: bool = False
    enable_chunked_prefill: bool = False
    enable_auto_tool_choice: bool = False
    enable_cache_report: bool = False
    enable_hisparse: bool = False
    skip_server_warmup: bool = False
    hisparse_config: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    swap_space: float | None = None
    log_level: str | None = None
    uvicorn_log_level: str | None = None
    speculative_algorithm: str | None = None
    spec_algorithm: str | None = None
    enable_expert_parallel: Annotated[bool, Parameter(name=["--enable-expert-parallel", "-ep"])] = (
        False
    )
    enable_dp_attention: bool = False
    data_parallel_size_local: Annotated[
        int | None, Parameter(name=["--data-parallel-size-local", "-dpl"])
    ] = None
    data_parallel_start_rank: Annotated[
        int | None, Parameter(name=["--data-parallel-start-rank", "-dpr"])
    ] = None
    data_parallel_address: Annotated[
        str | None, Parameter(name=["--data-parallel-address", "-dpa"])
    ] = None
    data_parallel_rpc_port: Annotated[
        int | None, Parameter(name=["--data-parallel-rpc-port", "-dpp"])
    ] = None
    master_addr: str | None = None
    master_port: int | None = None
    data_parallel_backend: Annotated[
        str | None, Parameter(name=["--data-parallel-backend", "-dpb"])
    ] = None
    decode_context_parallel_size: Annotated[
        int, Parameter(name=["--decode-context-parallel-size", "-dcp"])
    ] = 1
    dcp_size: int = 1
    moe_data_parallel_size: int = 1
    moe_dp_size: int = 1
    enable_eplb: bool = False
    eplb_config: str | None = None
    page_size: int = 64
    block_size: int = 64
    speculative_eagle_topk: int = 1
    speculative_num_steps: int | None = None
    speculative_config: str | None = None
    speculative_draft_model_path: str | None = None
    quantization: str | None = None
    compilation_config: str | None = None
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    nsa_prefill_backend: str | None = None
    nsa_decode_backend: str | None = None
    dsa_prefill_backend: str | None = None
    dsa_decode_backend: str | None = None
    moe_runner_backend: str | None = None
    moe_backend: str | None = None
    sampling_backend: str | None = None
    moe_a2a_backend: str | None = None
    all2all_backend: str | None = None
    deepep_mode: str | None = None
    enable_two_batch_overlap: bool = False
    enable_dbo: bool = False
    enable_single_batch_overlap: bool = False
    enable_dp_lm_head: bool = False
    moe_dense_tp_size: int | None = None
    load_balance_method: str | None = None
    disaggregation_ib_device: str | None = None
    numa_node: str | None = None
    hicache_size: str | None = None
    hicache_ratio: str | None = None
    schedule_policy: str | None = None
    scheduling_policy: str | None = None
    seed: int | None = None
    random_seed: int | None = None
    cuda_graph_max_bs: int | None = None
    max_cudagraph_capture_size: int | None = None
    max_prefill_tokens: int | None = None
    stream_interval: int | None = None
    decode_log_interval: int | None = None
    download_dir: str | None = None
    async_scheduling: bool = False
    disable_overlap_schedule: bool = False
    enable_hierarchical_cache: bool = False
    enable_prompt_tokens_details: bool = False
    enable_lora: bool = False
    load_format: str = "auto"
    tokenizer: str | None = None
    tokenizer_path: str | None = None
    tokenizer_mode: str | None = None
    revision: str | None = None
    enable_sleep_mode: bool = False
    enable_memory_saver: bool = False
    headless: bool = False
    hf_overrides: str | None = None
    json_model_override_args: str | None = None
    kv_transfer_config: str | None = None
    kv_events_config: str | None = None
    disable_log_stats: bool = False
    disable_uvicorn_access_log: bool = False
    disable_fastapi_docs: bool = False
    enable_request_id_headers: bool = False
    enable_server_load_tracking: bool = False
    enable_log_outputs: bool = False
    max_log_len: int | None = None
    log_requests_level: int | None = None
    log_level_http: str | None = None
    log_config_file: str | None = None
    enable_trace: bool = False
    collect_detailed_traces: str | None = None
    allowed_methods: str | None = None
    allowed_headers: str | None = None
    ssl_cert_reqs: int | None = None
    enable_ssl_refresh: bool = False
    chat_template_content_format: str | None = None
    exclude_tools_when_tool_choice_none: bool = False
    grammar_backend: Annotated[
        str | None,
        Parameter(
            name=[
                *("--grammar-backend", "--guided-decoding-backend"),
                "--structured-outputs-config.backend",
            ]
        ),
    ] = None
    structured_outputs_config: str | None = None
    limit_mm_per_prompt: str | None = None
    model_impl: str | None = None
    dist_timeout: int | None = None
    base_gpu_id: int | None = None
    schedule_conservativeness: float | None = None
    enable_mixed_chunk: bool = False
    enable_priority_scheduling: bool = False
    enable_torch_compile: bool = False
    enable_p2p_check: bool = False
    disable_custom_all_reduce: bool = False
    disable_shared_experts_fusion: bool = False
    allow_credentials: bool = False
    ssl_keyfile_password: str | None = None
    ssl_ciphers: str | None = None
    admin_api_key: str | None = None
    generation_config: str = "auto"
    sampling_defaults: str = "model"
    response_role: str = "assistant"
    max_logprobs: int = 20
    return_tokens_as_token_ids: bool = False
    stream_output: bool = False
    incremental_streaming_output: bool = False
    skip_tokenizer_init: bool = False
    max_total_tokens: int | None = None
    num_gpu_blocks_override: int | None = None
    cpu_offload_gb: float = 0.0
    lora_modules: str | None = None
    lora_paths: str | None = None
    middleware: str | None = None
    tool_parser_plugin: str | None = None
    reasoning_parser_plugin: str | None = None
    disable_radix_cache: bool = False
    no_enable_prefix_caching: bool = False
    no_enable_chunked_prefill: bool = False
    no_async_scheduling: bool = False
    disable_chunked_prefix_cache: bool = False
    calculate_kv_scales: bool = False
    kv_cache_memory_bytes: str | None = None
    kv_offloading_size: float | None = None
    hicache_write_policy: str | None = None
    hicache_io_backend: str | None = None
    hicache_mem_layout: str | None = None
    hicache_storage_backend: str | None = None
    enable_nsa_prefill_context_parallel: bool = False
    nsa_prefill_cp_mode: str | None = None
    fp8_gemm_backend: str | None = None
    fp4_gemm_backend: str | None = None
    enable_flashinfer_allreduce_fusion: bool = False
    num_continuous_decode_steps: int | None = None
    optimization_level: Annotated[str | None, Parameter(name=["--optimization-level", "-O"])] = None
    safetensors_load_strategy: str | None = None
    model_loader_extra_config: str | None = None
    weight_loader_disable_mmap: bool = False
    data_parallel_external_lb: bool = False
    data_parallel_hybrid_lb: bool = False
    language_model_only: bool = False
    runner: str = "generate"
    task: str = "generate"


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


def check_foreign(flags: ForeignFlags) -> list[str]:
    """A sentence for each given flag, what it changes or why nothing; refuses flags for things not
    served."""
    fields = ForeignFlags.__dataclass_fields__
    given = [
        name
        for name, value in asdict(flags).items()
        if value not in (fields[name].default, *AS_DONE.get(name, ()))
    ]
    shown = {name: "--" + name.replace("_", "-") for name in given}
    why = {name: ALSO.get(name, name) for name in given}
    for name in given:
        if why[name] in NOT_HERE:
            raise BadInput(f"the flag {shown[name]} {NOT_HERE[why[name]]}")
    remarks = {name: f"has no effect: {sentence}" for name, sentence in NO_EFFECT.items()}
    remarks.update(HEEDED)
    return [f"the flag {shown[name]} {remarks[why[name]]}" for name in given]
