"""What an operator sees of handoffs: /metrics, /v1/loads, `ess top`, the dashboard, a trace."""

from __future__ import annotations

import os

import msgspec
import pytest

from ess.engine.layers.spans import Recorder
from ess.engine.process.messages import HandoffLine, HandoffStatus, PeerLine, Status
from ess.server.commands import cli
from ess.server.process.handoffs import Handoffs
from tests.server.harness import PacedEngine, Served, counting, until
from tests.server.test_dashboard import frames, metrics
from tests.support import chromium
from tests.support.chromium import Browser
from tests.support.manual_clock import ManualClock

TAKEN = HandoffLine(
    uid=2**62 + 1,
    kind="take",
    outcome="landed",
    marks=(("first piece", 0.01), ("complete", 0.04), ("landed", 0.05), ("first step", 0.06)),
    began_s=100.0,
)
LOST = HandoffLine(
    uid=7, kind="take", outcome="missed", marks=(("first piece", 1.0),), sentence="gone"
)
GIVEN = HandoffLine(
    uid=3,
    kind="give",
    outcome="sent",
    marks=(("offered", 0.0), ("reserved", 0.2), ("made", 0.3), ("ended", 0.45)),
)
SAID = HandoffStatus(
    open_arrival_count=2,
    open_departure_count=1,
    landed_count=5,
    missed_count=1,
    sent_count=3,
    lapsed_count=2,
    received_bytes=4_000_000,
    sent_bytes=2_000_000,
    again_count=6,
    failed_count=4,
    peers=(PeerLine("10.0.0.1:8000", 8, True, 0.5), PeerLine("10.0.0.2:8000", 9, False)),
    recent=(LOST, TAKEN, GIVEN),
)


def served() -> Served:
    return Served(PacedEngine(counting(1), status=Status(handoff=SAID)))


def test_metrics_have_our_names_and_those_of_both_engines():
    with served() as made:
        until(lambda: made.service.board.status.handoff is not None, "a status")
        made.service.compat = ("vllm", "sglang")
        shown = metrics(made.url)
    name = made.service.name
    assert shown["ess_handoffs_total", "landed"] == 5
    assert shown["ess_handoffs_open", "arrival"] == 2
    assert shown["ess_handoff_transfers_failed_total", ""] == 4
    assert shown["ess_peer_up", "10.0.0.1:8000"] == 1
    assert shown["ess_peer_up", "10.0.0.2:8000"] == 0
    assert shown["ess_peer_silent_seconds", "10.0.0.1:8000"] == 0.5
    assert shown["ess_kv_transfer_bytes_total", "received"] == 4e6
    for prefix, label in (("ess_", ""), ("sglang:", name)):
        assert shown[f"{prefix}kv_transfer_latency_ms_count", label] == 2
        assert shown[f"{prefix}kv_transfer_latency_ms_sum", label] == pytest.approx(50 + 250)
        assert shown[f"{prefix}kv_transfer_bootstrap_ms_sum", label] == pytest.approx(200)
        assert shown[f"{prefix}kv_transfer_total_mb_count", label] == 8
        assert shown[f"{prefix}kv_transfer_total_mb_sum", label] == 6
        assert shown[f"{prefix}kv_transfer_speed_gb_s", label] == 0
    assert shown["sglang:num_decode_transfer_queue_reqs", name] == 2
    assert shown["sglang:num_prefill_inflight_queue_reqs", name] == 1
    assert shown["sglang:num_transfer_failed_reqs_total", name] == 3
    assert shown["vllm:nixl_bytes_transferred_sum", name] == 6e6
    assert shown["vllm:nixl_xfer_time_seconds_count", name] == 2
    assert shown["vllm:nixl_num_failed_transfers_total", name] == 1
    assert shown["vllm:nixl_num_kv_expired_reqs_total", name] == 2


def test_a_worker_without_handoffs_has_no_such_metrics():
    with Served(PacedEngine(counting(1))) as made:
        made.service.compat = ("vllm", "sglang")
        names = {name for name, _ in metrics(made.url)}
        assert not [
            name for name in names if "transfer" in name and "ess_transfer_seconds" not in name
        ]
        *_, (kind, frame) = frames(made.url, 2)
        assert (kind, frame["handoff"]) == ("frame", None)


def test_each_handoff_is_counted_once_and_the_rate_is_of_late():
    def at(at_s: float, moved: int) -> tuple[float, Status]:
        return at_s, Status(handoff=HandoffStatus(received_bytes=moved, recent=SAID.recent))

    seen, recent = Handoffs(), [at(0.0, 0), at(10.0, 10**9), at(12.0, 5 * 10**9)]
    for _ in range(3):
        seen.take(recent[-1][1].handoff, recent)
    assert (seen.latency.count, seen.bootstrap.count) == (2, 1)
    assert seen.gb_per_s == 2.0
    again = msgspec.structs.replace(TAKEN, uid=11)
    seen.take(HandoffStatus(recent=(again, *SAID.recent)), [at(20.0, 0)])
    assert seen.latency.count == 3
    assert seen.gb_per_s == 0.0


def test_top_has_a_line_for_each_peer(capsys):
    with served() as made:
        until(lambda: made.service.board.status.handoff is not None, "a status")
        assert cli.main(["top", "--url", made.url, "--once"]) == 0
    said = capsys.readouterr().out
    lines = {line.split("  ")[0]: line for line in said.splitlines()}
    assert "3" in lines["handoffs open"]
    assert "0.00 GB/s lately" in lines["handoffs open"]
    assert "8" in lines["handed over"]
    assert "3 came to nothing" in lines["handed over"]
    assert "heard 0.5 s ago" in lines["10.0.0.1:8000"]
    assert "not heard" in lines["10.0.0.2:8000"]


def test_a_trace_has_a_lane_for_each_handoff_that_began_in_it():
    clock = ManualClock()
    recorder = Recorder(clock)
    recorder.start()
    began_s = clock.now_s()
    line = msgspec.structs.replace(TAKEN, began_s=began_s + 1.0)
    before = msgspec.structs.replace(TAKEN, uid=5, began_s=began_s - 1.0)
    spans = recorder.stop((line, before)).spans
    assert {span.lane for span in spans} == {f"handoff {TAKEN.uid} take: landed"}
    assert [span.name for span in spans] == ["first piece", "complete", "landed", "first step"]
    assert spans[0].start_us == pytest.approx(1e6)
    assert [round(span.took_us) for span in spans] == [10_000, 30_000, 10_000, 10_000]


@pytest.fixture(scope="module")
def page():
    with Browser() as made:
        yield made


@pytest.mark.slow
@pytest.mark.skipif(
    chromium.path() is None and os.environ.get("BROWSER_TESTS") != "required",
    reason="Chromium is not installed: apt-get install chromium",
)
def test_the_dashboard_shows_handoffs_to_workers_of_a_split_alone(page: Browser):
    page.leave()
    with served() as made:
        page.go(made.url + "/dashboard")
        page.until("+document.body.dataset.frames > 1")
        assert page.value("document.getElementById('handoffs').hidden")
        made.service.described = {**made.service.described, "role": {"value": "decode"}}
        page.until("!document.getElementById('handoffs').hidden")

        def text(id: str) -> str:
            return page.value(f"document.getElementById('{id}').textContent")

        assert (text("open"), text("good-name"), text("good")) == ("3", "landed", "5")
        assert (text("bad-name"), text("bad"), text("again")) == ("missed", "1", "6")
        rows = page.value(
            "[...document.getElementById('peers').tBodies[0].rows].map((row) => "
            "[...row.cells].map((cell) => cell.textContent).join(' '))"
        )
        assert rows == [
            "10.0.0.1:8000 0000000000000008 up 500.0 ms ago",
            "10.0.0.2:8000 0000000000000009 down \u2013",
        ]
        lines = page.value(
            "[...document.getElementById('lines').children].map((line) => "
            "[line.children[0].textContent, line.children[1].textContent, "
            "line.children[2].children.length, line.children[3].textContent])"
        )
        assert lines == [
            ["7", "missed", 1, "1.0 s"],
            [str(TAKEN.uid), "landed", 4, "60.0 ms"],
            ["3", "sent", 4, "450.0 ms"],
        ]
        widths = page.value(
            "[...document.querySelectorAll('#lines .line:nth-child(2) i')]"
            ".map((part) => part.getBoundingClientRect().width)"
        )
        assert widths[1] == pytest.approx(3 * widths[0], rel=0.05)
        assert page.errors() == []
