"""What workers of `ess serve --pd` are told and get, and what is refused before any starts."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ess.clock import RealClock
from ess.errors import BadInput, Unavailable
from ess.server.commands.pd import routers
from ess.server.commands.pd.keeper import Order
from ess.server.commands.pd.kept import Kept
from ess.server.commands.pd.processes import PdProcesses, serve_pd
from ess.server.commands.pd.routers import ROUTERS, Place
from ess.server.commands.pd.shares import (
    Share,
    clean,
    shape_of,
    share_of,
    stages_of,
    told_settings,
)
from ess.server.commands.ranks.servers import OF_RANK, RankProcesses, divided
from ess.server.commands.start import sizing
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.resolving import layout_of, planned
from ess.server.commands.start.settings import resolve
from tests.support.own_python import python
from tests.support.process import RUN


def share(text: str, **flags: Any) -> Share:
    return share_of(resolve(flags, environment={}), shape_of(text))


@pytest.mark.parametrize(
    "text", ["", "1p", "p3d", "0p1d", "1p0d", "60p5d", "1p3d ", "1d3p", "-1p3d"]
)
def test_a_shape_that_is_none(text: str):
    with pytest.raises(BadInput, match="--pd is"):
        shape_of(text)


def test_workers_divide_what_one_server_would_take(monkeypatch: pytest.MonkeyPatch):
    """Of memory that other processes leave alone meanwhile."""
    monkeypatch.setattr(sizing, "memory_free", lambda: 8 << 30)
    alone = share_of(resolve({}, environment={}), shape_of("1p1d"))
    for text, count in (("1p3d", 4), ("2P6D", 8)):
        each = share(text, host_bytes="1GiB", slot_bytes="256MiB", threads=8)
        assert each.plan.host_bytes == (1 << 30) // count
        assert each.plan.slot_bytes == (256 << 20) // count
        assert each.threads == 8 // count
        assert each.settings["host_bytes"] == str((1 << 30) // count)
    assert share("1p3d").plan.host_bytes * 2 == alone.plan.host_bytes


def test_stages_are_for_prefill_workers_and_divide_their_threads():
    flags, stages = stages_of({"pp_size": 2, "max_running": 4, "smooth": None})
    assert (flags, stages) == ({"max_running": 4}, {"pp_size": 2})
    each = share_of(resolve({"threads": 12}, environment={}), shape_of("1p2d"), stages)
    assert each.stages == {"pp_size": 2, "threads": 2}
    assert (each.settings["threads"], "pp_size" in each.settings) == (4, False)
    with pytest.raises(BadInput, match="nnodes cannot be used with --pd"):
        stages_of({"nnodes": 2})
    with pytest.raises(BadInput, match="tp_size is 2 and cp_size is 2"):
        stages_of({"tp_size": 2, "cp_size": 2})


def test_each_worker_has_a_thread_and_slots_for_a_request():
    each = share("2p6d", threads=2, max_running=1)
    assert each.threads == 1
    assert each.plan.rooms[-1].count == 1
    with pytest.raises(BadInput, match=r"slot_bytes is .*: not one request of"):
        share("2p6d", slot_bytes="1MiB")


def test_what_each_of_them_would_refuse_is_refused_at_once():
    with pytest.raises(BadInput, match=r"host_bytes is .*: not one request of 8,192 tokens fits"):
        share("1p3d", host_bytes="96MiB", max_model_len="8k")
    with pytest.raises(BadInput, match="are free on this machine; it would not fit"):
        share("1p3d", host_bytes="100TiB")


def test_what_ranks_are_told_is_enough_for_the_longest_request():
    """As few rows as this hold one such request, so the sizes may lack no byte."""
    told = divided(resolve({"dp_size": 2, "host_bytes": "64MiB"}, environment={})).settings
    checkpoint = read_checkpoint("")
    plan = planned(told, checkpoint, layout_of(told, checkpoint))
    assert (plan.rooms[-1].length, plan.rooms[-1].count) == (plan.token_capacity, 1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"uds": "/tmp/x"}, "a router listens at a host and a port"),
        ({"root_path": "/llm"}, "a router knows no other path"),
        ({"tls_cert": "a", "tls_key": "b"}, "let a proxy speak HTTPS"),
        ({"allowed_hosts": "a"}, "a router lets every host name in"),
        ({"allowed_origins": "*"}, "let a proxy allow them"),
        ({"role": "decode", "peer_secret": "x" * 16}, "each worker is told its own"),
        ({"transfer_port": 7}, "each worker takes a free one"),
        ({"peer_secret": "x" * 16}, "each worker is told its own"),
    ],
)
def test_settings_that_make_no_sense(flags: dict[str, Any], why: str):
    name = next(iter(flags))
    with pytest.raises(BadInput, match=f"^{name} from flag cannot be used with --pd: .*{why}"):
        share("1p1d", **flags)


def test_workers_get_all_settings_and_no_place_to_listen():
    each = share("1p1d", mtp=4, host="127.0.0.1", port=9, api_key="a,b", pace_ms=3.0, row="f32")
    told = each.settings
    assert (told["mtp"], told["pace_ms"], told["row"]) == (4, 3.0, "f32")
    assert not {"host", "port", "role", "api_key", "api_key_file"} & {*told}


def test_ranks_read_the_keys_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    keys.write_text("a\nb\n")
    secret.write_text("sixteen bytes are enough")
    resolved = resolve({"api_key_file": str(keys), "dp_size": 2}, environment={})
    monkeypatch.setattr(Kept, "keep", lambda *given: None)
    RankProcesses(resolved, [9, 10], "127.0.0.1:11", tmp_path)._start(0, 9, secret)
    settings = resolve({}, config=tmp_path / "rank-0.json", environment={}).settings
    assert (settings.api_key_file, settings.keys) == (str(keys), ("a", "b"))
    on_ray = told_settings(resolved, but=OF_RANK)
    assert (on_ray["api_key_file"], on_ray.get("api_key")) == (str(keys), None)


@pytest.mark.parametrize("is_file", [True, False], ids=["file", "words"])
def test_workers_read_the_keys_again_and_know_the_routers(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    keys = tmp_path / "keys"
    keys.write_text("a\nb\n")
    given = {"api_key_file": str(keys)} if is_file else {"api_key": "a,b"}
    settings = resolve(given, environment={}).settings
    each, place = share("1p1d", **given), Place(host="127.0.0.1", port=9, metrics_port=10)
    monkeypatch.setattr(Kept, "keep", lambda *given: None)
    processes = PdProcesses(
        shape_of("1p1d"), each, routers.ROUTERS[0], place, settings, tmp_path, RealClock()
    )
    processes._worker("decode", "decode-1", processes._key_files())
    told = resolve({}, config=tmp_path / "decode-1.json", environment={}).settings
    assert told.keys == ("a", "b", processes._key)
    assert len(processes._key) > 40
    files = told.api_key_file.split(",")
    assert (files[0] == str(keys)) == is_file
    assert all(Path(file).stat().st_mode & 0o077 == 0 for file in files[is_file:])


def test_keys_that_change_while_workers_start_are_the_first_router_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whether before the file is watched or after."""
    file, orders = tmp_path / "keys", []
    file.write_text("a\n")
    settings = resolve({"api_key_file": str(file)}, environment={}).settings
    each, place = share("1p1d"), Place(host="127.0.0.1", port=9, metrics_port=10)
    file.write_text("b\n")

    def keep(kept: Kept, role: str, order: Order, is_ready: object) -> SimpleNamespace:
        orders.append(order)
        return SimpleNamespace(listens=None, ready=None, url="http://a:1")

    async def wait_until(kept: Kept, *given: object) -> None:
        file.write_text("c\nd\n")

    monkeypatch.setattr(Kept, "keep", keep)
    monkeypatch.setattr(Kept, "wait_until", wait_until)
    processes = PdProcesses(
        shape_of("1p1d"), each, routers.ROUTERS[0], place, settings, tmp_path, RealClock()
    )
    assert processes._keys == ("b",)
    asyncio.run(processes._begin())
    clients = [word for word in orders[-1].words if word.startswith("client-")]
    assert clients == ["client-0:c", "client-1:d"]


def test_workers_do_not_read_the_environment_again():
    """A share of host_bytes would give way to ESS_HOST_BYTES, which is for all."""
    given = {"PATH": "/bin", "ESS_HOST_BYTES": "1GiB", "VLLM_API_KEY": "k", "OPENAI_API_KEY": "k"}
    assert clean(given) == {"PATH": "/bin"}
    kept = {"ESS_ROWS": "plain", "ESS_ISA": "avx2", "ESS_CACHE_DIR": "/cache"}
    assert clean({**given, **kept}) == {"PATH": "/bin", **kept}


def installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in names else None)


def test_the_router_that_streams_at_once_is_preferred(monkeypatch: pytest.MonkeyPatch):
    everything = [router.name for router in ROUTERS]
    for first in range(len(everything)):
        installed(monkeypatch, *everything[first:])
        assert routers.choose(None, has_keys=False).name == everything[first]
        assert routers.choose("sglang_router", has_keys=False).name == "sglang_router"
    installed(monkeypatch, "sglang_router")
    with pytest.raises(Unavailable, match=r"^smg is not installed: pip install 'ess\[router\]'"):
        routers.choose("smg", has_keys=False)
    installed(monkeypatch)
    with pytest.raises(Unavailable, match=r"^no router is installed: pip install"):
        routers.choose(None, has_keys=False)


def test_a_router_that_knows_no_keys_is_none_for_keys(monkeypatch: pytest.MonkeyPatch):
    """vllm-router would ask the workers with its own key for any client; sglang-router knows only
    one key, with which a client could change its workers."""
    installed(monkeypatch, "vllm_router", "sglang_router", "smg")
    assert routers.choose(None, has_keys=True).name == "smg"
    for name in ("vllm_router", "sglang_router"):
        with pytest.raises(BadInput, match=f"api_key and --router {name}: .* give --router smg"):
            routers.choose(name, has_keys=True)


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.name)
def test_a_router_is_told_of_all_workers(router: routers.Router):
    place = Place(host="0.0.0.0", port=8000, metrics_port=9000)
    words = routers.words_for(
        router,
        place,
        prefills=["http://a:1"],
        decodes=["http://b:2", "http://c:3"],
        key="k",
        keys=("a", "b"),
    )
    text = " ".join(words)
    met = "" if router.name == "vllm_router" else " 1"
    assert f"--prefill http://a:1{met} --decode http://b:2 --decode http://c:3" in text
    assert "--host 0.0.0.0 --port 8000 --prometheus-host 127.0.0.1" in text
    assert "--api-key=k --tenant-api-key client-0:a --tenant-api-key client-1:b --policy" in text


def test_a_taken_port_is_said_before_anything_starts():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            serve_pd("1p1d", None, {"port": port}, config=None, json=False)


def test_a_router_without_a_split():
    ended = python("-c", RUN, "serve", "--router", "smg")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "ess: router is for --pd: without --pd no router is started\n"
