"""What is DeepSeek-V4's own in `ess serve`: its rows, the plans of several workers, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ess.errors import BadInput
from ess.models.registry import read_config
from ess.server.commands.pd.shares import shape_of, share_of
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.resolving import layout_of, planned
from ess.server.commands.start.settings import resolve
from tests.compressed import world
from tests.states.test_serve import resolved
from tests.support.own_python import python


def test_rows_are_in_bf16_unless_it_is_said(folder: Path) -> None:
    settled = resolved(folder, max_model_len="2k", max_running=4)
    assert (settled.settings.row, settled.origins["row"]) == ("bf16", "derived")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_worker_of_two_plans(folder: Path, role: str) -> None:
    """A state more for each request: what is handed over."""
    more = {"peers": "127.0.0.1:1"} if role == "decode" else {}
    settled = resolved(
        folder, role=role, peer_secret="s" * 16, max_model_len="2k", max_running=4, **more
    )
    checkpoint = read_checkpoint(str(folder))
    layout = layout_of(settled.settings, checkpoint)
    plan = planned(settled.settings, checkpoint, layout)
    assert plan.state_bytes == 3 * 4 * layout.request_state_bytes(2048)


def test_what_a_pair_plans(folder: Path) -> None:
    """The states of all workers are looked at before one starts."""
    settled = resolve(
        {"model": str(folder), "max_model_len": "2k", "max_running": 4}, environment={}
    )
    share = share_of(settled, shape_of("1p2d"))
    layout = read_config(world.LISTED).layout(row="bf16")
    assert share.plan.state_bytes == 3 * 4 * layout.request_state_bytes(2048)


REFUSED = [
    ({"mtp": 8}, "mtp is 8, and the model is deepseek_v4: states beside rows have room for 4"),
    ({"tbo": "1"}, "tbo is 1, and the model is deepseek_v4: the steps of its layers"),
    ({"kv_events": "ipc://x"}, "kv_events is ipc://x, and the model is deepseek_v4: routers"),
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
    done = python("-m", "ess.server.commands.cli", "serve", "--model", folder, *flags)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
