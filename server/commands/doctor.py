"""`ess doctor`: what this machine can do, and what limits it.

Each check is of something that has kept ESS from working somewhere. The last checks decode two
layers, offloaded and resident, on the CPU and on a device if there is one, and exchange tokens
between several devices; they run in their own processes, because this process has no torch.
"""

from __future__ import annotations

import platform
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from rich.table import Table

from ess import console
from ess.errors import BadInput, Unavailable
from ess.flashtrans.ways import Choice, settle
from ess.free_resources import memory_free
from ess.kernels.cpu import native
from ess.kernels.cuda import driver
from ess.server.commands.start.devices.device_probing import ask
from ess.server.commands.start.trial import answer_of
from ess.server.commands.transports import tried
from ess.units import format_bytes

Grade = Literal["ok", "warn", "fail"]
ERRORS_FOUND: Final = 3
TRIAL_S: Final = 300.0
HOST_BYTES_MIN: Final = 2 << 30
PACKAGES: Final = (
    *("torch", "safetensors", "tokenizers", "fastapi", "uvicorn", "uvloop", "httptools"),
    *("pyzmq", "prometheus-client", "jinja2", "llguidance"),
)
TRIAL: Final = "ess.engine.process.checks.selfcheck"
DEVICE_TRIAL: Final = "ess.engine.process.checks.device_check"
EXCHANGE_TRIAL: Final = "ess.engine.process.checks.exchange_check"
PLACEHOLDERS: Final = ("flash-mla", "deep-gemm")
TRITON: Final = "3.6"


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check, and as a `hint` what to do about it."""

    name: str
    grade: Grade
    state: str = msgspec.field(name="found")
    hint: str = ""


def checked(name: str, state: str, hint: str = "", bad: Grade = "warn") -> Check:
    """Good where there is nothing to do about it."""
    return Check(name=name, grade=bad if hint else "ok", state=state, hint=hint)


def doctor(*, port: int = 8000, transfer_host: str = "127.0.0.1", json: bool = False) -> int:
    """Check this machine and end with a decode, offloaded against resident.

    Parameters
    ----------
    port
        The port that a server would take.
    transfer_host
        The address at which rows of handoffs would arrive.
    json
        Print one JSON document.
    """
    if not 0 <= port <= 65535:
        raise BadInput(f"--port {port}: must be 0 to 65535")
    checks: list[Check] = []
    for check in examined(port, transfer_host):
        if not json:
            is_told = bool(checks) and checks[-1].hint == check.hint
            _print(check, hint="" if is_told else check.hint)
        checks.append(check)
    failed = any(check.grade == "fail" for check in checks)
    console.note(_summary(checks))
    if json:
        console.print_json({"ok": not failed, "checks": msgspec.to_builtins(checks)})
    return ERRORS_FOUND if failed else console.OK


def _summary(checks: Sequence[Check]) -> str:
    bad, poor = ([c.name for c in checks if c.grade == grade] for grade in ("fail", "warn"))
    if bad:
        return f"ess: this machine cannot serve yet: {', '.join(bad)}"
    if poor:
        return f"ess: this machine can serve; before `ess serve` look at: {', '.join(poor)}"
    return "ess: this machine can serve, `ess serve` starts"


def examined(port: int, transfer_host: str) -> Iterator[Check]:
    yield _python()
    for package in PACKAGES:
        yield _package(package)
    for package in PLACEHOLDERS:
        yield from _placeholder(package)
    yield from _here(port, transfer_host)
    yield from _device()


def _here(port: int, transfer_host: str) -> Iterator[Check]:
    checks: tuple[Callable[[], Check], ...] = (
        *(_native, _rows, _memory, _locked, _shared, _huge_pages),
        *(lambda: _port(port), lambda: _transport("tcp", transfer_host)),
        *(lambda: _transport("shared", transfer_host), lambda: _transport("nixl", transfer_host)),
        *(_stages, _decode),
    )
    for check in checks:
        yield check()


def _python() -> Check:
    hint = "" if sys.version_info >= (3, 11) else "3.11 or newer is needed"
    return checked("python", platform.python_version(), hint, bad="fail")


def _package(name: str) -> Check:
    try:
        return checked(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return checked(name, "missing", "pip install 'ess[serve]'", bad="fail")


def _placeholder(name: str) -> Iterator[Check]:
    """Empty packages have these names; the working packages are called sgl-..."""
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return
    if version in ("1.0.0", "1.0.0.dev0"):
        hint = f"pip uninstall {name}; the working package is sgl-{name}"
        yield checked(name, f"{version}, a placeholder", hint)


def _native() -> Check:
    if native.available():
        tiles = ", products of bf16 by tiles" if native.has_tiles() else ""
        state = f"{native.isa()}, compute by {native.kernels()}{tiles}"
        return checked("native kernels", state)
    hint = "build with a C++17 compiler; until then torch does it, slower"
    return checked("native kernels", "missing", hint)


def _rows() -> Check:
    """Times the ways of gathering now, unless an earlier process on this machine has."""
    try:
        return checked("row moves", said_of(settle()))
    except BadInput as error:
        return checked("row moves", "not settled", str(error), bad="fail")


def said_of(choices: Sequence[Choice]) -> str:
    """The way for most gathers, then that of each class that has another, with its gain if the
    ways were timed."""
    if not choices:
        return "by NumPy"
    usual = Counter(choice.way for choice in choices).most_common(1)[0][0]
    others = [
        f"{choice.way!r} for {choice.count:,} of {choice.row_bytes:,} B"
        + (f" (x{choice.gain:.2f})" if choice.gain != 1 else "")
        for choice in choices
        if choice.way != usual
    ]
    return ", ".join((f"gathered as {usual!r}", *others))


def _memory() -> Check:
    """Free memory, which a server's pools are cut from."""
    free = memory_free()
    less = "give --host-bytes less than a quarter of what is free"
    return checked("memory", f"{format_bytes(free)} free", less if free < HOST_BYTES_MIN else "")


def _locked() -> Check:
    """Pinned memory counts against this limit where a GPU driver does not lift it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return checked("locked memory", "unlimited")
    if shutil.which("nvidia-smi") is None:
        return checked("locked memory", f"{format_bytes(limit)}: enough without a GPU")
    hint = "ulimit -l unlimited, if rows are to be pinned for a GPU"
    return checked("locked memory", format_bytes(limit), hint)


def _shared() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return checked("/dev/shm", "missing", "mount a tmpfs there")
    more = "docker run --shm-size 1g, if ranks are to share a pool"
    return checked("/dev/shm", format_bytes(free), more if free < 64 << 20 else "")


def _huge_pages() -> Check:
    """`always` makes the first touch of a large pool wait for compaction."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/defrag").read_text()
    except OSError:
        return checked("huge pages", "not configurable here")
    chosen = text.partition("[")[2].partition("]")[0]
    faster = "echo madvise > /sys/kernel/mm/transparent_hugepage/defrag"
    return checked("huge pages", f"defrag {chosen}", faster if chosen == "always" else "")


def _device() -> Iterator[Check]:
    """A server needs no device. If there is one, a small model runs on it."""
    missing = driver.why_missing()
    if missing is not None:
        yield _no_device(missing)
        return
    try:
        report = ask(0)
    except Unavailable as error:
        yield checked("device", "it does not answer", str(error))
        return
    sees = f"{report.name}, {report.arch}, {format_bytes(report.free_bytes)} free"
    why = report.why_not("cuda")
    yield checked("device", sees, why)
    if why:
        return
    yield from _triton()
    yield from _device_decode()
    if (count := min(report.count, report.torch_count)) > 1:
        yield _device_ranks(count)


def _triton() -> Iterator[Check]:
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return
    is_tuned = version.startswith(f"{TRITON}.")
    hint = "" if is_tuned else f"kernels are tuned to {TRITON}: pip install 'triton=={TRITON}.*'"
    yield checked("triton", version, hint)


def _no_device(missing: str) -> Check:
    """One line. A GPU that only the system's own tools see gets a hint."""
    why = missing.partition(":")[0].rstrip(".")
    if shutil.which("nvidia-smi") is None:
        return checked("device", f"none ({why}); `ess serve` runs on the CPU")
    hint = "pip install 'ess[serve,cuda]', torch for CUDA, a driver of CUDA 13 or later"
    return checked("device", f"nvidia-smi is here, but {why}", hint)


def _device_decode() -> Iterator[Check]:
    console.note("ess: decoding a little on the device; its kernels are compiled first ...")
    printed, fault = answer_of("-m", DEVICE_TRIAL, "0", limit_s=TRIAL_S)
    if fault:
        yield checked("device decode", "the trial failed", fault, bad="fail")
        return
    yield from judged_on_device(msgspec.json.decode(printed))


def judged_on_device(trial: dict[str, Any]) -> Iterator[Check]:
    """The result of the decode, then the chosen kernel of each kind and the reason."""
    times = f"{trial['device_s']:.2f} s there, {trial['host_s']:.2f} s on the CPU"
    if trial["same"]:
        state = f"the CPU's tokens, {trial['miss_count']:,} rows fetched; {times}"
        yield checked("device decode", state)
    else:
        hint = "a wrong answer: do not serve from this device"
        yield checked("device decode", f"other tokens; {times}", hint, bad="fail")
    for line in trial["kernels"]:
        kind, _, chosen = line.partition(": ")
        yield checked(kind, chosen)


def _device_ranks(count: int) -> Check:
    """Whether ranks that divide the experts could meet on all devices."""
    console.note(f"ess: exchanging a few tokens between {count} devices ...")
    printed, fault = answer_of("-m", EXCHANGE_TRIAL, str(count), limit_s=TRIAL_S)
    if fault:
        hint = f"{fault}; until that is mended serve without --dp-size"
        return checked("ranks", f"no exchange of {count}", hint)
    return judged_exchange(msgspec.json.decode(printed))


def judged_exchange(trial: dict[str, Any]) -> Check:
    taken, estimated = trial["taken_bytes"], trial["estimated_bytes"]
    state = (
        f"{trial['count']} devices in {trial['seconds']:.1f} s; an exchange took"
        f" {format_bytes(taken)}, estimated were {format_bytes(estimated)}"
    )
    if trial["wrong"]:
        ranks = ", ".join(map(str, trial["wrong"]))
        hint = f"wrong sums on devices {ranks}: do not serve with --dp-size from these devices"
        return checked("ranks", state, hint, bad="fail")
    less = "give --device-bytes less: what exchanges take is underestimated"
    return checked("ranks", state, less if taken > estimated else "")


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            hint = "stop what listens there, or serve with --port"
            return checked("port", f"{port}: {error.strerror}", hint)
    return checked("port", f"{port} is free")


def _transport(kind: str, host: str) -> Check:
    trial = tried(kind, host)
    return Check(name=f"handoff by {kind}", grade=trial.grade, state=trial.state, hint=trial.hint)


def _stages() -> Check:
    """Whether torch has gloo, which only the stages of a prefill worker need."""
    asked = "from torch import distributed as d; print(d.is_available() and d.is_gloo_available())"
    printed, _ = answer_of("-c", asked, limit_s=TRIAL_S)
    if printed == "True":
        return checked("stages", "gloo: `ess prefill --pp-size` can run")
    hint = "a torch with gloo is needed for --pp-size, --tp-size and --cp-size"
    return checked("stages", "this torch has no gloo", hint)


def _decode() -> Check:
    console.note("ess: decoding a little, offloaded and resident, which takes some seconds ...")
    printed, fault = answer_of("-m", TRIAL, limit_s=TRIAL_S)
    if fault:
        return checked("decode", "the trial failed", fault, bad="fail")
    return judged(msgspec.json.decode(printed))


def judged(trial: dict[str, Any]) -> Check:
    times = f"{trial['offload_s']:.2f} s offloaded, {trial['resident_s']:.2f} s resident"
    if not trial["same"]:
        hint = "a wrong answer: do not serve from this machine"
        return checked("decode", f"other tokens; {times}", hint, bad="fail")
    state = f"the same tokens, {trial['miss_count']:,} rows fetched; {times}"
    return checked("decode", state)


def _print(check: Check, *, hint: str) -> None:
    table = Table.grid(padding=(0, 2))
    for width in (5, 18, None):
        table.add_column(width=width)
    table.add_row(check.grade, check.name, check.state)
    if hint:
        table.add_row("", "", f"-> {hint}")
    console.tables().print(table)
