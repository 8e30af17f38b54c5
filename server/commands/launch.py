"""`ess serve`: one command from nothing to a server."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvicorn
import uvloop
import zmq.asyncio

from ess.clock import RealClock
from ess.engine.process.messages import Launch
from ess.errors import BadInput, Unavailable
from ess.models.chat.reply import PlainParser
from ess.models.chat.styles import style_of
from ess.models.config import ModelConfig
from ess.models.registry import read_config
from ess.models.tokenizer import Tokenizer
from ess.models.weights.folder import Folder
from ess.server.commands import banner, settings
from ess.server.commands.settings import Resolved, Settings
from ess.server.commands.sizing import AUTO, MemoryPlan, plan_memory
from ess.server.http import telemetry
from ess.server.http.app import make_app
from ess.server.http.protocol import limited
from ess.server.process.board import Board
from ess.server.process.child import EngineChild
from ess.server.process.lifecycle import QuietServer, Running
from ess.server.process.link import EngineLink
from ess.server.process.service import Limits, SamplingDefaults, Service
from ess.units import format_bytes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EMBEDDED: Final = "ess-embedded"
PROGRAM: Final = {"model": "ess.engine.process.worker", "paced": "ess.engine.process.fake_engine"}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the server needs of a model's folder: no tensor."""

    path: str
    name: str
    config: ModelConfig
    architecture: str
    eos_ids: tuple[int, ...]
    defaults: SamplingDefaults
    weight_bytes: int


def read_checkpoint(model: str) -> Checkpoint:
    path = Path(model) if model and model != EMBEDDED else embedded_path()
    if not path.is_dir():
        raise BadInput(f"the model {model!r} is not a folder with config.json and weights")
    folder = Folder(path)
    try:
        raw = folder.read_json("config.json")
        has_defaults = "generation_config.json" in folder.names()
        recommended = folder.read_json("generation_config.json") if has_defaults else {}
    finally:
        folder.close()
    weights = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Checkpoint(
        path=str(path),
        name=EMBEDDED if path == embedded_path() else path.resolve().name,
        config=read_config(raw),
        architecture=str((raw.get("architectures") or ["unknown"])[0]),
        eos_ids=_eos_ids(raw.get("eos_token_id"), recommended.get("eos_token_id")),
        defaults=_defaults(recommended),
        weight_bytes=weights,
    )


def embedded_path() -> Path:
    from ess import models

    return Path(models.__file__).parent / "tiny" / "checkpoint"


def _eos_ids(*given: Any) -> tuple[int, ...]:
    listed = [one for each in given for one in (each if isinstance(each, list) else [each])]
    return tuple(sorted({one for one in listed if isinstance(one, int)}))


def _defaults(recommended: Mapping[str, Any]) -> SamplingDefaults:
    """What the checkpoint recommends; a checkpoint that says not to sample is greedy."""
    if recommended.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: recommended[name] for name in names if recommended.get(name) is not None}
    try:
        return msgspec.convert(given, SamplingDefaults)
    except msgspec.ValidationError as error:
        raise BadInput(f"generation_config.json: {error}") from None


def serve_with(resolved: Resolved, *, json: bool = False) -> int:
    """Serve until told to end; the exit code."""
    found = resolved.settings
    checkpoint = read_checkpoint(found.model)
    resolved = derived(resolved, checkpoint)
    found = resolved.settings
    config = checkpoint.config
    if found.mtp == 1:
        config = msgspec.structs.replace(config, mtp_layer_count=0)
    plan = plan_memory(
        found,
        config.layout(row=found.row),
        positions_max=config.positions_max,
        weight_bytes=checkpoint.weight_bytes,
    )
    resolved = sized(resolved, plan)
    listener = listen(found.host, found.port)
    try:
        banner.greet(resolved, plan, url=url_of(found, listener), json=json)
        logging.basicConfig(level=logging.WARNING, format="ess: %(message)s")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(resolved, checkpoint, plan, listener))
    finally:
        listener.close()


def derived(resolved: Resolved, checkpoint: Checkpoint) -> Resolved:
    """What the checkpoint and the machine decide, where nobody else has."""
    found, origins = resolved.settings, dict(resolved.origins)
    fresh: dict[str, Any] = {}
    if not found.served_model_name:
        fresh["served_model_name"] = checkpoint.name
    if not checkpoint.config.mtp_layer_count and origins["mtp"] == "default":
        fresh["mtp"] = 1
    if found.threads == 0:
        fresh["threads"] = max(1, (os.cpu_count() or 1) - 1)
    if not found.model:
        fresh["model"] = EMBEDDED
    origins.update(dict.fromkeys(fresh, "derived"))
    chosen = msgspec.structs.replace(found, **fresh)
    return msgspec.structs.replace(resolved, settings=chosen, origins=origins)


def sized(resolved: Resolved, plan: MemoryPlan) -> Resolved:
    """What was left to the machine, as it turned out."""
    names = ("host_bytes", "slot_bytes", "index_bytes")
    sizes = {name: format_bytes(getattr(plan, name)) for name in names}
    sizes["max_model_len"] = str(plan.length_max)
    fresh = {n: size for n, size in sizes.items() if getattr(resolved.settings, n) == AUTO}
    origins = dict(resolved.origins)
    for name in fresh:
        origins[name] = "derived"
    chosen = msgspec.structs.replace(resolved.settings, **fresh)
    return msgspec.structs.replace(resolved, settings=chosen, origins=origins)


def listen(host: str, port: int) -> socket.socket:
    """The port is taken before anything is loaded."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, number)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from None
    made.setblocking(False)
    return made


def url_of(found: Settings, listener: socket.socket) -> str:
    host = f"[{found.host}]" if ":" in found.host else found.host
    scheme = "https" if found.tls_cert else "http"
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


async def _serve(
    resolved: Resolved, checkpoint: Checkpoint, plan: MemoryPlan, listener: socket.socket
) -> int:
    found, clock = resolved.settings, RealClock()
    folder = tempfile.mkdtemp(prefix="ess-")  # for us alone, as mkdtemp makes them
    context = zmq.asyncio.Context()
    endpoint = f"ipc://{folder}/engine"
    board = Board(clock)
    link = EngineLink(context, endpoint, board=board, clock=clock)
    try:
        service = make_service(resolved, checkpoint, plan, link=link, board=board)
        with telemetry.provided(found.otlp_endpoint, model=service.name) as spans:
            server = QuietServer(uvicorn_config(found, service, spans=spans))
            child = await EngineChild.start(
                PROGRAM[found.engine], launch_of(found, checkpoint, plan), endpoint
            )
            running = Running(service, server, child, settings=found, clock=clock)
            return await running.run(listener)
    finally:
        link.close()
        context.destroy(linger=200)
        shutil.rmtree(folder, ignore_errors=True)


def make_service(
    resolved: Resolved,
    checkpoint: Checkpoint,
    plan: MemoryPlan,
    *,
    link: EngineLink,
    board: Board,
) -> Service:
    found = resolved.settings
    tokenizer = Tokenizer(checkpoint.path)
    style = style_of(checkpoint.path, tokenizer)
    return Service(
        names=tuple(name.strip() for name in found.served_model_name.split(",")),
        model_type=checkpoint.config.family,
        architecture=checkpoint.architecture,
        tokenizer=tokenizer,
        style=style,
        is_marked=not isinstance(style.parser(thinking=False), PlainParser),
        eos_ids=checkpoint.eos_ids,
        vocabulary=min(len(tokenizer), checkpoint.config.vocab_size),
        token_capacity=plan.token_capacity,
        limits=Limits(
            running_max=found.max_running,
            waiting_max=found.max_waiting,
            length_max=plan.length_max,
            tokens_default=found.default_max_tokens,
            keep_alive_s=found.keep_alive_s,
            stall_s=found.stall_s,
            body_max=settings.size_of(found.body_bytes, of=1 << 30),
        ),
        defaults=checkpoint.defaults,
        link=link,
        board=board,
        clock=RealClock(),
        described=resolved.shown(),
        weight_bytes=plan.weight_bytes,
        compat=settings.compat_of(found),
    )


def launch_of(found: Settings, checkpoint: Checkpoint, plan: MemoryPlan) -> Launch:
    return Launch(
        model=checkpoint.path,
        form=found.form,
        row=found.row,
        modes=found.overlap,
        promise=found.promise,
        mtp=found.mtp,
        mtp_auto=found.mtp_auto,
        tbo=found.tbo,
        tpot_ms=found.tpot_ms or None,
        deterministic=found.deterministic,
        depth=found.depth,
        budget_every=found.budget_every,
        batch_max=found.max_running,
        chunk_tokens=found.chunk_tokens,
        length_max=plan.length_max,
        slot_bytes=plan.slot_bytes,
        host_bytes=plan.host_bytes,
        index_bytes=plan.index_bytes,
        threads=found.threads,
        warm=found.warmup,
        verify_every=found.verify,
        pace_s=found.pace_ms / 1e3,
    )


def uvicorn_config(
    found: Settings, service: Service, *, spans: TracerProvider | None = None
) -> uvicorn.Config:
    protocol = limited(
        connections_max=found.max_connections,
        head_bytes_max=settings.size_of(found.header_bytes, of=1 << 20),
        tally=service.tally,
    )
    return uvicorn.Config(
        make_app(service, keys=settings.keys_of(found), spans=spans),
        http=protocol,
        ws="none",
        lifespan="off",
        proxy_headers=False,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(found.idle_s),
        timeout_graceful_shutdown=2,
        ssl_certfile=found.tls_cert or None,
        ssl_keyfile=found.tls_key or None,
    )


def serve_flags(flags: Mapping[str, Any], *, config: Path | None, json: bool) -> int:
    resolved = settings.resolve(flags, config=config, environment=os.environ)
    return serve_with(resolved, json=json)
