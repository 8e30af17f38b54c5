"""The flags of `ess serve`. What they mean is in `ess.server.commands.settings`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from ess import console
from ess.errors import Unavailable
from ess.server.commands.compat_flags import ForeignFlags, check_foreign


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFlags:
    """Names after the first are those of SGLang or vLLM for the same thing."""

    served_model_name: str | None = None
    "The name clients use; several are separated by commas."
    host: str | None = None
    "Where to listen; loopback unless told otherwise."
    port: int | None = None
    "8000; 0 takes a free one."
    api_key: str | None = None
    "Needed on every route but /health and /ready. Better given as ESS_API_KEY."
    tls_cert: Annotated[str | None, Parameter(name=["--tls-cert", "--ssl-certfile"])] = None
    "Certificate file; with it the server speaks HTTPS."
    tls_key: Annotated[str | None, Parameter(name=["--tls-key", "--ssl-keyfile"])] = None
    "The certificate's key."
    max_model_len: Annotated[
        str | None, Parameter(name=["--max-model-len", "--max-ctx", "--context-length"])
    ] = None
    "Positions of the longest request, such as 128k."
    max_running: Annotated[
        int | None,
        Parameter(name=["--max-running", "--max-running-requests", "--max-num-seqs"]),
    ] = None
    "Requests that run at a time."
    max_waiting: Annotated[
        int | None,
        Parameter(name=["--max-waiting", "--max-queued-requests", "--max-num-queued-reqs"]),
    ] = None
    "Requests that may wait; beyond, 503 with Retry-After."
    max_connections: int | None = None
    "Connections held at a time."
    default_max_tokens: int | None = None
    "For chat requests that do not say max_tokens."
    host_bytes: Annotated[
        str | None, Parameter(name=["--host-bytes", "--host-pool", "--mem-fraction-static"])
    ] = None
    "Memory for all rows: 24GiB, or a share of what is free: 50%."
    slot_bytes: str | None = None
    "Memory for the working set."
    index_bytes: str | None = None
    "Memory for the index keys of running requests."
    chunk_tokens: Annotated[
        int | None,
        Parameter(name=["--chunk-tokens", "--chunked-prefill-size", "--max-num-batched-tokens"]),
    ] = None
    "Prompt tokens run beside one decode step."
    overlap: Literal["layerwise", "da", "dba", "none", "resident"] | None = None
    "How fetches hide behind compute."
    promise: Literal["all", "some"] | None = None
    "Device pages of a request: all at its start, or some, and more as it grows."
    tbo: str | None = None
    "Steps in two halves: off, on, auto, or the least tokens of a step for it."
    mtp: Annotated[int | None, Parameter(name=["--mtp", "--speculative-num-draft-tokens"])] = None
    "Tokens verified per step, at most; 1 drafts none."
    mtp_auto: bool | None = None
    "Verify as many tokens as pay, up to --mtp."
    tpot_ms: Annotated[float | None, Parameter(name=["--tpot-ms", "--tpot"])] = None
    "Milliseconds per token that admission and chunks keep to; 0 keeps to none."
    deterministic: Annotated[
        bool | None, Parameter(name=["--deterministic", "--enable-deterministic-inference"])
    ] = None
    "The same answer to the last bit, whatever else runs beside it; prompts run slower."
    depth: int | None = None
    "1 launches a step before the one before is learned; 0 waits."
    budget_every: int | None = None
    "Steps after which slots move to the layers that miss most; 0 never moves any."
    form: Annotated[str | None, Parameter(name=["--form", "--dtype"])] = None
    "What weights are computed in: bf16 or f32."
    row: Annotated[str | None, Parameter(name=["--row", "--kv-cache-dtype"])] = None
    "How latent rows are stored: fp8, bf16 or f32."
    warmup: Annotated[bool | None, Parameter(negative="--no-warmup")] = None
    "Fill slots with what the prompt chose last."
    verify: int | None = None
    "Check one layer of every n-th step against the host."
    threads: int | None = None
    "Compute threads; all cores but one."
    keep_alive_s: Annotated[
        float | None, Parameter(name=["--keep-alive-s", "--sse-keep-alive"])
    ] = None
    "Seconds of silence after which a stream gets a comment."
    idle_s: float | None = None
    "Seconds that an unused connection is kept; longer than a load balancer keeps its own."
    stall_s: float | None = None
    "Seconds after which a reader that takes nothing is given up."
    drain_s: Annotated[
        float | None, Parameter(name=["--drain-s", "--drain", "--shutdown-timeout"])
    ] = None
    "Seconds that streams have to finish after SIGTERM."
    drain_grace_s: float | None = None
    "Seconds that probes meet 503 before the listener closes."
    watchdog_s: Annotated[float | None, Parameter(name=["--watchdog-s", "--watchdog-timeout"])] = (
        None
    )
    "Seconds of silence after which the engine counts as stuck."
    body_bytes: str | None = None
    "The longest body that is read."
    header_bytes: str | None = None
    "The longest request line and headers."
    metrics_compat: str | None = None
    "Whose metric names stand beside ours: vllm,sglang."
    otlp_endpoint: Annotated[
        str | None, Parameter(name=["--otlp-endpoint", "--otlp-traces-endpoint"])
    ] = None
    "Where OpenTelemetry spans go: http://127.0.0.1:4318/v1/traces. Needs ess[otel]."
    engine: Literal["model", "paced"] | None = None
    "paced makes tokens without a model, to try servers, routers and clients."
    pace_ms: float | None = None
    "Milliseconds of a step of the paced engine."


def serve(
    model: Annotated[str | None, Parameter(name=["--model", "--model-path"])] = None,
    *,
    flags: ServeFlags | None = None,
    foreign: ForeignFlags | None = None,
    config: Path | None = None,
    json: bool = False,
) -> int:
    """Serve a model over HTTP: prompts and answers in one process pair.

    Every setting can also stand in a file or in the environment, as ESS_ and its name.

    Parameters
    ----------
    model
        A checkpoint's folder; without one, the small model in the box.
    config
        A TOML file of settings; the environment and flags come before it.
    json
        Print what is served as one JSON document.
    """
    given = asdict(flags) if flags is not None else {}
    for sentence in check_foreign(foreign or ForeignFlags()):
        console.note(f"ess: {sentence}")
    try:
        from ess.server.commands.launch import serve_flags
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is missing: install ess[serve]") from None
    return serve_flags({**given, "model": model}, config=config, json=json)
