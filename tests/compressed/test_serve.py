"""`ess serve` of a DeepSeek-V4 checkpoint: what it says, what it prints, what it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ess.errors import BadInput
from ess.models.load import load_model
from ess.models.registry import read_config
from ess.server.commands.pd.shares import shape_of, share_of
from ess.server.commands.start.checkpoint import read_checkpoint
from ess.server.commands.start.launch import derived, layout_of, planned
from ess.server.commands.start.settings import resolve
from tests.compressed import world
from tests.ranks.test_serve import COUNT, PROMPT, tokens
from tests.support.greedy import greedy
from tests.support.process import Process

MODEL = "the-model"


def resolved(folder: Path, **flags: Any) -> Any:
    found = resolve({"model": str(folder), **flags}, environment={})
    return derived(found, read_checkpoint(str(folder)))


@pytest.mark.slow
def test_a_server_says_what_the_plain_model_says_and_again_when_its_engine_is_lost(
    folder: Path,
) -> None:
    expected = greedy(load_model(folder, form="f32"), PROMPT, COUNT)
    flags = (
        "--dtype",
        "f32",
        "--row",
        "f32",
        "--recover",
        "resume",
        "--max-running",
        "2",
        "--mtp",
        "4",
    )
    names = ("--model", str(folder), "--served-model-name", "ess-embedded")
    with Process(*flags, *names).wait_ready() as process:
        layout = read_config(world.LISTED).layout(row="f32")
        assert process.greeting["memory"]["state_bytes"] == 4 * layout.request_state_bytes(2048)
        assert list(tokens(process.url)) == expected
        going = tokens(process.url)
        first = [next(going), next(going)]
        os.kill(process.engine_pid, signal.SIGKILL)
        assert [*first, *going] == expected
        with urllib.request.urlopen(process.url + "/metrics", timeout=60) as answer:
            assert b"ess_" in answer.read()


def test_what_a_server_plans(folder: Path) -> None:
    """Rows are in bf16 unless it is said; a page is of 256 tokens."""
    found = resolved(folder, max_model_len="2k", max_running=4)
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(found.settings, checkpoint)
    plan = planned(found.settings, checkpoint, layout)
    assert (found.settings.row, found.origins["row"]) == ("bf16", "derived")
    assert plan.token_capacity == 4 * 2048
    assert plan.host_bytes == 4 * 8 * layout.host_page_bytes
    assert plan.state_bytes == 2 * 4 * layout.request_state_bytes(2048)
    assert plan.total_bytes > plan.state_bytes + plan.host_bytes
    assert [(room.length, room.count) for room in plan.rooms] == [(2048, 4)]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_worker_of_two_plans(folder: Path, role: str) -> None:
    """A state more for each request: what is handed over."""
    more = {"peers": "127.0.0.1:1"} if role == "decode" else {}
    found = resolved(
        folder, role=role, peer_secret="s" * 16, max_model_len="2k", max_running=4, **more
    )
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(found.settings, checkpoint)
    plan = planned(found.settings, checkpoint, layout)
    assert plan.state_bytes == 3 * 4 * layout.request_state_bytes(2048)


def test_what_a_pair_plans(folder: Path) -> None:
    """The states of all workers are looked at before one starts."""
    found = resolve({"model": str(folder), "max_model_len": "2k", "max_running": 4}, environment={})
    share = share_of(found, shape_of("1p2d"))
    layout = read_config(world.LISTED).layout(row="bf16")
    assert share.plan.state_bytes == 3 * 4 * layout.request_state_bytes(2048)


REFUSED = [
    ({"mtp": 8}, "mtp is 8, and the model is deepseek_v4: states beside rows have room for 4"),
    ({"tbo": "1"}, "tbo is 1, and the model is deepseek_v4: the steps of its layers"),
    ({"tp_size": 2}, "tp_size is 2, and the model is deepseek_v4: its heads are not divided"),
    ({"pp_size": 2}, "pp_size is 2, and the model is deepseek_v4: its layers are not divided"),
    ({"dp_size": 2}, "dp_size is 2, and the model is deepseek_v4: its experts are not divided"),
    ({"device": "cuda"}, "device is cuda, and the model is deepseek_v4: its layers are computed"),
    ({"prefix_cache_dir": "x"}, "prefix_cache_dir is x, and the model is deepseek_v4: states"),
    ({"kv_events": "ipc://x"}, "kv_events is ipc://x, and the model is deepseek_v4: routers"),
    ({"deterministic": True}, "deterministic is True, and the model is deepseek_v4: it has no"),
]


@pytest.mark.parametrize(("flags", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_a_server_cannot_do_is_refused_by_name(
    folder: Path, flags: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadInput, match=said):
        resolved(folder, **flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mtp", "8"), "mtp is 8, and the model is deepseek_v4"),
        (("--row", "fp8"), "not turned are no multiple of 64, which fp8 rows need: choose row bf1"),
    ],
)
def test_a_refusal_is_one_sentence(folder: Path, flags: tuple[str, ...], said: str) -> None:
    """Before a weight is read."""
    command = [sys.executable, "-m", "ess.server.commands.cli", "serve", "--model", str(folder)]
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
