"""Every published configuration: its layout, its plan, and the loader's dry run."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ess.console import MaybeWhole
from ess.errors import BadInput
from ess.models.registry import read_config as parse_config
from ess.models.weights.__main__ import main as dry_run
from ess.models.weights.expected.dry_run import PUBLISHED, read_config
from ess.server.commands.about import layout
from ess.server.commands.planning.fits import is_unmeasured
from ess.server.commands.planning.plan import DecodeFlags, NodeFlags, TierFlags, WayFlags, plan

UNMEASURED = [name for name in PUBLISHED if is_unmeasured(name)]
WITH_STATES = ["deepseek-v4-flash", "glm-5.3-flash"]
Captured = pytest.CaptureFixture[str]


def told(captured: Captured) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(captured.readouterr().out)
    return document


def test_what_is_not_measured_is_known() -> None:
    assert set(PUBLISHED) - set(UNMEASURED) == {"deepseek-v3.2", "glm-5.2"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_layout(name: str, capsys: Captured) -> None:
    layout(name)
    words = capsys.readouterr().out
    assert name in words
    assert ("\nstate " in words) == (name in WITH_STATES)
    layout(name, json=True)
    assert told(capsys)["layout"] == name


@pytest.mark.parametrize("name", UNMEASURED)
def test_the_plan_says_what_fits_and_what_was_not_measured(name: str, capsys: Captured) -> None:
    family = parse_config(read_config(name)).family
    plan(decode=DecodeFlags(model=name))
    words = capsys.readouterr().out
    assert f"not measured: every operator of {family}" in words
    plan(decode=DecodeFlags(model=name), json=True)
    fit = told(capsys)
    assert fit["schema"] == "ess.fit/1"
    by_device = fit["room_bytes"] // fit["request_offloaded_bytes"]
    by_host = fit["host_bytes"] // fit["request_host_bytes"]
    assert fit["batch"] == min(by_device, by_host) > 0
    assert fit["limiter"] == ("device memory" if by_device <= by_host else "host memory")
    assert fit["request_resident_bytes"] > fit["request_offloaded_bytes"]


@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_the_plan_of_a_measured_model_has_times(name: str, capsys: Captured) -> None:
    plan(decode=DecodeFlags(model=name, gpus=8), ways=WayFlags(attention_tp=1), json=True)
    assert told(capsys)["chosen"]["step_us"] > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_loader_s_dry_run(name: str, capsys: Captured) -> None:
    assert dry_run(["--dry-run", name]) == 0
    words = capsys.readouterr().out
    assert words.startswith("model ")
    assert "context    131,072 tokens: host " in words
    assert ("\nstate " in words) == (name in WITH_STATES)


def test_a_state_is_counted_on_the_device_alone(capsys: Captured) -> None:
    plan(decode=DecodeFlags(model="glm-5.3-flash", ctx="1m"), json=True)
    fit = told(capsys)
    linear, units = 34 * (64 * 128 * 128 + 3 * 3 * 64 * 128), 11 * 3 * 2 * 128
    assert fit["request_state_bytes"] == 64 + 4 * (linear + units)
    assert fit["request_host_bytes"] == 11 * (4 * 528 + 132) * (1 << 18)


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"ctx": "4m"}, {}, "--ctx 4,194,304 is outside 1..262,144 of hy4-preview"),
    ({"tpot": "50ms"}, {}, "--tpot needs operator tables, and none of hy4-preview was measured"),
    ({"batch": 3}, {}, "--batch needs operator tables"),
    (
        {"gpu": "h100"},
        {},
        "a h100 has 0 B for requests beside 108.55 GiB of weights of hy4-preview",
    ),
    ({"gpu": "x"}, {}, "no operator tables for 'x'"),
    ({"gpus": 0}, {}, "--gpus is 0, must be positive"),
    ({"gpus": 7, "model": "a.x-k2-light"}, {}, "--gpus 7 do not divide the 128 experts"),
    ({}, {"pp_size": 2}, "--pp-size needs operator tables"),
]


@pytest.mark.parametrize(("flags", "more", "said"), REFUSED)
def test_what_cannot_be_planned_is_said(
    flags: dict[str, Any], more: dict[str, MaybeWhole], said: str
) -> None:
    decode = DecodeFlags(**{"model": "hy4-preview", **flags})
    with pytest.raises(BadInput, match=said):
        plan(decode=decode, tiers=TierFlags(), nodes=NodeFlags(), **more)
