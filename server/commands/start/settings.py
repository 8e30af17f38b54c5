"""The settings of `ess serve` and their origins: the only place that reads configuration.

    default < file (--config) < variables of vLLM and SGLang < environment (ESS_...) < flag

A setting is defined once, here or in `ess.engine.config`: its name is the file's key, `ESS_` and
its name in capitals the variable, and its name with dashes the flag. `resolve` gives the values and
where each came from.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ess.config import Setting, setting, settings_of
from ess.engine.config import ProcessConfig
from ess.engine.devices import brought_by
from ess.errors import BadInput, unreadable
from ess.server.commands.start.compat.compat_flags import (
    DP_ATTENTION,
    VALUES,
    is_of_cluster,
    of_each_rank,
    read_foreign,
)
from ess.server.commands.start.files.hidden_files import read_keys, read_secret
from ess.server.commands.start.setting_checks import (
    check_api_keys,
    check_chunks,
    check_equal,
    check_executor,
    check_flags,
    check_role,
)
from ess.server.commands.start.torchrun import placed_by_torchrun
from ess.server.commands.start.written_addresses import listed, read_origins, without_login
from ess.server.process.logs.log_records import LogFormat
from ess.server.process.pair.addresses import NamedWorker, read_peers

Origin = Literal["default", "file", "environment", "flag", "derived"]
PREFIX: Final = "ESS_"
READ_ELSEWHERE: Final = frozenset({"ESS_ROWS", "ESS_ISA", "ESS_CACHE_DIR"})
"""Variables of ours that are no settings: what reads them checks them."""
SECTIONS: Final = (
    *("model", "listening", "limits", "memory", "engine", "handoff", "pipeline"),
    *("times", "telemetry", "trials"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(ProcessConfig):
    """The settings. Sizes are as people write them (128k, 1.5GiB, 25%); `auto` asks the machine."""

    model: str = setting(
        "",
        "model",
        "A checkpoint's folder, or ORG/NAME of `hf download`; by default the model in the box.",
    )
    chat_template: str = setting(
        "", "model", "A Jinja file that writes conversations instead of the checkpoint's own."
    )
    default_chat_template_kwargs: str = setting(
        "",
        "model",
        'What chat templates get that a request does not say: {"enable_thinking": false}.',
    )
    served_model_name: str = setting(
        "", "model", "The name that clients use; several are separated by commas."
    )
    host: str = setting("127.0.0.1", "listening", "The address to listen on.")
    port: int = setting(8000, "listening", "0 takes a free port.", (0, 65535))
    uds: str = setting(
        "", "listening", "A Unix socket to listen on instead of a port, for this user alone."
    )
    root_path: str = setting(
        "", "listening", "The path under which a proxy shows this server, such as /llm."
    )
    api_key: str = setting(
        "", "listening", "The key that every route but /health and /ready needs.", is_secret=True
    )
    server_processes: int = setting(
        1, "listening", "Processes that speak HTTP, all with the same engine.", (1, 64)
    )
    allowed_hosts: str = setting(
        "",
        "listening",
        "Without a key: host names of requests, besides its own; several with commas, * for all.",
    )
    api_key_file: str = setting(
        "", "listening", "Files with the keys, one a line: process lists do not show them."
    )
    without_key: bool = setting(
        False, "listening", "Serve without a key on an address that other machines reach."
    )
    tls_cert: str = setting("", "listening", "Certificate file; with it the server speaks HTTPS.")
    tls_key: str = setting("", "listening", "The certificate's key.")
    tls_ca: str = setting(
        "", "listening", "Certificates of authorities; clients must then show one of theirs."
    )
    allowed_origins: str = setting(
        "",
        "listening",
        "Origins whose pages may use it, as https://chat.example; several with commas, * for all.",
    )
    peers: str = setting(
        "",
        "handoff",
        "For decode: prefill workers as routers name them, HOST:PORT,... or NAME:PORT=HOST:PORT.",
    )
    bootstrap_port: int = setting(
        0, "handoff", "For prefill: another port for other workers; 0: the main one.", (0, 65535)
    )
    peer_secret: str = setting(
        "",
        "handoff",
        "The secret that prefill and decode workers share, 16 bytes or more.",
        is_secret=True,
    )
    peer_secret_file: str = setting(
        "", "handoff", "A file with that secret: process lists do not show it."
    )
    register: str = setting("", "handoff", "The router to register with: sglang-router or smg.")
    register_key: str = setting(
        "", "handoff", "The key of that router; in the environment only.", is_secret=True
    )
    max_connections: int = setting(1024, "listening", "Connections open at a time.", (1, 1 << 20))
    body_bytes: str = setting("32MiB", "listening", "The longest request body.", least="1KiB")
    header_bytes: str = setting(
        "32KiB", "listening", "The longest request line with its headers.", least="1KiB"
    )
    unread_bytes: str = setting(
        "128MiB",
        "listening",
        "Bytes of answers that may wait for slow clients in a process, and as many in its sockets.",
        least="1MiB",
    )
    max_model_len: str = setting("auto", "limits", "Tokens of the longest request, such as 128k.")
    default_sampling: str = setting(
        "",
        "limits",
        'Sampling of requests that do not set it, as JSON: {"temperature": 0.6, "top_p": 0.95}.',
    )
    keep_responses: str = setting(
        "", "limits", "Memory for responses that clients refer to by id, such as 256MiB."
    )
    max_waiting: int = setting(
        256, "limits", "Requests that may wait; any more get 503 with Retry-After.", (0, 1 << 20)
    )
    default_max_tokens: int = setting(
        2048, "limits", "max_tokens of chat requests that do not set it.", (1, 1 << 24)
    )
    host_bytes: str = setting(
        "auto", "memory", "Memory for all rows: 24GiB, or a share of what is free: 50%."
    )
    slot_bytes: str = setting("auto", "memory", "Memory for the slots, the working set of rows.")
    index_bytes: str = setting("auto", "memory", "Memory for the index keys of running requests.")
    device_bytes: str = setting(
        "90%", "memory", "The most to take of a device's memory: 70GiB, or a share of all of it."
    )
    graph_bytes: str = setting(
        "auto",
        "memory",
        "Memory of a device for graphs; auto: what --graphs are estimated to take.",
    )
    keep_alive_s: float = setting(
        15.0, "times", "Seconds of silence after which a stream gets a comment.", (0.01, 3600)
    )
    idle_s: float = setting(
        75.0,
        "times",
        "Seconds an unused connection is kept: longer than a load balancer keeps it.",
        (1, 86400),
    )
    stall_s: float = setting(
        60.0, "times", "Seconds after which a client that reads nothing is cut off.", (0.01, 86400)
    )
    drain_s: float = setting(
        30.0, "times", "Seconds that streams have to finish after SIGTERM.", (0, 86400)
    )
    drain_grace_s: float = setting(
        5.0, "times", "Seconds that probes get 503 before the listener closes.", (0, 3600)
    )
    watchdog_s: float = setting(
        120.0, "times", "Seconds of silence after which the engine counts as stuck.", (0.1, 86400)
    )
    engine_restarts: int = setting(
        3, "limits", "Lost engines replaced within 10 minutes; 0: the server ends too.", (0, 1000)
    )
    recover: Literal["fail", "resume"] = setting(
        "fail", "limits", "A lost engine's requests end with an error, or go on in the next engine."
    )
    metrics_compat: str = setting(
        "vllm,sglang", "telemetry", "Whose metric names /metrics has beside ours."
    )
    stream_usage: bool = setting(
        False, "telemetry", "Every stream ends with its usage, asked for or not."
    )
    request_log: bool = setting(
        False, "telemetry", "A line per request on stderr: route, status, tokens, times; no texts."
    )
    log_format: LogFormat = setting(
        "text",
        "telemetry",
        "A line of stderr: a sentence with its time, without it, or a record for a collector.",
    )
    otlp_endpoint: str = setting(
        "", "telemetry", "Where OpenTelemetry spans go, as http://127.0.0.1:4318/v1/traces."
    )
    executor: Literal["processes", "ray"] = setting(
        "processes", "pipeline", "What starts the ranks of --dp-size: this command, or Ray."
    )
    engine: Literal["model", "paced"] = setting(
        "model", "trials", "paced makes tokens without a model, to try routers and clients."
    )

    def __post_init__(self) -> None:
        check_chunks(self)
        ProcessConfig.__post_init__(self)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise BadInput("tls_cert and tls_key are given together or not at all")
        if self.tls_ca and not self.tls_cert:
            raise BadInput(
                "tls_ca needs tls_cert and tls_key: only HTTPS clients can show a certificate"
            )
        if self.root_path and (self.root_path[0] != "/" or self.root_path[-1] == "/"):
            raise BadInput(
                f"root_path is {self.root_path!r}, must begin with / and not end with it"
            )
        read_origins(self.allowed_origins)
        check_api_keys(self)
        check_role(self)
        check_equal(self)
        check_executor(self)
        unknown = {*self.compat} - {"vllm", "sglang"}
        if unknown:
            raise BadInput(f"metrics_compat has {sorted(unknown)}; vllm and sglang are known")

    @property
    def hosts(self) -> tuple[str, ...]:
        return (self.host, *listed(self.allowed_hosts))

    @property
    def origins(self) -> tuple[str, ...]:
        return read_origins(self.allowed_origins)

    @property
    def peer_list(self) -> tuple[NamedWorker, ...]:
        return read_peers(self.peers)

    @property
    def compat(self) -> tuple[str, ...]:
        return listed(self.metrics_compat)

    @property
    def keys(self) -> tuple[str, ...]:
        """The API keys; several, so that a key can be replaced without an outage."""
        return listed(self.api_key)

    @property
    def names(self) -> tuple[str, ...]:
        return listed(self.served_model_name)


FIELDS: Final[Mapping[str, Setting]] = {
    name: known
    for section in SECTIONS
    for name, known in settings_of(Settings).items()
    if known.section == section
}


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    settings: Settings
    origins: Mapping[str, Origin]
    notes: tuple[str, ...] = ()

    def shown(self) -> dict[str, dict[str, Any]]:
        """Every value with its origin; secrets only as set or not."""
        listed = {}
        for name, known in FIELDS.items():
            value = getattr(self.settings, name)
            shown = ("set" if value else "not set") if known.is_secret else without_login(value)
            listed[name] = {"value": shown, "from": self.origins[name]}
        return listed

    def deriving(self, **values: Any) -> Resolved:
        """These settings with values that the checkpoint or the machine has decided."""
        return msgspec.structs.replace(
            self,
            settings=replace(self.settings, **values),
            origins={**self.origins, **dict.fromkeys(values, "derived")},
        )


def resolve(
    flags: Mapping[str, Any], *, config: Path | None = None, environment: Mapping[str, str]
) -> Resolved:
    """Merges all origins; flags that are None were not given. DP_ATTENTION among them says what
    tp_size counts, wherever that comes from."""
    given_flags = {name: value for name, value in flags.items() if value is not None}
    has_shares = given_flags.pop(DP_ATTENTION, False)
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = dict.fromkeys(FIELDS, "default")
    foreign, notes = read_foreign(environment)
    layers: tuple[tuple[Origin, Mapping[str, Any]], ...] = (
        ("file", {} if config is None else read_file(config)),
        ("environment", foreign),
        ("environment", read_environment(environment)),
        ("flag", given_flags),
    )
    for origin, given in layers:
        for name, value in given.items():
            values[name] = _converted(name, value, origin)
            origins[name] = origin
    if origins["pp_layer_partition"] == "environment" and values.get("pp_size", 1) == 1:
        del values["pp_layer_partition"]
        origins["pp_layer_partition"] = "default"
        notes.append("pp_layer_partition from environment has no effect: there is one stage")
    if has_shares and "tp_size" in values and values.get("dp_size", 1) > 1:
        values["tp_size"] = of_each_rank(values["tp_size"], values["dp_size"])
    for name, given in placed_by_torchrun(environment, values).items():
        values[name] = given
        if name in FIELDS:
            origins[name] = "environment"
    if origins["api_key"] != "default" and not values["api_key"]:
        raise BadInput(f"api_key from {origins['api_key']} is empty: give a key or do not set it")
    if origins["register_key"] not in ("default", "environment"):
        raise BadInput(
            f"register_key from {origins['register_key']}: others could read it there; set"
            " ESS_REGISTER_KEY instead"
        )
    _read_hidden(values, origins)
    brought, unused = brought_by(values)
    values |= brought
    origins.update(dict.fromkeys(brought, "derived"))
    settings = Settings(**values)
    check_flags(settings, given_flags)
    return Resolved(settings=settings, origins=origins, notes=(*notes, *unused))


def _read_hidden(values: dict[str, Any], origins: dict[str, Origin]) -> None:
    """Keys and the secret, where a file has them."""
    for name, read in (("api_key", read_keys), ("peer_secret", read_secret)):
        file = f"{name}_file"
        if not values.get(file):
            continue
        if values.get(name):
            raise BadInput(f"{name} and {file} are both given: give only one of them")
        values[name], origins[name] = read(values[file]), origins[file]


def read_file(path: Path) -> dict[str, Any]:
    """Reads TOML, or JSON if the file is named so. Keys may use dashes, as flags do."""
    form = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
        raw = msgspec.json.decode(text) if form == "JSON" else tomllib.loads(text)
    except OSError as error:
        raise unreadable(f"the file {path}", error) from None
    except ValueError as error:
        wanted = " (settings are TOML, as port = 8000, or JSON in a file.json)"
        hint = wanted if path.suffix in (".yaml", ".yml") else ""
        raise BadInput(f"the file {path} is not {form}: {error}{hint}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"the file {path} is not a table of settings")
    given = {key.replace("-", "_"): value for key, value in raw.items()}
    for name, value in given.items():
        if isinstance(value, dict):
            raise BadInput(
                f"the file {path} has the table [{name}]: settings stand at the top level"
            )
        if name not in FIELDS:
            raise BadInput(f"the file {path} has the unknown key {name!r}{_suggestion(name)}")
    return given


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Refuses an unknown ESS_ variable: a setting that is silently ignored misleads."""
    given = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or variable in READ_ELSEWHERE:
            continue
        if is_of_cluster(variable, value):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name not in FIELDS:
            raise BadInput(f"the variable {variable} is unknown{_suggestion(name, PREFIX)}")
        given[name] = value
    return given


def _suggestion(name: str, prefix: str = "") -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    shown = prefix + close[0].upper() if close and prefix else close[0] if close else ""
    return f"; did you mean {shown!r}?" if shown else "; `ess serve --help` lists all"


def _converted(name: str, value: Any, origin: Origin) -> Any:
    kind = FIELDS[name].type
    value = VALUES.get(name, {}).get(value, value) if isinstance(value, str) else value
    given = str(value) if kind is str and isinstance(value, int) else value
    try:
        return msgspec.convert(given, kind, strict=origin == "file")
    except msgspec.ValidationError as error:
        known = FIELDS[name]
        shown = "no text" if known.is_secret else f"{value!r:.60}"
        why = f"must be {known.allowed}" if known.choices and isinstance(value, str) else error
        also = " (--dtype)" if name == "form" else ""
        raise BadInput(f"{name}{also} from {origin} is {shown}: {why}") from None
