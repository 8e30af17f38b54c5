"""While requests are refused the log says so, in few lines; a request's own line has the reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace

import pytest

from ess import console
from ess.clock import RealClock
from ess.server.http.request_log import RequestLog
from ess.server.process.logs.refusal_notes import note_refusals
from ess.server.process.service import Limits
from ess.server.process.tally import Tally
from tests.server.harness import PacedEngine, Served, counting
from tests.server.test_limits import completion, refused


def test_many_refusals_are_one_note(monkeypatch: pytest.MonkeyPatch):
    notes: list[str] = []
    monkeypatch.setattr(console, "note", notes.append)
    tally, limits = Tally(), Limits(running_max=4, waiting_max=1000, length_max=64)
    service = SimpleNamespace(tally_of_all=tally, limits=limits, open_count=1004)
    tally.refusals["queue_full"] = 7

    async def watched() -> None:
        work = asyncio.ensure_future(note_refusals(service, every_s=0.01))
        await asyncio.sleep(0.05)
        assert not notes, "those of before are no news"
        tally.refusals.update(Counter(queue_full=1500, texts=2))
        while not notes:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        work.cancel()

    asyncio.run(watched())
    assert notes == [
        "ess: 1,502 requests were refused (queue_full 1,500, texts 2) within 0.01 s; 1,004 are"
        " open, the limits are --max-running 4 and --max-waiting 1,000"
    ]


def test_probes_are_no_refused_requests():
    engine = PacedEngine(counting(2), says_ready=False)
    with Served(engine) as served:
        for path in ("/ready", "/health_generate"):
            assert refused(served, path)[0] == 503
        assert not served.service.tally.refusals
        assert refused(served, "/v1/completions", completion(prompt="a"))[0] == 503
        assert served.service.tally.refusals == {"starting": 1}


@pytest.mark.parametrize("is_json", [False, True])
def test_the_line_of_a_refused_request_has_the_reason(
    is_json: bool, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    monkeypatch.setattr(console, "note", lines.append)
    limits = Limits(running_max=1, waiting_max=0, length_max=4096)

    def logged(app):
        return RequestLog(app, clock=RealClock(), is_json=is_json)

    with Served(PacedEngine(counting(2)), limits=limits, within=logged) as served:
        code, *_ = refused(served, "/v1/completions", completion(prompt=["a", "b"]))
        assert code == 503
        assert refused(served, "/v1/completions", completion(prompt=[]))[0] == 400
    full, wrong = lines
    assert ('"reason":"queue_full"' if is_json else " 503 (queue_full) after ") in full
    assert ('"status":400,"took_s"' if is_json else " 400 after ") in wrong
