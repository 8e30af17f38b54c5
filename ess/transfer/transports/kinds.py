"""The transports between processes, by the names that users give them."""

from __future__ import annotations

from typing import Literal, get_args

from ess.clock import Clock
from ess.errors import BadInput
from ess.transfer.endpoint import Identity
from ess.transfer.transport import Transport
from ess.transfer.transports.nixl import NixlTransport
from ess.transfer.transports.shared import SharedTransport
from ess.transfer.transports.tcp import TcpTransport

Kind = Literal["tcp", "shared", "nixl"]


def kind_of(name: str) -> Kind:
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if kind == name:
            return kind
    raise BadInput(f"{name!r} is not a transport; it must be one of {', '.join(kinds)}")


def open_transport(
    kind: Kind,
    identity: Identity,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    clock: Clock | None = None,
) -> Transport:
    """Opens a transport; only TCP listens at `host` and `port`. Unavailable where it cannot run."""
    match kind:
        case "tcp":
            return TcpTransport(identity, host=host, port=port, clock=clock)
        case "shared":
            return SharedTransport(identity, clock=clock)
        case "nixl":
            return NixlTransport(identity, clock=clock)
