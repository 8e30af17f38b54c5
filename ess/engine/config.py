"""The settings of an engine, each defined once (`ess.config`). Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Literal

from ess import config
from ess.config import setting
from ess.engine.devices import check_device, check_stage_devices
from ess.engine.graphs.buckets import GraphCount, parse_sizes
from ess.engine.tokens.determinism import check_deterministic
from ess.errors import BadInput
from ess.kernels.served import BackendName
from ess.overlap.sbo import Sbo
from ess.overlap.tbo import Tbo
from ess.pool.ledger import Promise
from ess.pool.lru.eviction import PolicyName

Modes = Literal["layerwise", "resident", "none", "da", "dba"] | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """`modes` may list one mode per layer. A step has at most `query_max` queries; `verify_fatal`
    ends the engine at the first row that is wrong. On a device at most `graphs` kinds of decode
    steps are kept as graphs, none for 0, in at most `graph_byte_max` bytes, or as many as
    `step_bytes.graph_bytes` counts; none is captured while less than `beside_bytes`, which steps
    and prompts take outside of graphs, is left of the device."""

    max_running: int = setting(16, "limits", "Requests that run at a time.", (1, 4096))
    modes: Modes = setting(
        "layerwise", "engine", "How fetches hide behind compute; layerwise follows live counters."
    )
    calibration: str = setting(
        "", "engine", "A file from `ess-bench calibrate --out FILE`: where layerwise starts."
    )
    tbo: Tbo = setting(
        "off",
        "engine",
        "Run steps in two halves; a number: from that many tokens on.",
        (1, 1 << 20),
    )
    sbo: Sbo = setting("off", "engine", "What the experts' communication overlaps with.")
    mtp: int = setting(
        1,
        "engine",
        "Most tokens verified per step; `ess serve` takes 2 if the model can draft.",
        (1, 8),
    )
    mtp_auto: bool = setting(False, "engine", "Verify as many tokens as pay, up to --mtp.")
    tpot_ms: float = setting(
        0.0,
        "engine",
        "Milliseconds per token that admission and chunks keep to; 0: none.",
        (0, 60_000),
    )
    chunk_tokens: int = setting(
        512, "engine", "Prompt tokens run beside one decode step.", (1, 1 << 20)
    )
    deterministic: bool = setting(False, "engine", "The same answer to the last bit in any batch.")
    depth: int = setting(
        0, "engine", "1 launches a step before the last one's tokens are known; 0 waits.", (0, 1)
    )
    promise: Promise = setting(
        "all",
        "engine",
        "Reserve all device pages of a request at its start, or some, and more as it grows.",
    )
    budget_every: int = setting(
        64,
        "engine",
        "Steps after which slots move to the layers that miss most; 0: never.",
        (0, 1 << 20),
    )
    warm: bool = setting(True, "engine", "Fill slots with the rows that the prompt selected last.")
    verify_every: int = setting(
        0, "engine", "Check one layer of every n-th step against the host; 0: never.", (0, 1 << 20)
    )
    graphs: GraphCount = setting(
        "auto",
        "engine",
        "Kinds of steps a device replays as graphs; 0: none; auto: all usual kinds.",
        (0, 4096),
    )
    graph_sizes: str = setting(
        "",
        "engine",
        "Batch sizes that get graphs, as 1,2,4,8; by default 1, 2, 4 and every eighth.",
    )
    nvtx: bool = setting(
        False, "telemetry", "Stages that a device runs eagerly are NVTX ranges, for Nsight Systems."
    )
    backend: BackendName = setting(
        "cpu", "engine", "What computes: reference is slow and exact, cuda is for a device."
    )
    handoff_failure: Literal["recompute", "refuse"] = setting(
        "recompute", "handoff", "When rows do not come: prefill the prompt here, or answer 503."
    )
    fake_prefill: bool = setting(
        False, "handoff", "Let requests ask for invented rows, to measure decoding by itself."
    )
    query_max: int = 64
    graph_byte_max: int | None = None
    beside_bytes: int = 0
    verify_fatal: bool = False

    def __post_init__(self) -> None:
        config.check(self)
        if self.deterministic:
            check_deterministic(self.modes, tbo=self.tbo, sbo=self.sbo)
        if self.graph_sizes:
            parse_sizes(self.graph_sizes, self.max_running)
        if self.calibration and (self.modes != "layerwise" or self.deterministic):
            why = "deterministic is set" if self.deterministic else f"modes is {self.modes!r}"
            raise BadInput(f"calibration is where layerwise modes start, but {why}")

    @property
    def is_paced(self) -> bool:
        return self.mtp_auto or self.tpot_ms > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessConfig(EngineConfig):
    """The further settings of an engine process."""

    device: str = setting(
        "cpu", "engine", "Where weights, slots and all compute are: cpu, cuda or cuda:N."
    )
    form: Literal["bf16", "f32", "stored"] = setting(
        "bf16", "model", "The number type of weights; stored is for a device: as in the files."
    )
    row: Literal["fp8", "bf16", "f32"] = setting("fp8", "memory", "How latent rows are stored.")
    evict: PolicyName = setting(
        "lru",
        "memory",
        "Which row gives way: the longest unused, by SIEVE, or of the lowest score.",
    )
    role: Literal["both", "prefill", "decode"] = setting(
        "both", "handoff", "What this worker does: whole requests, their prompts, or their answers."
    )
    handoff_wait_s: float = setting(
        30.0,
        "handoff",
        "Seconds without progress after which rows and, on devices, silent peers are given up.",
        (0.1, 3600),
    )
    handoff_lease_s: float = setting(
        30.0, "handoff", "Seconds that a finished prompt's rows wait to be taken.", (0.1, 3600)
    )
    transport: Literal["tcp", "nixl", "shared"] = setting(
        "tcp", "handoff", "How rows travel: nixl for RDMA, shared between workers of one machine."
    )
    transfer_host: str = setting(
        "127.0.0.1", "handoff", "The address, on a private interface, at which rows arrive."
    )
    transfer_port: int = setting(0, "handoff", "0 takes a free port.", (0, 65535))
    prefix_cache_dir: str = setting(
        "", "memory", "A folder for this engine alone that keeps pages of prompts across restarts."
    )
    prefix_cache_disk: str = setting(
        "8GiB", "memory", "The most that --prefix-cache-dir takes of the disk."
    )
    threads: int = setting(
        0, "engine", "Compute threads; 0 leaves a core to the machine.", (0, 1024)
    )
    kv_events: str = setting(
        "",
        "telemetry",
        "The address at which routers learn whose pages are kept: tcp://127.0.0.1:5557.",
    )
    kv_events_replay: str = setting(
        "", "telemetry", "The address at which routers can ask for the last KV events again."
    )
    kv_events_topic: str = setting("", "telemetry", "The topic of KV events.")
    kv_events_form: Literal["sglang", "vllm"] = setting(
        "sglang", "telemetry", "Whose KV events to write: arrays, or maps as vLLM of 2026 does."
    )
    kv_events_public: bool = setting(
        False,
        "telemetry",
        "Publish KV events, which hold prompts, to other machines without a key.",
    )
    pp_size: int = setting(
        1, "pipeline", "Stages that the layers are divided over, a process each.", (1, 1024)
    )
    tp_size: int = setting(1, "pipeline", "Processes of a stage that divide the heads.", (1, 64))
    cp_size: int = setting(
        1, "pipeline", "Processes of a stage that divide a chunk's tokens.", (1, 64)
    )
    pp_layer_partition: str = setting(
        "", "pipeline", "Layers of each stage, as 15,15,15,16; by default divided by cost."
    )
    pp_devices: str = setting(
        "", "pipeline", "CUDA devices of the stages here, as 0,1; by default 0, 1, 2 and so on."
    )
    dp_size: int = setting(
        1, "pipeline", "Servers that divide the experts, each with requests of its own.", (1, 1024)
    )
    dp_rank: int = setting(
        -1, "pipeline", "The number of this server; -1 starts all that run here.", (-1, 1023)
    )
    ep_size: int = setting(
        0, "pipeline", "Ranks that the experts are divided over: as --dp-size, or 0.", (0, 1024)
    )
    redundant_experts: int = setting(
        0, "pipeline", "Extra copies of the most used experts, in each layer.", (0, 1 << 16)
    )
    expert_load: str = setting(
        "", "pipeline", "A file of --record-expert-load, by which rank 0 places the experts."
    )
    record_expert_load: str = setting(
        "", "pipeline", "Where rank 0 writes how often each expert was chosen recently."
    )
    dynamic_chunking: bool = setting(
        False, "pipeline", "Chunks of equal time, not length; --chunk-tokens is the first."
    )
    smooth: float = setting(
        0.75, "pipeline", "How far chunk sizes follow the times: 0 not at all, 1 wholly.", (0, 1)
    )
    stage_timeout_s: float = setting(
        60.0,
        "pipeline",
        "Seconds without progress and, on devices, of silence after which a stage or rank is lost.",
        (1, 3600),
    )
    nnodes: int = setting(1, "pipeline", "Machines that the processes are divided over.", (1, 1024))
    node_rank: int = setting(
        0, "pipeline", "The number of this machine; machine 0 speaks HTTP.", (0, 1023)
    )
    dist_init_addr: str = setting(
        "", "pipeline", "HOST:PORT of machine 0, where all processes find one another."
    )
    pace_ms: float = setting(
        0.0, "trials", "Milliseconds of a step of the paced engine.", (0.0, 60_000.0)
    )
    only_rank: int | None = None

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_device(self)
        check_stages(self)
        check_stage_devices(self)

    @property
    def team_size(self) -> int:
        """Processes of one stage."""
        return self.tp_size * self.cp_size

    @property
    def world_size(self) -> int:
        """Processes of the whole worker."""
        return self.pp_size * self.team_size

    @property
    def processes_here(self) -> int:
        """Engine processes that this command starts, on this machine."""
        starts_ranks = self.dp_size > 1 and self.dp_rank < 0
        return (self.dp_size if starts_ranks else self.world_size) // self.nnodes

    @property
    def is_staged(self) -> bool:
        """A pipeline runs, of one stage perhaps, and no engine of one process."""
        return self.world_size > 1 or self.dynamic_chunking


def check_stages(config: ProcessConfig) -> None:
    """Refuses settings that cannot be combined, by name, before any process starts."""
    if config.world_size > 1 and config.role != "prefill":
        _check_mesh(config)
    if config.dynamic_chunking and config.role != "prefill":
        raise BadInput(
            f"dynamic_chunking is for a prefill worker, and role is {config.role}: there tpot_ms"
            " sizes the chunks"
        )
    if config.tp_size > 1 and config.cp_size > 1:
        raise BadInput(
            f"tp_size is {config.tp_size} and cp_size is {config.cp_size}: one of them must be 1"
        )
    if config.pp_layer_partition and config.pp_size == 1:
        raise BadInput(
            f"pp_layer_partition is {config.pp_layer_partition!r:.80}, and pp_size is 1: one stage"
            " has all layers"
        )
    _check_ranks(config)
    _check_nodes(config)


# Settings that do not go together with --tp-size and --pp-size yet, beside --role prefill.
MESH_LACKS: Final[Mapping[str, str]] = {
    "cp_size": "only prefill workers divide the tokens of a chunk",
    "dp_size": "the experts are divided among whole engines",
}


def _check_mesh(config: ProcessConfig) -> None:
    """Refuses what an engine that decodes in several processes cannot do."""
    for field in fields(ProcessConfig):
        if field.name in MESH_LACKS and (given := getattr(config, field.name)) != field.default:
            raise BadInput(
                f"{field.name} is {given}, and tp_size is {config.tp_size}, pp_size"
                f" {config.pp_size}: {MESH_LACKS[field.name]}"
            )
    if config.role == "decode" and config.nnodes > 1:
        raise BadInput(
            f"nnodes is {config.nnodes}, and role is decode: rows that are handed over go to one"
            " machine, where all stages have them"
        )


def _check_ranks(config: ProcessConfig) -> None:
    """Checks the settings of engines that divide the experts."""
    size, rank = config.dp_size, config.dp_rank
    if config.ep_size not in (0, size):
        raise BadInput(
            f"ep_size is {config.ep_size} and dp_size is {size}: the experts are divided over all"
            " ranks that have requests"
        )
    if rank >= size:
        raise BadInput(f"dp_rank is {rank}, must be 0 to {size - 1} for a dp_size of {size}")
    if size == 1:
        return _check_one_place(config)
    if config.role == "prefill":
        raise BadInput(
            f"dp_size is {size}, and role is prefill: several prefill workers behind a router make"
            " prompts beside one another, and pp_size divides the layers of one among processes"
        )
    if config.device != "cpu":
        _check_device_ranks(config)
    if config.deterministic:
        raise BadInput(
            f"dp_size is {size}, and deterministic is set: what an expert makes of a token is"
            " rounded as the batch is, and the batch is that of all ranks"
        )
    if rank >= 0 and not config.dist_init_addr:
        raise BadInput(f"dist_init_addr is missing: {size} ranks must know where they meet")


def _check_device_ranks(config: ProcessConfig) -> None:
    if config.sbo == "combine-down":
        raise BadInput(
            f"sbo is combine-down, dp_size {config.dp_size} and device {config.device}: a device"
            " sends a sum of all its experts, so no block of them leaves before the others"
        )
    if config.device != "cuda" and config.processes_here > 1:
        raise BadInput(
            f"device is {config.device}, and {config.processes_here} ranks start here: with `cuda`"
            " each takes the device of its place on this machine"
        )


def _check_one_place(config: ProcessConfig) -> None:
    for name in ("redundant_experts", "expert_load", "record_expert_load"):
        if given := getattr(config, name):
            raise BadInput(f"{name} is {given!r:.80}, and dp_size is 1: all experts are here")


def _check_nodes(config: ProcessConfig) -> None:
    nodes, size, team = config.nnodes, config.world_size, config.team_size
    shape = f"pp_size {config.pp_size} x {team} of a stage"
    if config.dp_size > 1:
        size, shape = config.dp_size, f"dp_size {config.dp_size}"
    if config.node_rank >= nodes:
        raise BadInput(
            f"node_rank is {config.node_rank}, must be 0 to {nodes - 1} for {nodes} nodes"
        )
    if config.dist_init_addr:
        host, _, port = config.dist_init_addr.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise BadInput(f"dist_init_addr is {config.dist_init_addr!r:.80}, must be HOST:PORT")
    if nodes == 1:
        return
    if size % nodes:
        raise BadInput(f"nnodes is {nodes}: {size} processes ({shape}) do not divide evenly")
    if size // nodes % team:
        raise BadInput(
            f"nnodes is {nodes}: the {team} processes of a stage would be on several machines, and"
            " they share memory"
        )
    if not config.dist_init_addr:
        raise BadInput(f"dist_init_addr is missing: {nodes} nodes must know where they meet")
    if config.transport == "shared":
        raise BadInput(f"transport is 'shared', which is for one machine, and nnodes is {nodes}")
