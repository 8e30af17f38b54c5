"""`ess serve --dp-size 4 --executor ray`: Ray finds room for the ranks and starts them again.

    this command              a Ray actor per rank, which holds its bundle of a placement group
    place        ------->     reserves the node's address, a port for HTTP and one to meet at
    serve        ------->     runs an ordinary `ess serve` with this rank until that ends
    ready        ------->     returns when /ready of that server says 200

No token passes through Ray. A server that ends without being asked takes its actor with it; Ray
starts the actor again on its bundle and repeats the calls (`max_restarts`, `max_task_retries`), so
the server comes back at the same address. A server that was never ready is not started again:
whatever stopped it would stop it again. A server's log is its actor's, where Ray keeps it.

This module is imported by `--executor ray`, and by Ray's workers, which need ess and the model's
folder on every node. RAY_ADDRESS names the cluster; without it Ray starts on this machine alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ess import console
from ess.errors import Unavailable, not_installed
from ess.ports import kept_port
from ess.server.commands.pd.keeper import LEASHED
from ess.server.commands.pd.kept import ask, write_private
from ess.server.commands.pd.leashed import Program
from ess.server.commands.pd.shares import clean, told_settings
from ess.server.commands.ranks.servers import ESS, OF_RANK, new_secret, show
from ess.server.commands.start.settings import Resolved, Settings
from ess.server.commands.start.written_addresses import is_loopback
from ess.server.process.logs.log_pipe import unblocked_stderr
from ess.server.process.own_folder import own_folder
from ess.server.process.signals import HANG_S

ROOM_S: Final = 60.0
POLL_S: Final = 0.1
LOOK_S: Final = 0.5
PAUSE_S: Final = 0.5
OBJECT_BYTES: Final = 80 << 20
"""Ray's object store, if we start Ray: our objects are small."""


class ActorPlace(NamedTuple):
    address: str
    port: int
    meeting_port: int


class RankActor:
    """The actor: its methods run in threads of a Ray process."""

    def __init__(self) -> None:
        self._kept = contextlib.ExitStack()
        self._server: subprocess.Popen[bytes] | None = None
        self._was_ready = False
        self._ending = threading.Event()

    def place(self, host: str, port: int) -> ActorPlace:
        """The node's address and ports, which are reserved from now on."""
        import ray

        address = ray.util.get_node_ip_address()
        own = self._kept.enter_context(kept_port(host, port))
        return ActorPlace(address, own, self._kept.enter_context(kept_port(address)))

    def serve(self, told: Mapping[str, Any], secret: str) -> str:
        """Runs the server until it is asked to end; returns how it ended if it was never ready."""
        if self._ending.is_set():
            return ""
        with own_folder() as folder, kept_port(told["host"], told["port"]):
            self._server = _started(Path(folder), told, secret)
            code = self._server.wait()
        if self._ending.is_set():
            return ""
        how = f"rank {told['dp_rank']} is gone: its server ended with code {code}"
        if not (self._was_ready or _is_second_life()):
            return how
        console.note(f"ess: {how}; Ray starts it again")
        time.sleep(PAUSE_S)
        os._exit(1)

    def ready(self, url: str) -> int:
        """Waits until the server is ready; returns its process id."""
        while ask(url, "/ready")[0] != 200 or self._server is None:
            time.sleep(POLL_S)
        self._was_ready = True
        return self._server.pid

    def end(self) -> None:
        self._ending.set()
        if self._server is not None:
            self._server.terminate()


def _started(folder: Path, told: Mapping[str, Any], secret: str) -> subprocess.Popen[bytes]:
    """Starts the server, which ends with this process and writes to its log."""
    write_private(folder / "peer.secret", secret)
    given = {**told, "peer_secret_file": str(folder / "peer.secret")}
    path = folder / "rank.json"
    write_private(path, msgspec.json.encode(given).decode())
    program = Program(home=ESS, words=("serve", "--config", str(path)), parent=os.getpid())
    words = [sys.executable, "-m", LEASHED]
    server = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=2, env=clean(os.environ), start_new_session=True
    )
    assert server.stdin is not None, "stdin is a pipe"
    server.stdin.write(msgspec.json.encode(program) + b"\n")
    server.stdin.flush()
    return server


def _is_second_life() -> bool:
    import ray

    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def serve_on_ray(resolved: Resolved, *, json: bool) -> int:
    """Serves until told to end; returns the exit code."""
    try:
        import ray
    except ModuleNotFoundError:
        raise not_installed("ray", extra="ray") from None
    own = {} if "RAY_ADDRESS" in os.environ else {"object_store_memory": OBJECT_BYTES}
    with unblocked_stderr(resolved.settings.log_format):
        for sentence in resolved.notes:
            console.note(f"ess: {sentence}")
        ray.init(logging_level="warning", **own)
        try:
            return RayCrew(ray, resolved).run(json=json)
        finally:
            ray.shutdown()


class RayCrew:
    """Owns the placement group and the actors."""

    def __init__(self, ray: Any, resolved: Resolved) -> None:
        self._ray = ray
        self._resolved = resolved
        self._settings: Settings = resolved.settings
        self._stop = threading.Event()

    def run(self, *, json: bool) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        bundles = [{"CPU": self._threads}] * self._size
        group = self._ray.util.placement_group(bundles, strategy="SPREAD")
        try:
            if not group.wait(ROOM_S):
                need = f"{self._size} times {self._threads} CPUs (--threads)"
                raise Unavailable(f"Ray found no room for {need} within {ROOM_S:g} s")
            return self._served([self._actor(group, at) for at in range(self._size)], json)
        finally:
            self._ray.util.remove_placement_group(group)

    @property
    def _size(self) -> int:
        return self._settings.dp_size

    @property
    def _threads(self) -> int:
        return max(1, self._settings.threads)

    def _actor(self, group: Any, at: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=at
        )
        remote = self._ray.remote(RankActor).options(
            num_cpus=self._threads,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=8,
            scheduling_strategy=strategy,
        )
        return remote.remote()

    def _served(self, actors: Sequence[Any], json: bool) -> int:
        """Returns 0 if it was asked to end."""
        settings, get = self._settings, self._ray.get
        ports = [settings.port + at if settings.port else 0 for at in range(self._size)]
        placed = [
            actor.place.remote(settings.host, port)
            for actor, port in zip(actors, ports, strict=True)
        ]
        places = [ActorPlace(*place) for place in get(placed)]
        meeting = f"{places[0].address}:{places[0].meeting_port}"
        secret = settings.peer_secret or new_secret()
        serving = [
            actor.serve.remote(self._settings_of(at, place, meeting), secret)
            for at, (actor, place) in enumerate(zip(actors, places, strict=True))
        ]
        urls = [f"http://{self._seen(place)}:{place.port}" for place in places]
        asked = [actor.ready.remote(url) for actor, url in zip(actors, urls, strict=True)]
        try:
            if self._watched(serving, asked):
                names = [f"rank-{at}" for at in range(self._size)]
                show(list(zip(names, urls, get(asked), strict=True)), json=json)
                self._watched(serving, [])
            return 0
        finally:
            for actor in actors:
                actor.end.remote()
            within_s = settings.drain_s + HANG_S
            self._ray.wait(serving, num_returns=len(serving), timeout=within_s)

    def _settings_of(self, rank: int, place: ActorPlace, meeting: str) -> dict[str, Any]:
        return {
            **told_settings(self._resolved, but=OF_RANK),
            "dp_rank": rank,
            "dist_init_addr": meeting,
            "host": self._settings.host,
            "port": place.port,
            "threads": self._threads,
        }

    def _seen(self, place: ActorPlace) -> str:
        """The server's host as its node sees it, or as others do if it listens for them."""
        return self._settings.host if is_loopback(self._settings.host) else place.address

    def _watched(self, serving: Sequence[Any], asked: Sequence[Any]) -> bool:
        """Waits for all of `asked`, or for ever if that is empty; False if told to end meanwhile.
        Unavailable if a server is gone for good."""
        while not self._stop.is_set():
            ended, _ = self._ray.wait(list(serving), timeout=LOOK_S)
            for how in self._ray.get(ended):
                raise Unavailable(f"{how}; its log says why")
            if asked and not self._ray.wait(list(asked), num_returns=len(asked), timeout=0)[1]:
                return True
        return False
