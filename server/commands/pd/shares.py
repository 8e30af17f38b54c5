"""From `ess serve --pd 1p3d` and its settings to the settings of each worker and its share of the
machine."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ess.errors import BadInput
from ess.flashtrans import ways
from ess.free_resources import memory_total
from ess.layout import ModelLayout
from ess.server.commands.start.compat.compat_flags import FAMILY
from ess.server.commands.start.files.checkpoint import Checkpoint, read_checkpoint, read_entries
from ess.server.commands.start.files.words import read_words
from ess.server.commands.start.resolving import derived, layout_of, sized, weights_of
from ess.server.commands.start.settings import (
    FIELDS,
    PREFIX,
    READ_ELSEWHERE,
    Resolved,
    Settings,
    resolve,
)
from ess.server.commands.start.sizing import STATE_COPIES, MemoryPlan, now_or_never, plan_memory
from ess.transfer.messages import SECRET_BYTES_MIN

Role = Literal["prefill", "decode"]
WORKERS_MAX: Final = 64
SHAPE: Final = re.compile(r"(\d{1,3})p(\d{1,3})d", re.IGNORECASE)

# Settings that make no sense here, each with the reason.
WHY_NOT: Final[Mapping[str, str]] = {
    "uds": "a router listens at a host and a port",
    "root_path": "a router knows no other path",
    "tls_cert": "a router of this kind is reached by HTTP; let a proxy speak HTTPS",
    "tls_ca": "a router of this kind is reached by HTTP; let a proxy speak HTTPS",
    "allowed_origins": "a router answers pages of other sites itself; let a proxy allow them",
    "tls_key": "a router of this kind is reached by HTTP; let a proxy speak HTTPS",
    "allowed_hosts": "a router lets every host name in; set a key, or let a proxy check names",
    "keep_responses": "each worker would find its own responses alone",
    "transfer_port": "each worker takes a free one",
    "register": "the router gets all workers when it starts",
    **dict.fromkeys(
        ("role", "peers", "bootstrap_port", "peer_secret", "peer_secret_file"),
        "each worker is told its own",
    ),
}
TOLD_APART: Final = frozenset({"host", "port", "api_key", "api_key_file"})
"""The router listens at the place that is given; workers are told of keys with the router's."""
NODES: Final = frozenset({"nnodes", "node_rank", "dist_init_addr"})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    prefill: int
    decode: int

    @property
    def count(self) -> int:
        return self.prefill + self.decode

    def names(self, role: Role) -> list[str]:
        count = self.prefill if role == "prefill" else self.decode
        return [f"{role}-{number + 1}" for number in range(count)]


def shape_of(text: str) -> Shape:
    """
    >>> shape_of("1p3d")
    Shape(prefill=1, decode=3)
    """
    if (counts := SHAPE.fullmatch(text)) is None:
        raise BadInput(f"--pd is {text!r:.40}; write 1p3d for 1 prefill and 3 decode workers")
    shape = Shape(prefill=int(counts[1]), decode=int(counts[2]))
    if not (shape.prefill and shape.decode and shape.count <= WORKERS_MAX):
        raise BadInput(
            f"--pd is {text!r}: it takes 1 worker of each kind at least, and {WORKERS_MAX} at most"
        )
    return shape


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What each worker gets: the same for all, except `stages`, which is for prefill workers."""

    settings: dict[str, Any]
    plan: MemoryPlan
    threads: int
    served: str
    stages: dict[str, Any] = {}


def stages_of(flags: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits off the flags that only prefill workers get, and checks them."""
    given = {name: value for name, value in flags.items() if value is not None}
    stages = {name: given.pop(name) for name in [*given] if FIELDS[name].section == "pipeline"}
    for name in sorted(NODES & {*stages}):
        raise BadInput(f"{name} cannot be used with --pd: all workers are on this machine")
    resolve({**stages, "role": "prefill", "peer_secret": "-" * SECRET_BYTES_MIN}, environment={})
    return given, stages


def share_of(resolved: Resolved, shape: Shape, stages: Mapping[str, Any] | None = None) -> Share:
    """Divides what `ess serve` would take by the number of workers. Checks everything that a worker
    would check: a start that must fail starts nothing."""
    check_settings(resolved)
    ways.check_environment()
    settings = resolved.settings
    checkpoint = read_checkpoint(settings.model)
    if settings.engine == "model":
        read_entries(Path(checkpoint.path))
    resolved = derived(resolved, checkpoint)
    layout = layout_of(resolved.settings, checkpoint)
    read_words(settings, checkpoint)
    divided = _divided(resolved, layout, checkpoint, shape.count)
    plan = _plan(divided.settings, layout, checkpoint, weights=1)
    divided = sized(divided, plan, written=str)
    return Share(
        settings=told_settings(divided, but=TOLD_APART),
        plan=plan,
        threads=divided.settings.threads,
        served=divided.settings.names[0],
        stages=_stages_told(stages or {}, divided.settings.threads),
    )


def _stages_told(stages: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """The stages' settings, with the threads of one worker divided among its processes."""
    sizes = [int(stages.get(name, 1)) for name in ("pp_size", "tp_size", "cp_size")]
    count = math.prod(sizes)
    return {**stages, "threads": max(1, threads // count)} if count > 1 else dict(stages)


def check_settings(resolved: Resolved) -> None:
    for name, why in WHY_NOT.items():
        origin = resolved.origins.get(name, "default")
        if origin != "default":
            raise BadInput(f"{name} from {origin} cannot be used with --pd: {why}")


def _divided(
    resolved: Resolved, layout: ModelLayout, checkpoint: Checkpoint, count: int
) -> Resolved:
    """Divides the sizes. Automatic slots suffice for a request, however many workers there are."""
    settings = resolved.settings
    whole = _plan(settings, layout, checkpoint, weights=count)
    slots = whole.slot_bytes // count
    if resolved.origins["slot_bytes"] == "default":
        alone = resolved.deriving(max_running=1).settings
        slots = max(slots, _plan(alone, layout, checkpoint, weights=count).slot_bytes)
    given: dict[str, Any] = {
        "host_bytes": str(whole.host_bytes // count),
        "slot_bytes": str(slots),
        "threads": max(1, settings.threads // count),
    }
    if resolved.origins["index_bytes"] != "default":
        given["index_bytes"] = str(whole.index_bytes // count)
    return resolved.deriving(**given)


def _plan(
    settings: Settings, layout: ModelLayout, checkpoint: Checkpoint, *, weights: int
) -> MemoryPlan:
    """The memory plan with `weights` copies of the weights, and of all states, in it."""
    plan = partial(
        plan_memory,
        settings,
        layout,
        positions_max=checkpoint.config.positions_max,
        weight_bytes=weights * weights_of(settings, checkpoint),
        state_copies=STATE_COPIES["decode"] * weights,
    )
    return now_or_never(plan, partial(plan, free=memory_total()))


def told_settings(resolved: Resolved, *, but: Set[str]) -> dict[str, Any]:
    """All settings that are not defaults, for a worker's file. Where keys are in a file, the worker
    is told of that file, which it reads again when the keys in it change."""
    has_file = resolved.origins["api_key_file"] != "default"
    unsaid = "api_key" if has_file else "api_key_file"
    return {
        name: getattr(resolved.settings, name)
        for name, origin in resolved.origins.items()
        if origin != "default" and name not in but | {unsaid}
    }


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that set settings, as the worker's file has them all, and
    without a key that a router would send to workers."""
    families = (PREFIX, *FAMILY, "OPENAI_API_KEY")
    return {
        name: value
        for name, value in environment.items()
        if name in READ_ELSEWHERE or not name.startswith(families)
    }
