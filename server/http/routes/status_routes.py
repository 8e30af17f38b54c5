"""Routes that report on the server: for people, routers, probes and metric scrapers."""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import ess
from ess.engine.tokens.sampling import Sampling
from ess.errors import Unavailable
from ess.server.dialects.generation import Ending, Generation
from ess.server.dialects.routes.generate import WEIGHT_VERSION
from ess.server.dialects.streaming import Answer
from ess.server.http.metrics import CONTENT_TYPE, MODES, exposition
from ess.server.http.openapi.door import Door
from ess.server.http.responses import Interrupted, Refused, answer, error_answer
from ess.server.process.bound_table import in_force
from ess.server.process.engines import stages
from ess.server.process.handoffs import view
from ess.server.process.service import Service


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def models(request: Request) -> Response:
    """OpenAI's list, with the fields of Anthropic's beside its own."""
    service = _service(request)
    listed = [_listed(service, name) for name in service.names]
    ends = {"first_id": service.names[0], "last_id": service.names[-1]}
    return answer({"object": "list", "data": listed, "has_more": False, **ends})


async def one_model(request: Request) -> Response:
    """One model; its name may have slashes, as names on a model hub do."""
    service = _service(request)
    name: str = request.path_params["model"]
    if name not in service.names:
        raise service.absent(name) if name else HTTPException(404)
    return answer(_listed(service, name))


def _listed(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.started_unix,
        # Without this smg takes the worker for vLLM's, and sends it no handoffs.
        "owned_by": "ess" if service.split.role == "both" else "sglang",
        "root": service.name,
        "parent": None,
        "max_model_len": service.limits.length_max,
        "max_input_tokens": service.limits.length_max - 1,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.started_unix, UTC).isoformat(),
    }


async def version(request: Request) -> Response:
    return answer({"version": ess.__version__})


async def server(request: Request) -> Response:
    """Names that routers read come first; `settings` has each setting and its origin, `bounds` the
    limits on what may come in."""
    service = _service(request)
    settings = {name: shown["value"] for name, shown in service.described.items()}
    return answer(
        {
            **_model(service),
            **_server(service),
            "settings": service.described,
            "bounds": in_force(settings),
        }
    )


async def model(request: Request) -> Response:
    return answer(_model(_service(request)))


def _model(service: Service) -> dict[str, Any]:
    return {
        "model_path": service.name,
        "tokenizer_path": service.name,
        "served_model_name": service.name,
        "is_generation": True,
        "weight_version": WEIGHT_VERSION,
        "model_type": service.model_type,
        "architectures": [service.architecture],
        "max_model_len": service.limits.length_max,
        "vocab_size": service.vocabulary,
    }


def _server(service: Service) -> dict[str, Any]:
    return {
        "version": ess.__version__,
        **_split(service),
        "tp_size": _size(service, "tp_size"),
        "pp_size": _size(service, "pp_size"),
        "dp_size": 1,
        "load_balance_method": "round_robin",
        "max_running_requests": service.limits.running_max,
        "max_total_num_tokens": service.token_capacity,
        "status": service.state,
        "internal_states": [_load(service)],
        "engine": _engine(service),
    }


def _size(service: Service, name: str) -> int:
    return int(service.described.get(name, {}).get("value", 1))


def _split(service: Service) -> dict[str, Any]:
    """The worker's role in SGLang's terms; `peers` are a decode worker's."""
    split = service.split
    facts: dict[str, Any] = {"disaggregation_mode": "null" if split.role == "both" else split.role}
    if split.role == "prefill":
        facts["disaggregation_bootstrap_port"] = split.port
    if split.peers is not None:
        facts["peers"] = split.peers.lines()
    return facts


def _engine(service: Service) -> dict[str, Any]:
    """What the engine chose at run time; `modes` counts layers per mode."""
    status = service.board.status
    return {
        "depth": status.depth,
        "depth_reasons": status.depth_reasons,
        "modes": [dict(zip(MODES, counts, strict=True)) for counts in status.modes],
        "graphs": _graphs(service),
    }


async def health(request: Request) -> Response:
    """200 while the first engine loads and while any engine runs; 503 from the loss of an engine
    until the next is ready. While the stages of a worker connect it names the missing ones."""
    service = _service(request)
    if service.link.engine.why_lost:
        return error_answer(Interrupted(service.link.engine.why_lost + service.awaited))
    said: dict[str, Any] = {"status": service.state}
    return answer(said | ({"missing": awaited} if (awaited := service.missing_stages) else {}))


async def ready(request: Request) -> Response:
    """200 when requests are welcome: not while the model loads, the server drains or generation is
    paused. A decode worker can compute prompts itself, so it is ready even if prefill workers are
    `missing`."""
    service = _service(request)
    try:
        service.check_making()
    except Exception as error:
        if not isinstance(error, ess.EssError):
            raise
        return error_answer(error)
    peers = service.split.peers
    return answer({"status": "ready", **({} if peers is None else {"missing": peers.missing})})


async def health_generate(request: Request) -> Response:
    """200 after the engine has made a token for this, or while it is too busy and makes others."""
    service = _service(request)
    service.check_making()
    try:
        await _one_token(service, request.state.request_id)
    except Refused:
        if not _is_making(service):
            raise
    except TimeoutError:
        if not _is_making(service):
            raise Unavailable(f"no token within {service.limits.probe_s:g} s") from None
    return answer({"status": "ok"})


async def _one_token(service: Service, request_id: str) -> None:
    prompt = service.tokenizer.encode("a") or [0]
    call = service.begin(request_id, [(prompt, Sampling(tokens_max=1))])
    grown = Answer(service, call, [Generation(service.tokenizer, Ending())])
    try:
        async with asyncio.timeout(service.limits.probe_s):
            await grown.collect()
    finally:
        grown.give_up()


def _is_making(service: Service) -> bool:
    """Whether tokens were made within the time of a probe: then a full queue is no fault."""
    since_s = service.clock.now_s() - service.limits.probe_s
    counts = [status.made_count for at_s, status in service.board.recent if at_s >= since_s]
    return len(counts) > 1 and counts[-1] > counts[0]


async def loads(request: Request) -> Response:
    """SGLang's load report, limited to the sections asked for."""
    service = _service(request)
    wanted = request.query_params.get("include", "all").split(",")
    sections: dict[str, Callable[[Service], Any]] = {
        "memory": _memory,
        "queues": _queues,
        "handoff": _handoff,
        "stages": _stages,
        "graphs": _graphs,
    }
    load = _load(service)
    if "disagg" in wanted or "all" in wanted:
        load |= _disagg(service)
    for name, section in sections.items():
        if name in wanted or "all" in wanted:
            load[name] = section(service)
    return answer(
        {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": ess.__version__,
            "accelerator": platform.machine(),
            "num_accelerators": 0,
            "dp_rank_count": 1,
            "loads": [load],
        }
    )


async def load_vllm(request: Request) -> Response:
    """How many requests are open."""
    return answer({"server_load": _service(request).open_count})


async def load_sglang(request: Request) -> Response:
    """The load as older routers read it: a list with an entry per rank, of which there is one."""
    load = _load(_service(request))
    ours = {
        "dp_rank": load["dp_rank"],
        "num_reqs": load["num_total_reqs"],
        "num_waiting_reqs": load["num_waiting_reqs"],
        "num_tokens": load["num_used_tokens"],
    }
    return answer([ours])


def _load(service: Service) -> dict[str, Any]:
    status = service.board.status
    capacity = service.token_capacity
    used = round(status.fullness * capacity)
    asked = sum(status.hits) + sum(status.misses) + sum(status.places)
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": status.running_count,
        "num_waiting_reqs": service.waiting_count,
        "num_total_reqs": service.open_count,
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": capacity,
        "max_running_requests": service.limits.running_max,
        "token_usage": status.fullness,
        "gen_throughput": service.board.tokens_per_s,
        "cache_hit_rate": status.cached_count / max(status.prompt_count, 1),
        "made_count": status.made_count,
        "turn_count": status.turn_count,
        "tokens_per_turn": status.made_count / max(status.turn_count, 1),
        "row_hits": sum(status.hits),
        "row_asked": asked,
        "row_hit_rate": sum(status.hits) / asked if asked else 1.0,
        "utilization": min(1.0, status.running_count / service.limits.running_max),
        "limiter": status.limiter,
        "oldest_wait_s": service.link.calls.oldest_wait_s,
        "state": service.state,
        "heard_s": service.link.engine.silent_s,
    }


def _graphs(service: Service) -> dict[str, Any] | None:
    """Counts of graphs; None if no step is a graph."""
    said = service.board.status.graphs
    return None if said is None else msgspec.structs.asdict(said)


def _memory(service: Service) -> dict[str, Any]:
    return {
        pool.name.replace(" ", "_"): {"used": pool.used, "capacity": pool.capacity}
        for pool in service.board.status.pools
    }


def _handoff(service: Service) -> dict[str, Any] | None:
    """What SGLang has no names for: counts, peers and the last handoffs."""
    return view(service.board.status, service.board.handoffs)


def _stages(service: Service) -> list[dict[str, Any]]:
    """The stages of a worker that runs in stages."""
    return stages.view(service.board.status.stages)


def _queues(service: Service) -> dict[str, Any]:
    return {
        "waiting": service.waiting_count,
        "grammar": 0,
        "paused": 0,
        "retracted": service.board.status.preempted_count,
        "prealloc_ready": 0,
    }


def _disagg(service: Service) -> dict[str, Any]:
    """The role, queues and transfers, as SGLang's routers read them."""
    status, handoffs, role = (
        service.board.status.handoff,
        service.board.handoffs,
        service.split.role,
    )
    if role == "both" or status is None:
        return {"disagg_mode": "null" if role == "both" else role}
    return {
        "disagg_mode": role,
        "prefill_queue_reqs": status.open_departure_count,
        "decode_queue_reqs": status.open_arrival_count,
        "kv_transfer_latency_ms": 1e3 * handoffs.latency.mean_s,
        "kv_transfer_speed_gb_s": handoffs.gb_per_s,
    }


async def metrics(request: Request) -> Response:
    text = exposition(_service(request))
    return Response(text, media_type=CONTENT_TYPE)


_PROBE: Final = "Alive: the engine is not lost. 200 also while it starts or drains; /ready is not."
DOORS: Final = (
    Door("GET", ("/health",), health, _PROBE),
    Door("GET POST", ("/ping",), health, _PROBE),
    Door("GET", ("/ready",), ready, "Send requests here."),
    Door("GET", ("/health_generate",), health_generate, "Alive enough to make tokens."),
    Door("GET", ("/v1/models",), models, "The names under which the model is served."),
    Door("GET", ("/v1/models/{model:path}",), one_model, "One of these names."),
    Door("GET", ("/version",), version, "The version of this server."),
    Door(
        "GET",
        ("/server_info", "/get_server_info"),
        server,
        "What was configured, where from, and what the engine chose.",
    ),
    Door("GET", ("/model_info", "/get_model_info"), model, "The model."),
    Door(
        "GET",
        ("/v1/loads", "/loads"),
        loads,
        "The load, as SGLang has it.",
        queries=("include",),
    ),
    Door("GET", ("/get_load",), load_sglang, "The load, as older SGLang has it."),
    Door("GET", ("/load",), load_vllm, "The load, as vLLM has it."),
    Door("GET", ("/metrics",), metrics, "Metrics for Prometheus.", gives=("text/plain",)),
)
