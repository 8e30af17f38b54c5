"""`ess serve`: from settings to a listening server and its engine process."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import zmq.asyncio
from msgspec.structs import replace

from ess import console
from ess.clock import Clock, RealClock
from ess.comm.experts.balance import check_places
from ess.engine.devices import DeviceReport
from ess.engine.entries.refusals import check_settings
from ess.errors import BadInput
from ess.flashtrans import ways
from ess.free_resources import cores_free, memory_free, memory_total
from ess.layout import ModelLayout
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.overlap import calibration
from ess.server.commands.start import banner
from ess.server.commands.start.devices.device_probing import device_reports
from ess.server.commands.start.devices.device_sizing import DeviceNeeds, plan_on_device
from ess.server.commands.start.devices.device_stages import plan_stages
from ess.server.commands.start.files.checkpoint import (
    EMBEDDED,
    Checkpoint,
    default_sampling,
    read_checkpoint,
    read_entries,
)
from ess.server.commands.start.files.hidden_files import check_tls
from ess.server.commands.start.files.words import Words, read_words, template_names
from ess.server.commands.start.http_config import uvicorn_config
from ess.server.commands.start.node import STOPPED_S, Node
from ess.server.commands.start.server_facts import (
    ServerFacts,
    kept_responses,
    launch_of,
    make_service,
)
from ess.server.commands.start.setting_checks import check_events
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.commands.start.sizing import (
    AUTO,
    MemoryPlan,
    check_sizes,
    now_or_never,
    plan_memory,
)
from ess.server.commands.start.topology import layers_of, ranks_here, starter
from ess.server.http import telemetry
from ess.server.process.board import Board
from ess.server.process.bounds import JOURNAL_BYTES, PROBE_CONNECTIONS, RESUME_S
from ess.server.process.engines.restarts import Restarts
from ess.server.process.engines.succession import EngineStart, Succession
from ess.server.process.fronts import Fronts, Start, endpoint_of
from ess.server.process.lifecycle import QuietServer, Running
from ess.server.process.link import EngineLink
from ess.server.process.listening import sockets
from ess.server.process.listening.stand_in import StandIn
from ess.server.process.logs.log_pipe import unblocked_stderr
from ess.server.process.own_folder import own_folder
from ess.server.process.pair.registration import registration_of
from ess.server.process.requests.journal import NO_RECOVERY, Recovery
from ess.server.process.requests.open_calls import FrontPlace
from ess.server.process.signals import Signals, taken_signals
from ess.server.process.tally import Shelf
from ess.server.process.whole_run import run_whole
from ess.units import format_bytes, parse_size

FRONT: Final = "ess.server.commands.start.front"
FILES_OF_OURS: Final = 128
BLOCK_BYTES: Final = 512  # in which the system counts what a file takes


def checked(settings: Settings) -> Checkpoint:
    """Reads the checkpoint, and refuses what can be found wrong in it and in files of settings
    before anything starts; `read_words` does the same for texts."""
    ways.check_environment()
    checkpoint = read_checkpoint(settings.model)
    check_tls(settings.tls_cert, settings.tls_key, settings.tls_ca)
    default_sampling(settings.default_sampling, checkpoint.defaults)
    check_events(settings)
    check_kept(settings.prefix_cache_dir)
    template_names(settings.default_chat_template_kwargs)
    if settings.dp_size > 1 and (count := checkpoint.config.expert_count):
        check_places(count, settings.dp_size, settings.redundant_experts)
    if settings.engine == "model":
        read_entries(Path(checkpoint.path))
    return checkpoint


def serve_with(resolved: Resolved, *, json: bool) -> int:
    """Serves until told to end; returns the exit code."""
    checkpoint = checked(resolved.settings)
    resolved = derived(resolved, checkpoint)
    layout = layout_of(resolved.settings, checkpoint)
    words = read_words(resolved.settings, checkpoint)
    resolved = noting_disk(calibrated(resolved, layout))
    plan = planned(resolved.settings, checkpoint, layout)
    resolved = sized(resolved, plan)
    settings = resolved.settings
    told = ServerFacts(
        resolved=resolved,
        checkpoint=checkpoint,
        plan=plan,
        layers=layers_of(settings, layout, checkpoint.config),
    )
    if ranks_here(settings).start > 0:
        return run_node(told)
    allow_files(settings.max_connections)
    with (
        taken_signals() as signals,
        listening(settings) as listeners,
        bootstrapping(settings, listeners[0]) as further,
        unblocked_stderr(settings.log_format),
    ):
        banner.greet(resolved, plan, url=url_of(settings, listeners[0]), json=json)
        logging.basicConfig(level=logging.WARNING, format="ess: %(message)s")
        return run_whole(_serve(told, words, listeners, further, signals))


def planned(
    settings: Settings, checkpoint: Checkpoint, layout: ModelLayout, *, shared_by: int = 1
) -> MemoryPlan:
    """The plan for the host's memory, of which `shared_by` workers have equal parts, or for the
    device's, after asking the device whether it can serve."""
    devices = device_reports(settings)
    empty = {name: replace(each, free_bytes=each.total_bytes) for name, each in devices.items()}
    told = (settings, checkpoint, layout)
    return now_or_never(
        partial(_plan, *told, devices, free=memory_free() // shared_by),
        partial(_plan, *told, empty, free=memory_total() // shared_by),
    )


def _plan(
    settings: Settings,
    checkpoint: Checkpoint,
    layout: ModelLayout,
    reports: Mapping[str, DeviceReport],
    *,
    free: int,
) -> MemoryPlan:
    share_bytes = checkpoint.share_bytes(settings.dp_size, redundant=settings.redundant_experts)
    if reports:
        entries = read_entries(Path(checkpoint.path))
        if settings.is_staged:
            return plan_stages(settings, checkpoint, entries, layout, reports, free=free)
        needed = DeviceNeeds(
            config=checkpoint.config,
            layout=layout,
            weight_bytes=kept_bytes(
                checkpoint.config,
                entries,
                settings.form,
                rank_count=settings.dp_size,
                redundant=settings.redundant_experts,
            ),
            file_bytes=share_bytes,
        )
        return plan_on_device(settings, needed, reports[settings.device], free=free)
    return plan_memory(
        settings,
        layout,
        positions_max=checkpoint.config.positions_max,
        weight_bytes=settings.team_size * share_bytes,
        free=free * (settings.nnodes if settings.dp_size == 1 else 1),
    )


def run_node(told: ServerFacts) -> int:
    """Runs the processes of a worker whose server is on another machine."""
    settings = told.resolved.settings
    launch = launch_of(settings, told.checkpoint, told.plan)
    ranks = ranks_here(settings)
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    node = Node(starter(settings, launch, told.layers, lambda number: []))
    with unblocked_stderr(settings.log_format):
        where = f"met at {settings.dist_init_addr}"
        console.note(f"ess: {shown} of {settings.world_size} here, {where}")
        return run_whole(node.run())


def check_kept(folder: str) -> None:
    """Makes the folder of pages, as the engine would: if that fails, or nothing can be written
    there, the start is refused at once."""
    try:
        if folder:
            Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "is no folder" if Path(folder).exists() else f"cannot be made: {error.strerror}"
        raise BadInput(f"prefix_cache_dir {folder} {why}") from None
    if folder and not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        raise BadInput(f"prefix_cache_dir {folder} cannot be written by user {os.geteuid()}")


@contextlib.contextmanager
def listening(settings: Settings) -> Iterator[Sequence[socket.socket]]:
    listeners = listeners_of(settings)
    try:
        yield listeners
    finally:
        sockets.close(listeners, settings.uds)


@contextlib.contextmanager
def bootstrapping(settings: Settings, main: socket.socket) -> Iterator[Sequence[socket.socket]]:
    """The second port of a prefill worker, with the same routes; the first process serves it."""
    if settings.bootstrap_port in (0, port_of(main)):
        yield []
        return
    listeners = sockets.listen(settings.host, settings.bootstrap_port, another="--bootstrap-port")
    try:
        yield listeners
    finally:
        sockets.close(listeners, "")


def port_of(listener: socket.socket) -> int:
    """The listener's port; 0 for a Unix socket."""
    return 0 if listener.family == socket.AF_UNIX else int(listener.getsockname()[1])


def derived(resolved: Resolved, checkpoint: Checkpoint) -> Resolved:
    """Adds what the checkpoint and the machine decide where no setting does. BadInput for a setting
    that contradicts the checkpoint."""
    settings = resolved.settings
    check_sizes(settings)
    kept_responses(settings)
    check_settings(checkpoint.config, settings)
    fresh: dict[str, Any] = {}
    if not settings.served_model_name:
        fresh["served_model_name"] = checkpoint.name
    if checkpoint.config.mtp_layer_count and resolved.origins["mtp"] == "default":
        fresh["mtp"] = 2
    if resolved.origins["row"] == "default" and settings.row != checkpoint.config.usual_row:
        fresh["row"] = checkpoint.config.usual_row
    if settings.threads == 0:
        here = settings.processes_here
        fresh["threads"] = max(1, (cores_free() - 1) // here)
    if not settings.model:
        fresh["model"] = EMBEDDED
    return resolved.deriving(**fresh)


def layout_of(settings: Settings, checkpoint: Checkpoint) -> ModelLayout:
    return checkpoint.config.layout(row=settings.row, has_mtp=settings.mtp > 1)


def calibrated(resolved: Resolved, layout: ModelLayout) -> Resolved:
    """Reads the calibration, so that a wrong one is refused before the engine starts."""
    path = resolved.settings.calibration
    if not path:
        return resolved
    note = f"the calibration {path} was measured on {calibration.load(path, layout).machine}"
    return replace(resolved, notes=(*resolved.notes, note))


def sized(
    resolved: Resolved,
    plan: MemoryPlan,
    *,
    but: Sequence[str] = (),
    written: Callable[[int], str] = format_bytes,
) -> Resolved:
    """Replaces automatic sizes by those of the plan, `but` some. Where workers get these sizes and
    plan with them, they are `written` to the byte: a rounded size may be too little for the longest
    request."""
    names = ["host_bytes", "slot_bytes", "index_bytes"]
    if plan.device is not None:
        names.append("graph_bytes")
    sizes = {name: written(getattr(plan, name)) for name in names}
    sizes["max_model_len"] = str(plan.length_max)
    auto = [name for name in sizes if getattr(resolved.settings, name) == AUTO]
    return resolved.deriving(**{name: sizes[name] for name in auto if name not in but})


def noting_disk(resolved: Resolved) -> Resolved:
    """Says where the disk has less room than pages may take. Pages that are there already are
    room too; those of stages are in folders of their own."""
    folder = resolved.settings.prefix_cache_dir
    if not folder:
        return resolved
    wanted, kept = parse_size(resolved.settings.prefix_cache_disk), Path(folder)
    if (room := shutil.disk_usage(kept).free + _slab_bytes(kept)) >= wanted:
        return resolved
    note = (
        f"prefix_cache_dir {folder} has room for {format_bytes(room)}, less than prefix_cache_disk,"
        f" {format_bytes(wanted)}: when its disk is full, no pages are stored until it has room"
    )
    return replace(resolved, notes=(*resolved.notes, note))


def _slab_bytes(folder: Path) -> int:
    """The bytes that slabs take on the disk. Another process may remove a slab or a folder
    meanwhile."""
    taken = 0
    for home, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".slab"):
                with contextlib.suppress(FileNotFoundError):
                    taken += Path(home, name).stat().st_blocks * BLOCK_BYTES
    return taken


def listeners_of(settings: Settings) -> list[socket.socket]:
    """A listener per server process; it takes the address before anything is loaded."""
    count = settings.server_processes
    if settings.uds:
        return sockets.listen_at(Path(settings.uds), count)
    return sockets.listen(settings.host, settings.port, count)


def allow_files(connections_max: int) -> None:
    """Raises the limit of open files: each connection is one; at the limit probes go unanswered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections_max + PROBE_CONNECTIONS + FILES_OF_OURS
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise BadInput(
            f"max_connections is {connections_max:,}; this process may open {hard:,} files, "
            f"{FILES_OF_OURS} of them are for other things: lower max_connections, or raise the"
            " limit of open files"
        )
    if soft != resource.RLIM_INFINITY and needed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def url_of(settings: Settings, listener: socket.socket) -> str:
    scheme = "https" if settings.tls_cert else "http"
    if settings.uds:
        return f"{scheme}+unix://{quote(settings.uds, safe='')}{settings.root_path}"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}{settings.root_path}"


async def _serve(
    told: ServerFacts,
    words: Words,
    listeners: Sequence[socket.socket],
    further: Sequence[socket.socket],
    signals: Signals,
) -> int:
    settings, clock, count = told.resolved.settings, RealClock(), len(listeners)
    port = port_of(further[0] if further else listeners[0])
    told = replace(told, port=port)
    board = Board(clock)
    place = FrontPlace(count=count)
    recovery = recovery_of(settings)
    with own_folder() as folder, engine_link(folder, board, clock, place, recovery) as link:
        service = make_service(told, words, link=link, board=board)
        service.shelf = Shelf(folder, count=count) if count > 1 else None
        with telemetry.provided(settings.otlp_endpoint, model=service.name) as spans:
            server = QuietServer(uvicorn_config(settings, service, spans=spans))
            fronts = Fronts(FRONT, starts_of(told, folder, listeners), link, StandIn(server))
            engines = Succession(start_of(told, folder, count), link, fronts, clock)
            running = Running(service, server, engines, fronts, settings=settings, clock=clock)
            running.registration = registration_of(settings, url_of(settings, listeners[0]), port)
            async with service.texts:
                return await running.run([listeners[0], *further], signals)


def start_of(told: ServerFacts, folder: str, count: int) -> EngineStart:
    """How to start, and restart, the engine of a server with `count` processes."""
    settings = told.resolved.settings
    launch = launch_of(settings, told.checkpoint, told.plan)

    def endpoints_of(engine: int) -> Sequence[str]:
        return [endpoint_of(folder, front, engine) for front in range(count)]

    return EngineStart(
        folder=folder,
        start=starter(settings, launch, told.layers, endpoints_of),
        watchdog_s=settings.watchdog_s,
        stopped_s=STOPPED_S if settings.dp_size > 1 else settings.watchdog_s,
        restarts=Restarts(
            settings.engine_restarts,
            RealClock(),
            waits_for_others=settings.nnodes > 1 or settings.dp_size > 1,
        ),
    )


@contextlib.contextmanager
def engine_link(
    folder: str, board: Board, clock: Clock, place: FrontPlace, recovery: Recovery
) -> Iterator[EngineLink]:
    context = zmq.asyncio.Context()
    endpoint = endpoint_of(folder, place.front)
    link = EngineLink(context, endpoint, board=board, clock=clock, place=place, recovery=recovery)
    try:
        yield link
    finally:
        link.close()
        context.destroy(linger=200)


def recovery_of(settings: Settings) -> Recovery:
    """The processes of a server divide the connections, so each gets a part of the memory."""
    if settings.recover == "fail":
        return NO_RECOVERY
    return Recovery(bytes_max=JOURNAL_BYTES // settings.server_processes, wait_s=RESUME_S)


def starts_of(told: ServerFacts, folder: str, listeners: Sequence[socket.socket]) -> list[Start]:
    """The start of every process but the first."""
    packed = msgspec.Raw(msgspec.json.encode(told))
    return [
        Start(
            told=packed,
            folder=folder,
            listener=listeners[front].fileno(),
            front=front,
            count=len(listeners),
        )
        for front in range(1, len(listeners))
    ]
