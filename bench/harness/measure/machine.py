"""Where a number was measured: the machine, how busy it was, and the build."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ess
from ess.kernels.cpu import native
from ess.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`load_average` is from before the first benchmark, over 1, 5 and 15 minutes."""

    cpu: str
    cores: int
    isa: str
    ram_bytes: int
    system: str
    load_average: tuple[float, float, float]

    def line(self) -> str:
        load = self.load_average[0]
        ram = format_bytes(self.ram_bytes)
        return f"{self.cpu}, {self.cores} cores, {self.isa}, {ram}, load {load:.2f} at start"


@dataclass(frozen=True, kw_only=True)
class Build:
    """`commit` ends in "+" when tracked files were changed; null outside a checkout of ESS."""

    version: str
    commit: str | None
    python: str
    numpy: str | None
    torch: str | None

    def line(self) -> str:
        commit = f" ({self.commit})" if self.commit else ""
        torch = f"torch {self.torch}" if self.torch else "no torch"
        return f"ess {self.version}{commit}, Python {self.python}, NumPy {self.numpy}, {torch}"


def machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        isa=native.isa() if native.available() else "none: no native library",
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        load_average=os.getloadavg(),
    )


def build() -> Build:
    return Build(
        version=ess.__version__,
        commit=_commit(),
        python=platform.python_version(),
        numpy=version_of("numpy"),
        torch=version_of("torch"),
    )


def _cpu_name() -> str:
    listing = Path("/proc/cpuinfo")
    for line in listing.read_text().splitlines() if listing.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    """The version from the installed metadata: importing torch takes seconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the checkout that this package is imported from."""
    root = Path(ess.__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    commit = _git(root, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    return commit + ("+" if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
