"""The prefill worker of `ess-bench handoff`, in its own process. Lines of JSON, both ways.

{"meet": hex}                                 the decode worker's metadata, comes first
{"uid", "prompt", "bytes_per_s"}              hand this prompt over, on a link of this rate
-> {"uid", "made_s", "took_s", "sent_bytes"}  its rows are computed; times by the monotonic clock
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec

from ess.bench.handoff.child import next_line
from ess.bench.handoff.workers import Worker, WorkerSizes
from ess.engine.tokens.sampling import Sampling


def main() -> None:
    worker = Worker(msgspec.json.decode(sys.argv[1], type=WorkerSizes))
    print(json.dumps({"metadata": worker.port.metadata().hex()}), flush=True)
    asked = os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
    while line := next_line(asked, worker.engine.pump):
        wish = json.loads(line)
        if "meet" in wish:
            worker.port.meet(bytes.fromhex(wish["meet"]))
        else:
            print(json.dumps(_prefilled(worker, wish)), flush=True)


def _prefilled(worker: Worker, wish: dict[str, Any]) -> dict[str, Any]:
    worker.link.bytes_per_s = wish["bytes_per_s"]
    begun_s, uid = worker.clock.now_s(), wish["uid"]
    request = worker.engine.add(wish["prompt"], Sampling(tokens_max=1), give=uid)
    while request.state != "finished":
        worker.engine.step()
    made_s = worker.clock.now_s()
    return {"uid": uid, "made_s": made_s, "took_s": made_s - begun_s, "reason": request.reason}


if __name__ == "__main__":
    main()
