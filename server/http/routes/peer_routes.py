"""Routes of a prefill worker for other workers and routers; absent from other workers.

`/peers` is for our decode workers, which get the metadata of all stages of the engine there. It is
authenticated by the seal of their common secret, not by the API key, and answers only that.
`/route` and `/query` have the forms of SGLang's and vLLM's Mooncake bootstrap servers.
"""

from __future__ import annotations

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from ess.errors import BadInput
from ess.server.http.openapi.door import Door
from ess.server.http.responses import Absent, Foreign, answer
from ess.server.process.pair.peers import engine_id
from ess.server.process.service import Service
from ess.units import PAGE_ROWS

BYTES: Final = "application/octet-stream"
RANKS: Final = (
    *("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"),
    *("engine_rank", "target_dp_group"),
)
STAGE_RANKS: Final = frozenset({"target_pp_rank", "engine_rank"})


async def meet(request: Request) -> Response:
    """Passes on to the engine only metadata that a holder of the secret has sealed."""
    service = _prefill_service(request)
    assert service.split.seal is not None, "a worker of a pair has a secret"
    content = await request.body()
    try:
        service.split.seal.opened(content)
    except BadInput:
        raise Foreign("the body is not sealed with the secret of this server's peers") from None
    service.check_loaded()
    met = await service.link.meet("", content)
    if met.sentence:
        raise BadInput(met.sentence)
    return Response(met.metadata, media_type=BYTES)


async def route(request: Request) -> Response:
    """The worker's topology: all its stages are reached here, as one rank of each other kind."""
    service = _prefill_service(request)
    service.check_loaded()
    for name in RANKS:
        count = service.stage_count if name in STAGE_RANKS else 1
        if request.query_params.get(name, "-1") not in ("-1", *map(str, range(count))):
            raise Absent(f"{name} must be 0 to {count - 1}: there are no other ranks")
    return answer(_topology(service))


def _topology(service: Service) -> dict[str, Any]:
    row = service.described.get("row", {}).get("value", "fp8")
    return {
        "attn_tp_size": 1,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": service.stage_count,
        "page_size": PAGE_ROWS,
        "kv_cache_dtype": "fp8_e4m3" if row == "fp8" else "bfloat16" if row == "bf16" else row,
        "follow_bootstrap_room": False,
        "load_balance_method": "round_robin",
        "engine_id": engine_id(service.epoch),
        "backend": "ess",
    }


async def query(request: Request) -> Response:
    service = _prefill_service(request)
    service.check_loaded()
    called = service.split.called(request.headers.get("host", ""))
    stages = {str(rank): str(called) for rank in range(service.stage_count)}
    ranks = {"engine_id": engine_id(service.epoch), "worker_addr": {"0": stages}}
    return answer({"0": ranks})


def _prefill_service(request: Request) -> Service:
    service: Service = request.app.state.service
    if service.split.role != "prefill":
        path, role = request.scope["path"], service.split.role
        raise Absent(f"{path} is a prefill worker's, and this server's role is {role}")
    return service


DOORS: Final = (
    Door(
        "POST",
        ("/peers",),
        meet,
        "Decode workers meet a prefill worker.",
        gives=(BYTES,),
        takes=BYTES,
    ),
    Door("GET", ("/route",), route, "A prefill worker's ranks, as SGLang has it.", queries=RANKS),
    Door("GET", ("/query",), query, "A prefill worker's engines, as vLLM's Mooncake has it."),
)
