"""Which settings go together: what has no effect, is unsafe or cannot be met is refused by name.

`Settings` calls these checks of itself; `check_flags` also knows which settings came as flags, and
`check_events` is for a server that publishes events.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from ess.errors import BadInput
from ess.server.commands.start.files.hidden_files import check_header_text
from ess.server.commands.start.written_addresses import is_loopback, is_near
from ess.server.process.pair.addresses import check_router, read_peers
from ess.transfer.messages import SECRET_BYTES_MIN

if TYPE_CHECKING:
    from ess.server.commands.start.settings import Settings

OF_DECODING: Final = frozenset(
    {
        *("modes", "calibration", "tbo", "sbo", "mtp_auto", "depth", "promise"),
        *("budget_every", "warm", "verify_every", "evict", "graphs"),
        *("graph_sizes", "graph_bytes"),
    }
)
"""Settings that affect only steps that decode."""


def check_api_keys(settings: Settings) -> None:
    """Refuses a server without a key unless that was asked for, or only this machine reaches it."""
    if settings.api_key and not settings.keys:
        raise BadInput("api_key has no key in it, only spaces and commas")
    check_header_text(settings.keys, "api_key")
    if settings.keys and settings.without_key:
        raise BadInput("give api_key or without_key, not both")
    is_near = bool(settings.uds) or is_loopback(settings.host)
    if not (settings.keys or settings.without_key or is_near):
        raise BadInput(
            f"host is {settings.host!r}, which other machines reach, and there is no key:"
            " give --api-key-file FILE, or --without-key to serve everybody"
        )


def check_events(settings: Settings) -> None:
    """Refuses events on a public address: they hold prompts' tokens, and no key guards them."""
    given = {name: getattr(settings, name) for name in ("kv_events", "kv_events_replay")}
    if given["kv_events_replay"] and not given["kv_events"]:
        raise BadInput("kv_events_replay is given without kv_events: there is nothing to replay")
    if given["kv_events"] and settings.engine == "paced":
        raise BadInput("kv_events is given, but the paced engine has no pages to report")
    for name, address in given.items():
        if address and not is_near(name, address) and not settings.kv_events_public:
            raise BadInput(
                f"{name} is {address!r}, which other machines reach: events hold the tokens of"
                " prompts and need no key; give --kv-events-public to publish them all the same"
            )


def check_role(settings: Settings) -> None:
    """Refuses a setting of another role: it has no effect and would mislead."""
    if settings.peers and settings.role != "decode":
        raise BadInput(f"peers is for a decode worker, and role is {settings.role}")
    if settings.bootstrap_port and settings.role != "prefill":
        raise BadInput(f"bootstrap_port is for a prefill worker, and role is {settings.role}")
    if settings.recover == "resume" and settings.role == "prefill":
        raise BadInput(
            "recover is resume, and role is prefill: give recover fail; the router sends a lost"
            " prompt again"
        )
    read_peers(settings.peers)
    if settings.register and settings.role == "both":
        raise BadInput("register is for a prefill or a decode worker, and role is both")
    if settings.register:
        check_router(settings.register)
    if settings.role == "both":
        return _check_ranks_secret(settings)
    count = len(settings.peer_secret.encode())
    if not count:
        raise BadInput(
            f"peer_secret_file is missing: a {settings.role} worker meets no others without a"
            " secret: give a file with the one that all workers share, or set ESS_PEER_SECRET"
        )
    if count < SECRET_BYTES_MIN:
        raise BadInput(f"peer_secret has {count} bytes; at least {SECRET_BYTES_MIN} are needed")
    if settings.role == "prefill" and settings.tls_cert:
        raise BadInput(
            "tls_cert is not for a prefill worker: decode workers connect to it over plain HTTP"
        )
    if settings.role == "prefill" and settings.uds and not settings.bootstrap_port:
        raise BadInput(
            "uds is given without bootstrap_port: give that too, as the port for decode workers"
        )


def _check_ranks_secret(settings: Settings) -> None:
    """Refuses ranks on several machines without a secret: they trust what they hear."""
    host = settings.dist_init_addr.rpartition(":")[0].strip("[]")
    is_met = (settings.dp_size > 1 and settings.dp_rank >= 0) or (
        settings.world_size > 1 and settings.nnodes > 1
    )
    is_open = is_met and not is_loopback(host)
    if is_open and len(settings.peer_secret.encode()) < SECRET_BYTES_MIN:
        raise BadInput(
            f"dist_init_addr is {settings.dist_init_addr}, which other machines reach: give all"
            f" ranks --peer-secret-file, with {SECRET_BYTES_MIN} bytes or more"
        )


def check_flags(settings: Settings, names: Iterable[str]) -> None:
    """Refuses flags without an effect in this worker. A file or the environment may serve workers
    of every role, so they may have such settings."""
    if settings.role != "prefill":
        return
    for name in sorted({*names} & OF_DECODING):
        raise BadInput(
            f"{name} has no effect on a prefill worker, which decodes nothing: give it to the"
            " workers that decode"
        )
    if settings.is_staged and "tpot_ms" in names:
        raise BadInput(
            "tpot_ms has no effect on stages, which decode nothing: chunk_tokens and"
            " dynamic_chunking size their chunks"
        )


def check_chunks(settings: Settings) -> None:
    if settings.chunk_tokens == -1:
        raise BadInput(
            "chunk_tokens is -1, no chunks in SGLang's words: prompts always run in chunks here;"
            " give the most tokens of prompts that a step may take"
        )


def check_equal(settings: Settings) -> None:
    """Refuses sizes by this machine's memory: all processes of a worker need the same pages."""
    if settings.nnodes == 1 and settings.only_rank is None and settings.executor == "processes":
        return
    for name in ("host_bytes", "slot_bytes", "index_bytes"):
        given = getattr(settings, name)
        is_share = given.endswith("%") or given.startswith(("0.", "."))
        if is_share or (given == "auto" and name == "host_bytes"):
            raise BadInput(
                f"{name} is {given}, which each process would work out for itself, and all must"
                " have equally many pages: give a size, such as 64GiB"
            )


def check_executor(settings: Settings) -> None:
    if settings.executor == "processes":
        return
    if settings.dp_size == 1 or settings.dp_rank >= 0:
        raise BadInput(
            "executor is ray, which starts all ranks itself: give dp_size of at least 2, and no"
            " dp_rank"
        )
    if settings.nnodes > 1 or settings.dist_init_addr:
        raise BadInput(
            "executor is ray, which finds nodes itself: leave out nnodes and dist_init_addr"
        )
    if settings.device != "cpu":
        raise BadInput(
            f"executor is ray, and device is {settings.device}: Ray starts ranks on CPUs only;"
            " start these by hand"
        )
