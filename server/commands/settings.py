"""What `ess serve` is told, and by whom: the only place where its configuration is read.

    default < file (--config, TOML) < environment of others < environment (ESS_...) < flag

A field of `Settings` is a setting: its name is the file's key, `ESS_` and its name in capitals the
variable, and its name with dashes the flag. `resolve` gives the values and where each came from.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ess.engine.tokens.determinism import check_deterministic
from ess.errors import BadInput
from ess.server.commands.compat_flags import VALUES, is_of_cluster, read_foreign
from ess.units import parse_size

Origin = Literal["default", "file", "environment", "flag", "derived"]
PREFIX: Final = "ESS_"


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """Sizes are as people write them (128k, 1.5GiB, 25%); `auto` is worked out from the machine."""

    model: str = ""
    served_model_name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    max_model_len: str = "auto"
    max_running: int = 16
    max_waiting: int = 256
    max_connections: int = 1024
    default_max_tokens: int = 2048
    host_bytes: str = "auto"
    slot_bytes: str = "auto"
    index_bytes: str = "auto"
    chunk_tokens: int = 512
    overlap: Literal["layerwise", "da", "dba", "none", "resident"] = "layerwise"
    promise: Literal["all", "some"] = "all"
    tbo: Literal["off", "on", "auto"] | int = "off"
    mtp: int = 2
    mtp_auto: bool = False
    tpot_ms: float = 0.0
    deterministic: bool = False
    depth: int = 0
    budget_every: int = 64
    form: Literal["bf16", "f32"] = "bf16"
    row: Literal["fp8", "bf16", "f32"] = "fp8"
    warmup: bool = True
    verify: int = 0
    threads: int = 0
    keep_alive_s: float = 15.0
    idle_s: float = 75.0
    stall_s: float = 60.0
    drain_s: float = 30.0
    drain_grace_s: float = 5.0
    watchdog_s: float = 120.0
    body_bytes: str = "32MiB"
    header_bytes: str = "32KiB"
    engine: Literal["model", "paced"] = "model"
    pace_ms: float = 0.0
    metrics_compat: str = "vllm,sglang"
    otlp_endpoint: str = ""


SECRET: Final = frozenset({"api_key"})
FIELDS: Final = {field.name: field for field in msgspec.structs.fields(Settings)}


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()

    def shown(self) -> dict[str, dict[str, Any]]:
        """Every value with its origin; secrets only as set or not."""
        found = {}
        for name in FIELDS:
            value = getattr(self.settings, name)
            shown = ("set" if value else "not set") if name in SECRET else value
            found[name] = {"value": shown, "from": self.origins[name]}
        return found


def resolve(
    flags: Mapping[str, Any], *, config: Path | None = None, environment: Mapping[str, str]
) -> Resolved:
    """Flags that are None were not given."""
    values: dict[str, Any] = {name: field.default for name, field in FIELDS.items()}
    origins: dict[str, Origin] = dict.fromkeys(FIELDS, "default")
    foreign, notes = read_foreign(environment)
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("file", {} if config is None else read_file(config)),
        ("environment", foreign),
        ("environment", read_environment(environment)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    )
    for origin, given in layers:
        for name, value in given.items():
            values[name] = _converted(name, value, origin)
            origins[name] = origin
    return Resolved(settings=_checked(Settings(**values)), origins=origins, notes=tuple(notes))


def read_file(path: Path) -> dict[str, Any]:
    """Keys may use dashes, as flags do."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"the file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"the file {path} is not TOML: {error}") from None
    found = {key.replace("-", "_"): value for key, value in raw.items()}
    for name in found:
        if name not in FIELDS:
            raise BadInput(f"the file {path} has the unknown key {name!r}{_suggestion(name)}")
    return found


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """An unknown ESS_ variable is refused too: a setting that is silently ignored misleads."""
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or is_of_cluster(variable, value):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in FIELDS:
            raise BadInput(f"the variable {variable} is unknown{_suggestion(name, PREFIX)}")
        found[name] = value
    return found


def _suggestion(name: str, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    shown = prefix + close[0].upper() if close and prefix else close[0] if close else ""
    return f"; did you mean {shown!r}?" if shown else f"; known: {', '.join(FIELDS)}"


def _converted(name: str, value: Any, origin: Origin) -> Any:
    kind = FIELDS[name].type
    value = VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
    given = str(value) if kind is str and isinstance(value, int) else value
    try:
        return msgspec.convert(given, kind, strict=origin == "file")
    except msgspec.ValidationError as error:
        raise BadInput(f"{name} from {origin} is {value!r:.60}: {error}") from None


RANGES: Final[Mapping[str, tuple[float, float]]] = {
    "port": (0, 65535),
    "max_running": (1, 4096),
    "max_waiting": (0, 1 << 20),
    "max_connections": (1, 1 << 20),
    "default_max_tokens": (1, 1 << 24),
    "chunk_tokens": (64, 1 << 20),
    "mtp": (1, 8),
    "tpot_ms": (0.0, 60_000.0),
    "depth": (0, 1),
    "budget_every": (0, 1 << 20),
    "verify": (0, 1 << 20),
    "threads": (0, 1024),
    "keep_alive_s": (0.01, 3600.0),
    "idle_s": (1.0, 86400.0),
    "stall_s": (0.01, 86400.0),
    "drain_s": (0.0, 86400.0),
    "drain_grace_s": (0.0, 3600.0),
    "pace_ms": (0.0, 60_000.0),
    "watchdog_s": (0.1, 86400.0),
}


def _checked(settings: Settings) -> Settings:
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        if not low <= value <= high:
            raise BadInput(f"{name} is {value}, must be {low:g}..{high:g}")
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise BadInput("tls_cert and tls_key are given together or not at all")
    if settings.deterministic:
        check_deterministic(settings.overlap, called="overlap", tbo=settings.tbo)
    unknown = {*compat_of(settings)} - {"vllm", "sglang"}
    if unknown:
        raise BadInput(f"metrics_compat has {sorted(unknown)}; vllm and sglang are known")
    return settings


def compat_of(settings: Settings) -> tuple[str, ...]:
    return tuple(name for name in settings.metrics_compat.replace(" ", "").split(",") if name)


def keys_of(settings: Settings) -> tuple[str, ...]:
    """Several keys are separated by commas, so that one can be replaced without an outage."""
    return tuple(key.strip() for key in settings.api_key.split(",") if key.strip())


def size_of(text: str, *, of: int) -> int:
    """A size, or a share of what there is: 25%, or 0.25 as others write it.

    >>> size_of("25%", of=4096), size_of("0.25", of=4096)
    (1024, 1024)
    """
    if text.startswith(("0.", ".")) and text.lstrip("0").lstrip(".").isdigit():
        return int(of * float(text))
    if text.endswith("%"):
        try:
            share = float(text[:-1])
        except ValueError:
            raise BadInput(f"{text!r} is not a share; write 25%") from None
        if not 0 < share <= 100:
            raise BadInput(f"{text!r} is not a share of 0% to 100%")
        return int(of * share / 100)
    return parse_size(text)


def memory_free() -> int:
    """Bytes that this machine could give now, without what others need."""
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return pages * size
