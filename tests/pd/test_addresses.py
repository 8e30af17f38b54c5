"""Whatever a request says of an address: nothing is dialled but what was configured."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest
import uvloop

from ess.errors import BadInput
from ess.server.process.pair.addresses import read_peers
from tests.pd.pairs import Half
from tests.pd.test_dialects import GIVES, PROMPT, decode, pair, post

HOSTILE = [
    *("169.254.169.254", "169.254.170.2", "100.100.100.200", "metadata.google.internal"),
    *("fd00:ec2::254", "[fd00:ec2::254]", "::1", "[::1]", "::", "[::]", "0.0.0.0", "0"),
    *("::ffff:127.0.0.1", "[::ffff:7f00:1]", "::127.0.0.1", "[::1%lo]", "fe80::1%eth0"),
    *("localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "localhost6"),
    *("127.1", "127.0.1", "2130706433", "0x7f000001", "0x7f.1", "0177.0.0.1", "017700000001"),
    *("127.0.0.1.", "127.0.0.2", "127.255.255.254", "127.0.0.1.nip.io", "127.0.0.1:80"),
    *(" 127.0.0.1", "127.0.0.1 ", "127.0.0.1\n", "127.0.0.1\x00", "127.0.0.1\r\nHost: x"),
    *("user@127.0.0.1", "user:pass@127.0.0.1", "127.0.0.1@evil.example", "127.0.0.1#@evil"),
    *("http://127.0.0.1", "//127.0.0.1", "file:///etc/passwd", "unix:///run/x.sock", "/run/x"),
    *("127.0.0.1/peers", "127.0.0.1?x", "evil.example", "xn--80ak6aa92e.com", "\u2460.\u2461.3.4"),
    *("\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "l\u043ecalhost", "\u202e1.0.0.721"),
    *("1.1.1.1", "224.0.0.1", "255.255.255.255", "10.0.0.1", "192.168.0.1", "a" * 255, "a" * 256),
    *("", ".", "..", "-", "*", "%s%n", "$(reboot)", "' or 1=1", "[", "[]", "]["),
]
PORTS = [0, -1, 22, 65535, 65536, 2**31, 2**64, 10**30, 1.5, "80", True, None, [], {}]


def bodies(port: int) -> list[dict]:
    """In each of the ways in which a request names an address; a listener has `port`."""
    pairs = [(host, port) for host in HOSTILE] + [("127.0.0.1", port), ("127.0.0.1", 9)]
    pairs += [("127.0.0.1", each) for each in PORTS]
    asked: list[dict] = []
    for host, at in pairs:
        asked.append({"bootstrap_host": host, "bootstrap_port": at, "bootstrap_room": 5})
        named = {"remote_host": host, "remote_port": at, "ess_rooms": ["5".zfill(16)]}
        asked.append({"do_remote_prefill": True, "remote_engine_id": "0" * 16, **named})
        address = {"transfer_id": "x", "remote_bootstrap_addr": f"http://{host}:{at}"}
        asked.append({"do_remote_prefill": True, **address})
    return [
        {**PROMPT, **(each if "bootstrap_room" in each else {"kv_transfer_params": each})}
        for each in asked
    ]


class Listener:
    """Counts who comes: what was never accepted would still wait in the backlog."""

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=is_dual, backlog=128
        )
        self.port = self._socket.getsockname()[1]

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    @property
    def came(self) -> int:
        count = 0
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.accept()[0].close()
                count += 1
        return count


def test_there_are_enough_of_them():
    assert len(set(HOSTILE)) >= 60


def test_no_request_makes_a_decode_worker_dial(monkeypatch: pytest.MonkeyPatch):
    """Every way out of the event loop is watched; the meetings with the peer show that it is."""
    dialled: list[tuple[object, object]] = []
    resolved: list[object] = []
    connect, resolve = uvloop.Loop.create_connection, uvloop.Loop.getaddrinfo

    async def connecting(self, factory, host=None, port=None, **given):
        dialled.append((host, port))
        return await connect(self, factory, host, port, **given)

    async def resolving(self, host, port, **given):
        resolved.append(host)
        return await resolve(self, host, port, **given)

    monkeypatch.setattr(uvloop.Loop, "create_connection", connecting)
    monkeypatch.setattr(uvloop.Loop, "getaddrinfo", resolving)
    with Listener() as listener, pair() as (left, right):
        for body in bodies(listener.port):
            answer = post(right, body)
            assert (answer.status, answer.document["error"]["type"]) == (
                400,
                "invalid_request_error",
            ), body
        assert set(dialled) == {("127.0.0.1", left.port)}
        assert set(resolved) <= {"127.0.0.1"}
        assert listener.came == 0
        assert right.engine.adds == []


def test_a_right_host_with_a_wrong_id_names_nobody_else():
    with pair() as (left, right):
        good = post(left, {**PROMPT, **GIVES}).document["kv_transfer_params"]
        for host in HOSTILE:
            params = {**good, "remote_host": host}
            assert post(right, {**PROMPT, "kv_transfer_params": params}).status == 400


def test_a_peer_that_is_not_up_is_503_and_others_are_400():
    with decode("127.0.0.1:9,named:5=127.0.0.1:9") as served:
        for host, port, status in (("127.0.0.1", 9, 503), ("NAMED", 5, 503), ("named", 9, 400)):
            rooms = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 5}
            answer = post(served, {**PROMPT, **rooms})
            assert answer.status == status, answer.text
            assert answer.headers["retry-after"] == ("2" if status == 503 else None)


@pytest.mark.slow
def test_a_decode_process_opens_no_socket_for_a_request():
    """The connections of the process and its children, as the kernel lists them, all the time;
    each address is named in one of the ways or in two."""
    with (
        Listener() as listener,
        Half("prefill") as left,
        Half("decode", "--peers", f"127.0.0.1:{left.port}") as right,
    ):
        right.wait_met()
        seen: set[str] = set()
        for body in bodies(listener.port)[::2]:
            assert right.ask("/v1/completions", body).status == 400
            seen |= remotes(right.process.pid)
        allowed = {f"0100007F:{left.port:04X}"}
        assert seen - allowed == set()
        assert listener.came == 0


def remotes(pid: int) -> set[str]:
    """The far ends of what a process dialled itself: not those that came to where it listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    listening = {row[1].rpartition(":")[2] for row in rows if row[3] == "0A" and row[9] in inodes}
    own = [row for row in rows if row[9] in inodes and row[3] != "0A"]
    return {row[2] for row in own if row[1].rpartition(":")[2] not in listening}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("10.0.0.1", "not HOST:PORT"),
        ("10.0.0.1:0", "not HOST:PORT"),
        ("10.0.0.1:65536", "not HOST:PORT"),
        ("http://10.0.0.1:80", "not HOST:PORT"),
        ("user@a:80", "not HOST:PORT"),
        ("a:80/x", "not HOST:PORT"),
        ("a:80,A:80", "a:80 twice"),
        ("a:80=b", "not HOST:PORT"),
        (",".join(f"a{i}:1" for i in range(257)), "at most 256"),
    ],
)
def test_a_peer_list_that_is_wrong_is_named(given: str, says: str):
    with pytest.raises(BadInput, match=says):
        read_peers(given)
