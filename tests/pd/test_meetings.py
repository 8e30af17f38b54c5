"""Workers meet: with the secret or not at all, again after a restart, whichever answers."""

from __future__ import annotations

import asyncio
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq.asyncio

from ess.engine.process.fake_engine import identity_of
from ess.engine.process.messages import Met, Ready
from ess.errors import BadInput
from ess.ports import kept_port
from ess.server.commands.start.settings import resolve
from ess.server.process.board import Board
from ess.server.process.bounds import METADATA_BYTES_MAX
from ess.server.process.link import EngineLink
from ess.server.process.pair import peers
from ess.server.process.pair.addresses import read_peers
from ess.server.process.pair.peers import Peers
from ess.transfer.endpoint import Identity
from ess.transfer.messages import Heartbeat, Seal, new_epoch
from tests.pd.pairs import SECRET, Half, until
from tests.pd.test_dialects import PROMPT, decode, pair, post, prefill, rooms_at
from tests.server.harness import Served, raw
from tests.support.manual_clock import ManualClock
from tests.support.routers import ask


def meet(served: Served, content: bytes, *more: bytes) -> int:
    with raw(served.port) as made:
        head = (b"POST /peers HTTP/1.1", b"host: evil.example", *more)
        length = b"content-length: %d" % len(content)
        made.sendall(b"\r\n".join((*head, length, b"connection: close", b"\r\n")) + content)
        return int(made.makefile("rb").readline().split()[1])


def test_only_who_has_the_secret_is_met():
    """Under any name, and with no API key: what counts is the seal."""
    ours, foreign = identity_of(SECRET), identity_of("another secret, long enough")
    layout = Identity(epoch=new_epoch(), seal=Seal(SECRET.encode()), layout=b"x" * 32)
    good = ours.hello()
    flipped = bytes([*good[:50], good[50] ^ 1, *good[51:]])
    with prefill() as left:
        assert meet(left, good) == 200
        for content in (b"", b"{}", good[:-1], good + b"x", flipped, foreign.hello(), bytes(99)):
            assert meet(left, content) == 403
        assert meet(left, layout.hello()) == 400
        beat = ours.seal.sealed(Heartbeat(1), sender=ours.epoch, receiver=0)
        assert meet(left, beat) == 400
        assert meet(left, bytes(METADATA_BYTES_MAX)) == 403
        assert meet(left, bytes(METADATA_BYTES_MAX + 1)) == 413
        assert meet(left, good, b"sec-fetch-site: cross-site") == 200


def test_whatever_goes_wrong_a_meeting_is_tried_again(monkeypatch: pytest.MonkeyPatch):
    """A host's name is looked up in a thread, and the system may have none left."""
    failures: list[Exception] = [
        RuntimeError("can't start new thread"),
        OSError(113, "No route to host"),
    ]
    said: list[str] = []

    async def post(*asked: object) -> bytes:
        said.extend(line["why"] for line in tables[0].lines())
        if failures:
            raise failures.pop(0)
        return b"theirs"

    async def until_ready() -> object:
        return SimpleNamespace(metadata=b"ours")

    async def meet(address: str, metadata: bytes) -> Met:
        return Met(address, 7, b"ours")

    async def until_lost(ready: object) -> None:
        await asyncio.Event().wait()

    engine = SimpleNamespace(until_ready=until_ready, until_lost=until_lost)
    link = SimpleNamespace(engine=engine, meet=meet)
    named = read_peers("127.0.0.1:9")
    tables = [Peers(named, link, ManualClock())]  # type: ignore[arg-type]

    async def act() -> None:
        (met,) = tables
        running = asyncio.ensure_future(met.run())
        while met.missing:
            assert not running.done(), "no peer is met any more"
            await asyncio.sleep(0)
        running.cancel()

    monkeypatch.setattr(peers, "post", post)
    monkeypatch.setattr(peers, "MEET_EVERY_S", 0.0)
    asyncio.run(asyncio.wait_for(act(), 30.0))
    assert said[:3] == [peers.NOT_YET, "can't start new thread", "No route to host"]


@pytest.mark.parametrize("is_late", [False, True])
def test_the_next_engine_meets_all_as_soon_as_it_is_ready(
    is_late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Also where the engine is replaced during a meeting. Until then the peer is not up: prompts
    that it has made would be computed here, and nobody would know."""
    asked: list[bytes] = []
    told: list[bytes] = []
    answers = asyncio.Event()

    async def post(at: object, path: str, ours: bytes) -> bytes:
        asked.append(ours)
        await answers.wait()
        return b"theirs"

    async def meet(address: str, theirs: bytes) -> Met:
        told.append(theirs)
        return Met(address, 7, b"ours")

    async def come(numbers: list[bytes]) -> None:
        while asked != numbers:
            await asyncio.sleep(0)

    async def act() -> None:
        context, clock = zmq.asyncio.Context(), ManualClock()
        link = EngineLink(context, f"ipc://{tmp_path}/one", board=Board(clock), clock=clock)
        monkeypatch.setattr(link, "meet", meet)
        met = Peers(read_peers("127.0.0.1:9"), link, clock)
        running = asyncio.ensure_future(met.run())
        link._hear(Ready(vocabulary=9, length_max=9, load_s=0.0, metadata=b"one"))
        await come([b"one"])
        if not is_late:
            answers.set()
            while met.missing:
                await asyncio.sleep(0)
        answers.clear()
        link.interrupt("it broke")
        link.renew(f"ipc://{tmp_path}/two")
        link._hear(Ready(vocabulary=9, length_max=9, load_s=0.0, metadata=b"two"))
        await come([b"one", b"two"])
        assert met.missing == ["127.0.0.1:9"]
        assert is_late or "the next one has not met it" in met.lines()[0]["why"]
        answers.set()
        while met.missing:
            await asyncio.sleep(0)
        assert told == [b"theirs"] * (1 if is_late else 2), "of a meeting that was given up"
        running.cancel()
        link.close()
        context.destroy(linger=0)

    monkeypatch.setattr(peers, "post", post)
    monkeypatch.setattr(peers, "MEET_EVERY_S", 3600.0)
    asyncio.run(asyncio.wait_for(act(), 30.0))


def test_a_decode_worker_that_has_no_peers_is_healthy():
    with decode("127.0.0.1:9,10.255.255.1:9") as served:
        assert ask(served.url + "/health").status == 200
        told = ask(served.url + "/ready")
        assert (told.status, told.document["status"]) == (200, "ready")
        assert told.document["missing"] == ["127.0.0.1:9", "10.255.255.1:9"]
        assert post(served, PROMPT).status == 200


ANSWERS = {
    b"": "HTTP",
    b"garbage\r\n\r\n": "HTTP",
    b"HTTP/1.1 200 OK\r\n\r\n": "with a length",
    b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n": "with a length",
    b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n": "99,999,999 bytes",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab": "HTTP",
    b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nab": "a frame of 2 bytes",
    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n": "302",
    b"HTTP/1.1 403 No\r\ncontent-length: 3\r\n\r\nbad": "403: bad",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 20_000: "HTTP",
}


@contextmanager
def answering(content: bytes) -> Iterator[int]:
    """What may be at a peer's address, and what comes of it."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            self.request.sendall(content)
            self.request.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


def test_whatever_answers_at_a_peer_s_address_is_no_peer():
    with ExitStack() as held:
        ports = {held.enter_context(answering(each)): says for each, says in ANSWERS.items()}
        served = held.enter_context(decode(",".join(f"127.0.0.1:{port}" for port in ports)))

        def told() -> dict[str, str]:
            lines = served.service.split.peers.lines()
            return {line["address"]: line["why"] for line in lines}

        until(lambda: not any("not been met" in why for why in told().values()), "an answer each")
        for port, says in ports.items():
            assert says in told()[f"127.0.0.1:{port}"]
        assert len(served.service.split.peers.missing) == len(ports)
        assert ask(served.url + "/health").status == 200


def test_a_key_protects_all_but_the_meeting():
    with prefill(keys=("right",)) as left:
        assert meet(left, identity_of(SECRET).hello()) == 200
        assert [ask(left.url + path).status for path in ("/route", "/query")] == [401, 401]
        assert ask(left.url + "/query", Authorization="Bearer right").status == 200


def test_workers_meet_when_all_connections_are_taken():
    with (
        prefill(connections_max=2) as left,
        raw(left.port) as one_client,
        raw(left.port) as another,
    ):
        until(lambda: len(left.connections) == 2, "a full server")
        assert meet(left, identity_of(SECRET).hello()) == 200
        assert ask(left.url + "/query").status == 503
        assert one_client.fileno() != another.fileno()


def test_a_prefill_worker_that_drains_is_still_met():
    with pair() as (left, _):
        left.service.draining = True
        assert meet(left, identity_of(SECRET).hello()) == 200
        assert post(left, {**PROMPT, **rooms_at(left, 3)}).status == 503


@pytest.mark.slow
def test_a_restarted_prefill_worker_is_met_again_under_its_new_epoch():
    with kept_port("127.0.0.1") as kept, Half("prefill", "--port", str(kept)) as left:
        port = str(kept)
        with Half("decode", "--peers", f"127.0.0.1:{port}") as right:
            [before] = right.wait_met().peers
            given = left.ask("/v1/completions", {**PROMPT, **first_leg()}).document
            left.process.kill()
            left.process.wait()
            until(lambda: right.ask("/ready").document["missing"], "the loss")
            assert right.ask("/health").status == 200
            rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": int(port)}
            lost = right.ask("/v1/completions", {**PROMPT, **rooms, "bootstrap_room": 1})
            assert (lost.status, lost.headers["x-ess-reason"]) == (503, "peer_down")
            with Half("prefill", "--port", port) as again:
                [after] = right.wait_met().peers
                assert after["engine_id"] != before["engine_id"]
                stale = {**PROMPT, "kv_transfer_params": given["kv_transfer_params"]}
                late = right.ask("/v1/completions", stale)
                assert (late.status, late.headers["x-ess-reason"]) == (503, "peer_restarted")
                fresh = again.ask("/v1/completions", {**PROMPT, **first_leg()}).document
                params = {"kv_transfer_params": fresh["kv_transfer_params"]}
                assert right.ask("/v1/completions", {**PROMPT, **params}).status == 200


@pytest.mark.slow
def test_engines_that_are_replaced_meet_again():
    """Under the epochs of the new engines, while the servers stay."""
    with Half("prefill") as left, Half("decode", "--peers", f"127.0.0.1:{left.port}") as right:
        [before] = right.wait_met().peers
        left.kill_engine()
        until(lambda: right.peers[0]["engine_id"] != before["engine_id"], "the next engine's epoch")
        right.kill_engine()
        until(lambda: "restarts_total 1.0" in right.ask("/metrics").text, "another engine")
        right.wait_ready()
        right.wait_met()
        given = left.ask("/v1/completions", {**PROMPT, **first_leg()}).document
        params = {"kv_transfer_params": given["kv_transfer_params"]}
        assert right.ask("/v1/completions", {**PROMPT, **params}).status == 200


def first_leg() -> dict[str, object]:
    return {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}


@pytest.mark.slow
def test_a_wrong_secret_keeps_workers_apart():
    with Half("prefill") as left:
        peers = ("--peers", f"127.0.0.1:{left.port}")
        with Half("decode", *peers, secret="another secret, long enough") as right:
            until(lambda: "403" in right.peers[0]["why"], "the refusal")
            assert right.ask("/ready").document["missing"] == [f"127.0.0.1:{left.port}"]
            assert right.peers[0]["engine_id"] is None
            assert right.ask("/v1/completions", PROMPT).status == 200


@pytest.mark.slow
def test_every_process_of_a_server_knows_the_peers_and_a_further_port_is_served():
    with (
        kept_port("127.0.0.1") as further,
        Half("prefill", "--server-processes", "2", "--bootstrap-port", str(further)) as left,
    ):
        told = left.ask("/server_info").document
        assert told["disaggregation_bootstrap_port"] == further
        assert told["settings"]["peer_secret"] == {"value": "set", "from": "environment"}
        assert SECRET not in left.ask("/server_info").text + str(left.greeting)
        assert ask(f"http://127.0.0.1:{further}/health").status == 200
        peers = ("--peers", f"127.0.0.1:{further}")
        with Half("decode", *peers, "--server-processes", "2") as right:
            for _ in range(12):
                until(lambda: not right.ask("/ready").document["missing"], "this process")
            params = left.ask("/v1/completions", {**PROMPT, **first_leg()}).document
            assert params["kv_transfer_params"]["remote_port"] == further
            for room in range(12):
                rooms = {"bootstrap_host": "127.0.0.1", "bootstrap_port": further}
                body = {**PROMPT, **rooms, "bootstrap_room": room}
                until(
                    lambda body=body: right.ask("/v1/completions", body).status == 200,
                    "an answer of every process",
                )


KEY = {"ESS_PEER_SECRET": SECRET}


@pytest.mark.parametrize(
    ("flags", "environment", "says"),
    [
        ({"role": "decode"}, {}, "peer_secret_file is missing: a decode worker"),
        ({"role": "prefill"}, {"ESS_PEER_SECRET": "fifteen bytes.."}, "peer_secret has 15 bytes"),
        ({"role": "prefill", "peers": "a:1"}, KEY, "peers is for a decode worker"),
        ({"role": "decode", "bootstrap_port": 1}, KEY, "bootstrap_port is for a prefill worker"),
        ({"peers": "a:1"}, KEY, "role is both"),
        ({"role": "decode", "peers": "a"}, KEY, "not HOST:PORT"),
        ({"role": "prefill", "tls_cert": "a", "tls_key": "b"}, KEY, "over plain HTTP"),
        ({"role": "prefill", "uds": "a"}, KEY, "uds is given without bootstrap_port"),
        ({"role": "decode", "peer_secret_file": "nowhere"}, {}, "peer_secret_file nowhere cannot"),
    ],
)
def test_what_a_role_needs_is_said_at_the_start(flags: dict, environment: dict, says: str):
    with pytest.raises(BadInput, match=says) as raised:
        resolve(flags, environment=environment)
    assert SECRET not in str(raised.value)


def test_the_secret_comes_from_a_file_and_is_never_shown(tmp_path: Path):
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    settled = resolve({"role": "decode", "peer_secret_file": str(path)}, environment={})
    assert settled.settings.peer_secret == SECRET
    assert SECRET not in repr(settled)
    assert SECRET not in repr(settled.shown())
    with pytest.raises(BadInput, match="give only one of them"):
        resolve({"role": "decode", "peer_secret_file": str(path)}, environment=KEY)
    path.write_text(" \n")
    with pytest.raises(BadInput, match="has no secret in it"):
        resolve({"role": "decode", "peer_secret_file": str(path)}, environment={})
