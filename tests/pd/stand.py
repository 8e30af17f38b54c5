"""Workers of a split on this machine, alone or behind a stock router."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ess.ports import kept_port
from ess.server.commands.pd import routers
from ess.server.commands.pd.routers import Place
from tests.server.harness import until
from tests.support.process import Process
from tests.support.routers import LINE, Asked, Kind, Router, ask

SECRET: Final = "a secret of the tests, shared"
PACED: Final = ("--engine", "paced", "--pace-ms", "2")
EXACT: Final = ("--row", "f32", "--form", "f32")
DECODE_COUNT: Final = 3
ENDED: Final = re.compile(r'^ess_handoffs_total\{how="(\w+)"\} (\S+)$', re.MULTILINE)


class Worker(Process):
    """A worker with a role and a log; killed, it can be started again at its port."""

    def __init__(self, name: str, folder: Path, *flags: str, port: int, **given: bool) -> None:
        self.name = name
        self.role = name.partition("-")[0]
        self._folder = folder
        self._flags = flags
        self._given = given
        with (folder / f"{name}.txt").open("a") as lines:
            words = ("--role", self.role, "--port", str(port), *flags)
            super().__init__(*words, stderr=lines.fileno(), ESS_PEER_SECRET=SECRET, **given)

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def asked(self) -> list[Asked]:
        """With --request-log: what was answered so far, apart from our own waiting for it."""
        text = (self._folder / f"{self.name}.txt").read_text()
        return [Asked(*words) for words in LINE.findall(text)]

    @property
    def handoffs(self) -> dict[str, int]:
        """How many have landed, were missed, sent, or have lapsed, once the engine has reported for
        the first time."""
        until(lambda: bool(self._handoffs()), "the engine's first word of handoffs")
        return {how: int(float(count)) for how, count in self._handoffs()}

    def _handoffs(self) -> list[tuple[str, str]]:
        return ENDED.findall(ask(f"{self.url}/metrics").text)

    @property
    def peers_up(self) -> bool:
        return not ask(f"{self.url}/ready").document["missing"]

    def signal_all(self, number: signal.Signals) -> None:
        """The server and its engine, which is no fork: a machine that stops stops both."""
        for pid in (self.engine_pid, self.process.pid):
            os.kill(pid, number)

    def again(self) -> Worker:
        """Another at the same port; this one has ended."""
        return Worker(self.name, self._folder, *self._flags, port=self.port, **self._given)


class Stand:
    """One prefill worker and three decode workers that have met it; both may have flags of their
    own."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        prefill: Sequence[str] = (),
        decode: Sequence[str] = (),
        **given: bool,
    ) -> None:
        self.folder = folder
        self._flags, self._given = flags, given
        self._prefill_flags, self._decode_flags = prefill, decode
        self._kept = contextlib.ExitStack()
        self.workers: dict[str, Worker] = {}

    def __enter__(self) -> Stand:
        try:
            prefill = self._start("prefill-1", *self._prefill_flags)
            for number in range(DECODE_COUNT):
                flags = ("--peers", prefill.address, *self._decode_flags)
                self._start(f"decode-{number + 1}", *flags)
            for worker in self.workers.values():
                worker.wait_ready()
            until(lambda: all(worker.peers_up for worker in self.decodes), "all having met")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with self._kept as ending:
            for worker in self.workers.values():
                ending.callback(worker.__exit__)

    def _start(self, name: str, *flags: str) -> Worker:
        port = self._kept.enter_context(kept_port("127.0.0.1"))
        words = (*flags, *self._flags)
        self.workers[name] = Worker(name, self.folder, *words, port=port, **self._given)
        return self.workers[name]

    @property
    def prefill(self) -> Worker:
        return self.workers["prefill-1"]

    @property
    def decodes(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.role == "decode"]

    def put_back(self, name: str) -> Worker:
        """A dead worker's successor, ready, at its place."""
        self.workers[name].__exit__()
        self.workers[name] = self.workers[name].again()
        worker = self.workers[name]
        worker.wait_ready()
        return worker

    @contextlib.contextmanager
    def behind(self, kind: Kind, *flags: str) -> Iterator[Router]:
        """A router with the command line of `ess serve --pd`."""
        [router] = [router for router in routers.ROUTERS if router.name == kind.package]
        nowhere = Place(host="", port=0, metrics_port=0)
        words = routers.words_for(
            router,
            nowhere,
            prefills=[self.prefill.url],
            decodes=[worker.url for worker in self.decodes],
        )
        where = words[words.index("--prefill") :]
        everybody = [worker.url for worker in self.workers.values()]
        log = self.folder / f"{kind.package}.txt"
        pd = router.words[-1]
        with Router(kind, everybody, log, *flags, where=(pd, *where)) as made:
            yield made
