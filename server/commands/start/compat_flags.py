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
    "stream_usage": ("--enable-force-include-usage",),
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
    enforce_eager: Annotated[bool, Parameter(name=["--enforce-eager", "--disable-cuda-graph"])] = (
        False
    )
    disable_log_requests: Annotated[
        bool, Parameter(name=["--disable-log-requests", "--no-enable-log-requests"])
    ] = False
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
    log_level: Annotated[str | None, Parameter(name=["--log-level", "--uvicorn-log-level"])] = None
    speculative_algorithm: Annotated[
        str | None, Parameter(name=["--speculative-algorithm", "--spec-algorithm"])
    ] = None
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
        int, Parameter(name=["--decode-context-parallel-size", "-dcp", "--dcp-size"])
    ] = 1
    moe_data_parallel_size: Annotated[
        int, Parameter(name=["--moe-data-parallel-size", "--moe-dp-size"])
    ] = 1
    moe_dense_tp_size: int | None = None
    enable_dp_lm_head: bool = False
    load_balance_method: str | None = None
    enable_eplb: bool = False
    eplb_config: str | None = None
    page_size: Annotated[int, Parameter(name=["--page-size", "--block-size"])] = 64
    speculative_eagle_topk: int = 1
    speculative_num_steps: int | None = None
    speculative_config: str | None = None
    speculative_draft_model_path: str | None = None
    quantization: str | None = None
    compilation_config: str | None = None
    attention_backend: str | None = None
    nsa_prefill_backend: Annotated[
        str | None, Parameter(name=["--nsa-prefill-backend", "--dsa-prefill-backend"])
    ] = None
    nsa_decode_backend: Annotated[
        str | None, Parameter(name=["--nsa-decode-backend", "--dsa-decode-backend"])
    ] = None
    moe_runner_backend: str | None = None
    moe_a2a_backend: Annotated[
        str | None, Parameter(name=["--moe-a2a-backend", "--all2all-backend"])
    ] = None
    deepep_mode: str | None = None
    disaggregation_transfer_backend: str | None = None
    disaggregation_ib_device: str | None = None
    tokenizer_mode: str | None = None
    schedule_policy: Annotated[
        str | None, Parameter(name=["--schedule-policy", "--scheduling-policy"])
    ] = None
    seed: Annotated[int | None, Parameter(name=["--seed", "--random-seed"])] = None
    cuda_graph_max_bs: int | None = None
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
    tokenizer: Annotated[str | None, Parameter(name=["--tokenizer", "--tokenizer-path"])] = None
    revision: str | None = None
    hf_overrides: Annotated[
        str | None, Parameter(name=["--hf-overrides", "--json-model-override-args"])
    ] = None
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
    stream_output: Annotated[
        bool, Parameter(name=["--stream-output", "--incremental-streaming-output"])
    ] = False
    skip_tokenizer_init: bool = False
    max_total_tokens: Annotated[
        int | None, Parameter(name=["--max-total-tokens", "--num-gpu-blocks-override"])
    ] = None
    cpu_offload_gb: float = 0.0
    lora_modules: Annotated[str | None, Parameter(name=["--lora-modules", "--lora-paths"])] = None
    middleware: str | None = None
    tool_parser_plugin: Annotated[
        str | None, Parameter(name=["--tool-parser-plugin", "--reasoning-parser-plugin"])
    ] = None
    disable_radix_cache: Annotated[
        bool, Parameter(name=["--disable-radix-cache", "--no-enable-prefix-caching"])
    ] = False


DP_ATTENTION: Final = "enable_dp_attention"
ONE_WAY: Final = "ranks of --dp-size exchange tokens in one way; see --sbo and --tbo"
CHOSEN: Final = "kernels are chosen by the machine; ess doctor shows them"
WHOLE: Final = "what is not experts is whole on each rank of --dp-size"
MEETING: Final = "is not served: --dist-init-addr HOST:PORT says where all machines meet"
PLACES: Final = "is not served: --nnodes and --node-rank say which ranks of --dp-size run here"
MTP: Final = "the checkpoint's own MTP layer drafts, --mtp tokens at most"

# Accepted and logged: what they ask for is always so, or changes no answer.
NO_EFFECT: Final[Mapping[str, str]] = {
    "trust_remote_code": "code of a checkpoint is never run",
    "enforce_eager": "no step of a CPU is a graph; --graphs 0 says so of a device's",
    "disable_log_requests": "requests are not logged",
    "enable_metrics": "/metrics is always served",
    "enable_prefix_caching": "equal prefixes are always shared",
    "enable_chunked_prefill": "prompts always run in chunks",
    "enable_auto_tool_choice": "tools are always served",
    "enable_cache_report": "usage always says how many tokens were cached",
    "enable_expert_parallel": "experts are divided over all ranks of --dp-size",
    "enable_dp_attention": "each rank of --dp-size has requests of its own, and its share of the"
    " GPUs that --tp-size counts",
    "moe_dense_tp_size": WHOLE,
    "enable_dp_lm_head": WHOLE,
    "load_balance_method": "each rank has a port of its own, and a router in front chooses one",
    "enable_eplb": "experts are placed at the start, by --expert-load, and stay there",
    "eplb_config": "--redundant-experts says how many second places experts have",
    "enable_hisparse": "rows are always offloaded",
    "skip_server_warmup": "no request is run at the start",
    "hisparse_config": "--slot-bytes and --host-bytes say how much is kept where",
    "tool_call_parser": "the checkpoint's own format is parsed",
    "reasoning_parser": "the checkpoint's own format is parsed",
    "swap_space": "--host-bytes says how much the host keeps",
    "log_level": "only errors are logged",
    "speculative_algorithm": MTP,
    "speculative_config": MTP,
    "speculative_num_steps": MTP,
    "quantization": "config.json says how weights are stored, --form what they are computed in",
    "compilation_config": "--graphs and --graph-sizes say which steps of a device are graphs",
    "cuda_graph_max_bs": "--graph-sizes says which steps of a device are graphs",
    "attention_backend": CHOSEN,
    "nsa_prefill_backend": CHOSEN,
    "nsa_decode_backend": CHOSEN,
    "moe_runner_backend": CHOSEN,
    "disaggregation_transfer_backend": "--transport says how rows are handed over",
    "disaggregation_ib_device": "UCX_NET_DEVICES says it to NIXL, with --transport nixl",
    "tokenizer_mode": "the checkpoint's own tokenizer.json and format are read",
    "moe_a2a_backend": ONE_WAY,
    "deepep_mode": ONE_WAY,
    "schedule_policy": "requests start by their priority, then as they came",
    "seed": "a request that wants the same answer again gives a seed itself",
    "max_prefill_tokens": "--chunk-tokens says how many tokens of prompts a step takes",
    "stream_interval": "a token is sent when it is made",
    "decode_log_interval": "ess top and /metrics show what a log line would",
    "download_dir": "nothing is fetched: a model is a folder, or in the hub's cache",
    "async_scheduling": "--depth 1 launches a step before the last one's tokens are known",
    "disable_overlap_schedule": "--depth 0, the default, waits for each step's tokens",
    "enable_hierarchical_cache": "rows are always offloaded; --prefix-cache-dir keeps them on disk",
    "enable_prompt_tokens_details": "usage always says how many tokens were cached",
    "disable_log_stats": "statistics are not logged; /metrics has them",
    "disable_uvicorn_access_log": "requests are not logged; --request-log does it",
    "disable_fastapi_docs": "/docs shows routes and nothing of this server; a proxy can hide it",
    "enable_request_id_headers": "x-request-id comes back with every answer",
    "enable_server_load_tracking": "/load always counts",
    "enable_log_outputs": "no text of a request or an answer is ever logged",
    "max_log_len": "no text of a request or an answer is ever logged",
    "log_requests_level": "--request-log prints a line per request, and no text of it",
    "log_level_http": "requests are not logged; --request-log does it",
    "log_config_file": "only errors are logged, to stderr",
    "enable_trace": "--otlp-endpoint says where spans go",
    "collect_detailed_traces": "/trace/start records every step",
    "allowed_methods": "pages of --allowed-origins may use all methods that are served",
    "allowed_headers": "pages of --allowed-origins may send all headers",
    "ssl_cert_reqs": "--tls-ca asks every client for a certificate; without it none is asked",
    "enable_ssl_refresh": "a certificate whose files change is always read again",
    "chat_template_content_format": "a chat template gets contents as text",
    "exclude_tools_when_tool_choice_none": "tool_choice none never shows tools to the model",
    "grammar_backend": "llguidance follows every grammar",
    "structured_outputs_config": "llguidance follows every grammar",
    "limit_mm_per_prompt": "only text is served",
    "model_impl": "each family of models is implemented once",
    "dist_timeout": "--stage-timeout-s says how long stages may be silent",
    "base_gpu_id": "--device and --pp-devices say which devices are used",
    "schedule_conservativeness": "a request runs when it has room; --promise says how much",
    "enable_mixed_chunk": "prompts always run beside decoding",
    "enable_priority_scheduling": "priority is always obeyed; lower values run earlier",
    "enable_torch_compile": CHOSEN,
    "enable_p2p_check": "where ranks run decides how they exchange what they have",
    "disable_custom_all_reduce": "where ranks run decides how they exchange what they have",
    "disable_shared_experts_fusion": "--sbo says what shared experts run beside",
}

# Refused: the answer, or the machine that makes it, would differ from what was asked for.
NOT_HERE: Final[Mapping[str, str]] = {
    "data_parallel_size_local": PLACES,
    "data_parallel_start_rank": PLACES,
    "data_parallel_address": MEETING,
    "data_parallel_rpc_port": MEETING,
    "master_addr": MEETING,
    "master_port": MEETING,
    "data_parallel_backend": "is not served: --executor says what starts the ranks of --dp-size",
    "decode_context_parallel_size": "must be 1: a rank of --dp-size has the whole contexts of its"
    " own requests",
    "moe_data_parallel_size": "must be 1: experts are divided over all ranks of --dp-size",
    "page_size": "must be 64: a page has 64 rows",
    "speculative_eagle_topk": "must be 1: drafts are a chain, not a tree",
    "disable_radix_cache": "is not served: equal prefixes are always shared",
    "speculative_draft_model_path": f"is not served: {MTP}",
    "enable_lora": "is not served: there are no adapters here",
    "load_format": "must be auto: weights are read from safetensors",
    "tokenizer": "is not served: the checkpoint's own tokenizer.json is read",
    "revision": "is not served: give the folder of the snapshot as MODEL",
    "hf_overrides": "is not served: change config.json in a copy of the folder",
    "kv_transfer_config": "is not served: ess prefill and ess decode hand rows over",
    "allow_credentials": "is not served: a page of another origin sends its key as a header",
    "ssl_keyfile_password": "is not served: give a key file without a password",
    "ssl_ciphers": "is not served: a proxy can choose ciphers",
    "admin_api_key": "is not served: every key of --api-key may do everything",
    "generation_config": "must be auto: --default-sampling changes what the checkpoint recommends",
    "sampling_defaults": "must be model: --default-sampling changes what it recommends",
    "response_role": "must be assistant",
    "max_logprobs": "must be 20: so many log probabilities a token has at most",
    "return_tokens_as_token_ids": "is not served: a request asks for it by this name",
    "stream_output": "is not served: each chunk of /generate has the whole text so far",
    "skip_tokenizer_init": "is not served: /generate takes and gives ids in any case",
    "max_total_tokens": "is not served: --host-bytes says how much is kept",
    "cpu_offload_gb": "is not served: weights stay where they are computed with",
    "lora_modules": "is not served: there are no adapters here",
    "middleware": "is not served: create_app mounts the server in an application that has it",
    "tool_parser_plugin": "is not served: the formats of replies that are known are built in",
    "kv_events_config": "is not served: --kv-events ADDRESS publishes them",
}


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
    """A sentence for each given flag without an effect; refuses flags for things not served."""
    fields = ForeignFlags.__dataclass_fields__
    given = [n for n, value in asdict(flags).items() if value != fields[n].default]
    shown = {name: "--" + name.replace("_", "-") for name in given}
    for name in given:
        if name in NOT_HERE:
            raise BadInput(f"the flag {shown[name]} {NOT_HERE[name]}")
    return [f"the flag {shown[name]} has no effect: {NO_EFFECT[name]}" for name in given]
