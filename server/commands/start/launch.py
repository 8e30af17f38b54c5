"""`ess serve`: from settings to a listening server and its engine process."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec
import zmq.asyncio
from msgspec.structs import replace

from ess import console
from ess.clock import Clock, RealClock
from ess.errors import BadInput
from ess.server.commands.start import banner
from ess.server.commands.start.files.words import Words, read_words
from ess.server.commands.start.http_config import uvicorn_config
from ess.server.commands.start.node import STOPPED_S, Node
from ess.server.commands.start.resolving import (
    calibrated,
    checked,
    derived,
    layout_of,
    noting_disk,
    planned,
    sized,
)
from ess.server.commands.start.server_facts import ServerFacts, launch_of, make_service
from ess.server.commands.start.settings import Resolved, Settings
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

FRONT: Final = "ess.server.commands.start.front"
FILES_OF_OURS: Final = 128


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


def run_node(told: ServerFacts) -> int:
    """Runs the processes of a worker whose server is on another machine."""
    settings = told.resolved.settings
    launch = launch_of(settings, told.checkpoint, told.plan)
    ranks = ranks_here(settings)
    shown = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
    start = starter(settings, launch, told.layers, lambda number: [])
    node = Node(start, drain_s=settings.drain_s)
    with unblocked_stderr(settings.log_format):
        where = f"met at {settings.dist_init_addr}"
        console.note(f"ess: {shown} of {settings.world_size} here, {where}")
        return run_whole(node.run())


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
