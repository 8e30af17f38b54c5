"""A prefill and a decode worker without models, as processes that meet."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.server import harness
from tests.support.process import Process
from tests.support.routers import Answer, ask

until = partial(harness.until, within_s=180.0)
SECRET = "sixteen bytes are enough for it"
BODIES = json.loads((Path(__file__).parent / "router_bodies.json").read_text())


class Half(Process):
    """One side of a pair; its secret is in its environment, where other users do not see it."""

    def __init__(self, command: str, *flags: str, secret: str = SECRET) -> None:
        words = ("--engine", "paced", "--pace-ms", "2", *flags)
        super().__init__(*words, command=command, stderr=2, ESS_PEER_SECRET=secret)
        self.wait_ready()

    def ask(self, path: str, body: object = None, **headers: str) -> Answer:
        return ask(self.url + path, body, **headers)

    @property
    def peers(self) -> list[dict]:
        return self.ask("/server_info").document["peers"]

    def wait_met(self) -> Half:
        until(lambda: not self.ask("/ready").document["missing"], "a meeting with every peer")
        return self
