"""Processes started by torchrun: each gets its rank from the environment.

    torchrun --nproc-per-node 4 --no-python ess prefill MODEL --pp-size 4 --host-bytes 64GiB ...
    torchrun --nproc-per-node 2 --no-python ess serve MODEL --dp-size 2 --host-bytes 64GiB ...

In a prefill worker rank 0 speaks HTTP. Servers that divide the experts all do, at --port plus their
place on the machine. Every process keeps its one rank, and starts it again when the worker
restarts; torchrun itself only sees processes that keep running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ess.errors import BadInput

TOLD: Final = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
PORT: Final = 8000
ITS_OWN: Final = ("nnodes", "node_rank")


def placed_by_torchrun(environment: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that torchrun decides; none without torchrun, or for a worker of one process."""
    if any(name not in environment for name in ("MASTER_ADDR", *TOLD)):
        return {}
    if values.get("role") != "prefill":
        return _rank_by_torchrun(environment, values) if values.get("dp_size", 1) > 1 else {}
    rank, size, local_size, port = (_number(environment, name) for name in TOLD)
    names = ("pp_size", "tp_size", "cp_size")
    pipeline, *team = (int(values.get(name, 1)) for name in names)
    asked = pipeline * team[0] * team[1]
    if size != asked:
        shown = " x ".join(f"{name} {values.get(name, 1)}" for name in names)
        raise BadInput(f"torchrun starts {size} processes (WORLD_SIZE), but {shown} is {asked}")
    _refuse_given(values, ITS_OWN)
    if not 0 <= rank < size or not 0 < local_size <= size:
        raise BadInput(f"RANK is {rank} and LOCAL_WORLD_SIZE {local_size} of {size} processes")
    return {
        "nnodes": size // local_size,
        "node_rank": rank // local_size,
        "only_rank": rank,
        "dist_init_addr": _meeting_address(environment, values, port),
    }


def _rank_by_torchrun(environment: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a server that divides the experts with others."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    if "LOCAL_RANK" not in environment:
        return {}
    rank, size, place, port = (_number(environment, name) for name in names)
    if size != values["dp_size"]:
        raise BadInput(
            f"torchrun starts {size} processes (WORLD_SIZE), but dp_size is {values['dp_size']}"
        )
    _refuse_given(values, (*ITS_OWN, "dp_rank"))
    own = values.get("port", PORT)
    of_place = {"device": f"cuda:{place}"} if values.get("device") == "cuda" else {}
    return {
        **of_place,
        "dp_rank": rank,
        "dist_init_addr": _meeting_address(environment, values, port),
        "port": own + place if own else 0,
    }


def _refuse_given(values: Mapping[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if name in values:
            raise BadInput(
                f"{name} is {values[name]}: leave it out, since torchrun says where processes run"
            )


def _meeting_address(
    environment: Mapping[str, str], values: Mapping[str, Any], master_port: int
) -> str:
    """Where the processes meet: torchrun's own store listens at MASTER_PORT, so at the next port
    unless the user gave an address."""
    return values.get("dist_init_addr") or f"{environment['MASTER_ADDR']}:{master_port + 1}"


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal() or len(text) > 9:
        raise BadInput(f"{name} is {text!r:.20} in the environment, must be a number")
    return int(text)


def cleaned(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without torchrun's variables, which would make a process look for its
    store."""
    own = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
    return {name: value for name, value in environment.items() if not name.startswith(own)}
