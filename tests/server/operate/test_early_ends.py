"""A process of a server ends with it from its first import on: imports may take many seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ess.engine.process.lifeline import words_of
from tests.support.forked import ROOT
from tests.support.kin import wait_for_end

IMPORTS = "import signal; print('imports', flush=True); signal.pause()"
STARTS = """
import asyncio, msgspec
from ess.server.process.child import Child

async def start():
    child = await Child.start("endless", msgspec.defstruct("Told", [])())
    print(child.pid, flush=True)
    await child.ended()

asyncio.run(start())
"""


@pytest.fixture
def started(tmp_path: Path) -> dict[str, object]:
    (tmp_path / "endless.py").write_text(IMPORTS)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    return {"cwd": tmp_path, "env": env, "stdout": subprocess.PIPE, "text": True}


def test_a_child_that_still_imports_ends_with_a_killed_server(started):
    with subprocess.Popen([sys.executable, "-c", STARTS], **started) as server:
        said = {server.stdout.readline() for _ in range(2)} - {"imports\n"}
        server.kill()
    wait_for_end(int(said.pop()))


def test_a_child_of_a_server_that_has_ended_imports_nothing(started):
    """It was told what to do; the system tells only of ends behind `die_with_parent`."""
    read, write = os.pipe()
    os.write(write, b"{}\n")
    os.close(write)
    with open(read) as orders:
        ended = subprocess.run(words_of("endless"), stdin=orders, timeout=60, **started)
    assert (ended.returncode, ended.stdout) == (0, "")
