"""What every folder of tests shares."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.left_sockets import Sockets

gc.disable()  # a fifth of the time that imports take, until all is imported

with contextlib.suppress(ImportError):  # a machine with a GPU may be without it
    import hypothesis

    # Another worker may have the cores while an example is made or run.
    hypothesis.settings.register_profile(
        "shared",
        deadline=None,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    if hypothesis.settings.get_current_profile_name() in ("default", "ci"):
        hypothesis.settings.load_profile("shared")


@pytest.fixture(scope="session")
def emulated(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries of the emulated device are built, once for all workers of a run."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if hasattr(pytestconfig, "workerinput") else own) / "emulated"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def held_reads(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk's pages are read when the event is set."""
    from ess.pool.disk.tier import DiskTier

    go_on, load = threading.Event(), DiskTier.load

    def late(self: DiskTier, *each: object) -> bool:
        assert go_on.wait(60)
        return load(self, *each)

    monkeypatch.setattr(DiskTier, "load", late)
    return go_on


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and other workers that a benchmark starts are forks of processes with their imports.
    Its rows are there as with real ones; their figures are of no use."""
    from ess.bench.engine import serve
    from ess.bench.handoff import child
    from tests.support.forked import forking

    monkeypatch.setattr(serve, "subprocess", forking("server"))
    monkeypatch.setattr(child, "subprocess", forking("engine"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Small ops on busy cores wait longer for a second thread than it saves. A test that wants more
    threads takes them, and the next one begins with one again. torch's noise without a seed
    is the same for a test, whichever tests its worker has run before."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.default_generator.manual_seed(0)
    if item.get_closest_marker("gpu") is None:
        torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look at it again."""
    gc.enable()
    gc.freeze()


GROWN_BYTES = 32 << 20
"""Garbage is collected once this much memory is new: freed memory is used again, and fresh memory
costs a virtual machine up to 13 ms a MiB."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Garbage:
    """What lies in cycles with pools, as workers' leads and errors with their frames do, is of few
    objects and many bytes: Python, which counts objects, would leave gigabytes of them lying."""

    def __init__(self) -> None:
        self._left_bytes = resident_bytes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield
        if resident_bytes() > self._left_bytes + GROWN_BYTES:
            gc.collect()
            self._left_bytes = resident_bytes()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Sockets())
    if sys.platform == "linux":  # behind it: the last wrapper is the outermost, and collects later
        config.pluginmanager.register(Garbage())
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        from tests.support.collected import fork_workers

        fork_workers(config.args)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """What fails is named at once: a run that is ended from outside prints no summary."""
    if report.failed:
        print(f"\nFAILED {report.nodeid} ({report.when})", flush=True)


SHORT_S = 60.0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time went, if it was more than a moment: seconds of all workers, by folder."""
    spent: Counter[str] = Counter()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folders = report.nodeid.partition("::")[0].split("/")[:-1]
            spent["/".join(folders[:2])] += report.duration
    if spent.total() > SHORT_S:
        told = ", ".join(f"{folder} {seconds:.0f}" for folder, seconds in spent.most_common())
        terminalreporter.write_line(f"seconds of all workers, by folder: {told}")
