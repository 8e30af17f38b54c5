"""One layer of a decode step on a GPU: NONE, DA and DBA as stream schedules around real kernels.

The schedules are those of the engine, run over stages that launch on two streams: the compute
stream and the copy stream, joined by events. A schedule is captured once into a graph, so what is
timed is the device and not the launches. Dimensions are DeepSeek-V3.2's; projections are plain
bfloat16 products of the right shapes. Which rows are missing is laid out beforehand, so the planner
is not in the times; every fetch still waits for the top-k that would have named it.

    exposed(mode) = time(mode) - time(NONE with every row resident)

holds what is left of the transfer, the split, the merge and what the copy takes from the kernels
beside it. The copy alone, the kernels alone and the resident partial beside the copy are timed too.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ess.bench.gpu.layer_memory import (
    DIM,
    HEADS,
    KEYS,
    ROWS,
    Index,
    ListedSlots,
    Rows,
    Weights,
)
from ess.bench.gpu.layer_points import (
    BATCHES,
    CONTEXTS,
    HOST_ROWS_MAX,
    Batch,
    Point,
    Step,
    draw,
    halves,
    lay_out,
    points,
)
from ess.bench.gpu.rig import Gate, Row, row
from ess.errors import Unavailable
from ess.flashtrans.mover import RowMover
from ess.kernels import backend
from ess.kernels.cuda.driver import Device
from ess.kernels.cuda.rows import COPY_BLOCKS
from ess.kernels.merge import Partial
from ess.kernels.streams import RowCopy
from ess.overlap.da import da
from ess.overlap.dba import dba
from ess.overlap.none import none
from ess.overlap.stages import finish

SCALE: Final = 192**-0.5
SPARE_SMS: Final = COPY_BLOCKS
REPLAYS: Final = 30
EXPOSED_MAX: Final = 0.3
SLOWDOWN_MAX: Final = 1.08
CUDA: Final[Any] = torch.cuda  # its constructors have no types

Gather = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None]


class Where(NamedTuple):
    """A part of the batch: its queries, and the event after which its fetched rows are there."""

    queries: slice
    requests: range
    landed: torch.cuda.Event


@dataclass(kw_only=True)
class Layer:
    """Everything that one layer of one point reads and writes on the device, random and finite."""

    point: Point
    batch: Batch
    gather: Gather

    def __post_init__(self) -> None:
        count = self.point.query_count
        self.queries = torch.randn(count, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.rows = Rows.drawn(self.point, self.batch)
        self.slots = ListedSlots.of(self.batch)
        self.index = Index.drawn(self.point)
        self.weights = Weights.drawn(count)
        self.partials = [
            Partial(
                torch.empty(count, HEADS, ROWS.latent_dim, device="cuda"),
                torch.empty(count, HEADS, device="cuda"),
            )
            for _ in range(2)
        ]
        self.compute = CUDA.Stream()
        self.copies = CUDA.Stream()


class LayerStages:
    """`ess.overlap.stages` on two streams. What is current at the call is the compute stream."""

    def __init__(self, layer: Layer, *, fetches: bool, spare_sms: int) -> None:
        self._layer, self._fetches, self._spare = layer, fetches, spare_sms

    def parts(self, count: int) -> Sequence[range]:
        each = self._layer.point.queries
        return [
            range(part.start * each, part.stop * each)
            for part in halves(self._layer.point.batch, count)
        ]

    def index(self) -> None:
        layer = self._layer
        torch.mm(layer.weights.hidden, layer.weights.key)
        torch.mm(layer.weights.rank, layer.weights.index)

    def locate(self, part: range) -> Where | None:
        """Never asked: RESIDENT is measured as NONE without a fetch."""
        return None

    def resolve(self, part: range) -> Where:
        from ess.kernels.cuda.triton.index import logits_into, top_k_into

        layer, queries = self._layer, slice(part.start, part.stop)
        where = self._where(part)
        logits_into(
            layer.index.queries[queries],
            layer.index.weights[queries],
            layer.index.pages,
            layer.index.table[queries],
            layer.index.lengths[queries],
            KEYS,
            out=layer.index.logits[queries],
            spare_sms=self._spare,
            queries_per_request=layer.point.queries,
        )
        top_k_into(
            layer.index.logits[queries],
            layer.index.lengths[queries],
            out=layer.index.selection[queries],
        )
        if self._fetches:
            self._fetch(where)
        return where

    def _where(self, part: range) -> Where:
        each = self._layer.point.queries
        requests = range(part.start // each, part.stop // each)
        return Where(slice(part.start, part.stop), requests, CUDA.Event())

    def _fetch(self, where: Where) -> None:
        """On the copy stream, from the moment the top-k is done."""
        self._layer.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._layer.copies):
            copy_missing(self._layer, where.requests)
            where.landed.record()

    def wait(self, where: Where) -> None:
        if self._fetches:
            torch.cuda.current_stream().wait_event(where.landed)

    def pre_attn(self) -> None:
        layer = self._layer
        asked = torch.mm(layer.weights.rank, layer.weights.query).view(-1, HEADS, 192)
        torch.bmm(asked[:, :, :128].transpose(0, 1), layer.weights.absorb)

    def attend_all(self, where: Where) -> Partial:
        return self._attend(self._layer.slots.whole, where, 0, spare_sms=0)

    def attend_resident(self, where: Where) -> Partial:
        return self._attend(self._layer.slots.resident, where, 0, spare_sms=self._spare)

    def attend_fetched(self, where: Where, resident: Partial | None = None) -> Partial:
        """Adds to the partial of side 0, which holds the resident rows."""
        spare_sms = self._spare if where.queries.stop < len(self._layer.queries) else 0
        return self._attend(self._layer.slots.fetched, where, 0, spare_sms=spare_sms, adds=True)

    def attend_apart(self, where: Where) -> Partial:
        return self._attend(self._layer.slots.fetched, where, 1, spare_sms=0)

    def _attend(
        self, lists: Any, where: Where, side: int, *, spare_sms: int, adds: bool = False
    ) -> Partial:
        from ess.kernels.cuda.triton.attend import Lists, attend_lists

        layer, at = self._layer, where.queries
        return attend_lists(
            layer.queries[at],
            layer.rows.slab,
            Lists(lists.named[at], lists.counts[at]),
            ROWS,
            scale=SCALE,
            into=Partial(*(tensor[at] for tensor in layer.partials[side])),
            spare_sms=spare_sms,
            balanced=True,
            adds=adds,
        )


def copy_missing(layer: Layer, requests: range) -> None:
    at = layer.batch.fetch_of(requests)
    rows, slots = layer.rows.host_rows[at], layer.rows.target_slots[at]
    count = torch.full((1,), len(rows), dtype=torch.int32, device="cuda")
    layer.gather(layer.rows.host, rows, layer.rows.slab, slots, count, SPARE_SMS)


def gather_of(device: Device) -> Gather:
    """FlashTrans, on the stream that torch launches on."""
    mover = functools.cache(lambda blocks: RowMover(device, block_count_max=blocks))

    def gather(
        source: Tensor, rows: Tensor, target: Tensor, slots: Tensor, count: Tensor, blocks: int
    ) -> None:
        copy = RowCopy(
            source=source, source_rows=rows, target=target, target_rows=slots, count=count
        )
        mover(blocks).queue([copy], torch.cuda.current_stream().cuda_stream)

    return gather


def captured(work: Callable[[], Any], stream: Any) -> Any:
    """A graph of the work, after two runs that compile and load what it needs.

    The work reads what the default stream wrote, and no other stream waits for that by itself.
    """
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def captured_us(stream: Any, work: Callable[[], Any], *, replays: int = REPLAYS) -> list[float]:
    """Microseconds of a replay, each after the last has ended."""
    return launched_us([(captured(work, stream), stream)], replays=replays)


def launched_us(parts: Sequence[tuple[Any, Any]], *, replays: int) -> list[float]:
    """From the start of the first graph to the end of all, each on its stream, in this order. All
    are queued behind a gate before the first begins, so launches are not in it."""
    gate = _gate()
    first, others = parts[0][1], [stream for _, stream in parts[1:]]
    samples = []
    for _ in range(replays):
        start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
        gate.close(first.cuda_stream)
        start.record(first)
        for stream in others:
            stream.wait_event(start)
        for graph, stream in parts:
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in others:
            first.wait_stream(stream)
        end.record(first)
        gate.open()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return samples[replays // 5 :]


@functools.cache
def _gate() -> Gate:
    return Gate(Device())


def measure(layer: Layer, *, replays: int = REPLAYS) -> dict[str, list[float]]:
    """Samples by name: three schedules, the step without a fetch, and the parts alone."""
    from ess.kernels.cuda.triton.attend import merge_into

    whole = range(layer.point.batch)
    moving = LayerStages(layer, fetches=True, spare_sms=SPARE_SMS)
    resting = LayerStages(layer, fetches=False, spare_sms=0)
    where = moving._where(range(len(layer.queries)))

    def beside() -> None:
        moving._fetch(where)
        moving.attend_resident(where)
        moving.wait(where)

    def merge() -> None:
        merge_into(layer.partials[0], layer.partials[1], layer.partials[0])

    def run(*parts: Callable[[Where], Any]) -> Callable[[], Any]:
        return lambda: [part(where) for part in parts]

    work: dict[str, Callable[[], Any]] = {
        "resident": lambda: finish(none(resting)),
        "none": lambda: finish(none(LayerStages(layer, fetches=True, spare_sms=0))),
        "da": lambda: finish(da(moving)),
        "dba": lambda: finish(dba(moving)),
        "copy": lambda: copy_missing(layer, whole),
        "attend 0": run(moving.attend_resident),
        "attend 0 on the whole device": run(resting.attend_resident),
        "attend 0 and copy": beside,
        "attend all": run(resting.attend_all),
        "attend 1": run(moving.attend_fetched),
        "attend 1 apart": run(moving.attend_apart),
        "merge": merge,
        "attend twice": run(resting.attend_resident, resting.attend_fetched),
        "attend twice and merge": run(
            resting.attend_resident, resting.attend_apart, lambda _: merge()
        ),
    }
    taken = {name: captured_us(layer.compute, run, replays=replays) for name, run in work.items()}
    alone = statistics.median(taken["attend 0"])
    turns = 2 + round(alone / max(statistics.median(taken["copy"]), 1.0))
    name = "attend 0 while copies run"
    taken[name] = under_copies_us(layer, work["attend 0"], turns, replays=replays)
    return taken | in_both_orders(layer, {"all": resting, "all but 4": moving}, where, replays)


def under_copies_us(
    layer: Layer, attend: Callable[[], Any], turns: int, *, replays: int
) -> list[float]:
    """The time of Attn0 from its own start to its own end, while copies run one after the other,
    enough of them to outlast it. All is queued behind a gate, so no launch is in the time."""
    gate, whole = _gate(), range(layer.point.batch)
    copies = captured(lambda: copy_missing(layer, whole), layer.copies)
    attention = captured(attend, layer.compute)
    samples = []
    for _ in range(replays):
        begun = CUDA.Event()
        start, end = (CUDA.Event(enable_timing=True) for _ in range(2))
        gate.close(layer.copies.cuda_stream)
        begun.record(layer.copies)
        layer.compute.wait_event(begun)
        with torch.cuda.stream(layer.copies):
            for _ in range(turns):
                copies.replay()
        start.record(layer.compute)
        with torch.cuda.stream(layer.compute):
            attention.replay()
        end.record(layer.compute)
        gate.open()
        torch.cuda.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return samples[replays // 5 :]


def in_both_orders(
    layer: Layer, stages: dict[str, LayerStages], where: Where, replays: int
) -> dict[str, list[float]]:
    """Attn0 on a number of multiprocessors and the copy: two graphs on two streams."""
    taken = {}
    copy = captured(lambda: copy_missing(layer, where.requests), layer.copies), layer.copies
    for sms, spared in stages.items():
        work = functools.partial(spared.attend_resident, where)
        attend = captured(work, layer.compute), layer.compute
        name = f"attend 0 on {sms} SMs"
        taken[f"copy, then {name}"] = launched_us([copy, attend], replays=replays)
        taken[f"{name}, then copy"] = launched_us([attend, copy], replays=replays)
    return taken


def rows_of(point: Point, batch: Batch, samples: dict[str, list[float]]) -> list[Row]:
    """Rows of the medians: exposed time against the transfer, interference, cost of a split."""
    medians = {name: statistics.median(each) for name, each in samples.items()}
    config: dict[str, Any] = point.config | {"misses": round(batch.misses_mean, 1)}
    rows = [row(f"layer: {name}", "us", each, **config) for name, each in samples.items()]
    rate = len(batch.host_rows) * ROWS.row_bytes / medians["copy"] / 1e3
    rows.append(row("layer: copy rate", "GB/s", [rate], **config))
    for mode in ("none", "da", "dba"):
        exposed = max(medians[mode] - medians["resident"], 0.1)
        baseline = "the copy alone", medians["copy"]
        target = None if mode == "none" else 1 / EXPOSED_MAX
        name = f"layer: exposed by {mode}"
        rows.append(row(name, "us", [exposed], baseline=baseline, target=target, **config))
    for split in ("attend twice", "attend twice and merge"):
        whole = "attend all", medians["attend all"]
        rows.append(row(f"layer: {split}, cost", "us", [medians[split]], baseline=whole, **config))
    return [*rows, _interference(medians, config)]


def _interference(medians: dict[str, float], config: dict[str, Any]) -> Row:
    """Attn0 with copies beside it all along, on the multiprocessors that it leaves them, against
    Attn0 with the whole device to itself."""
    alone = "attend 0 on the whole device"
    return row(
        "layer: attend 0 beside the copy",
        "us",
        [medians["attend 0 while copies run"]],
        baseline=(alone, medians[alone]),
        target=1 / SLOWDOWN_MAX,
        **config,
    )


def layer_benchmark(*, smoke: bool) -> Iterator[Row]:
    for layer in layers(points(smoke=smoke)):
        samples = measure(layer, replays=2 if smoke else REPLAYS)
        yield from rows_of(layer.point, layer.batch, samples)
        del layer


def layer_kernels() -> None:
    """What the benchmark launches: of many lists and of few, which are shared out otherwise."""
    ends = BATCHES[0], BATCHES[-1]
    few = (p for p in points(smoke=False) if p.batch in ends and p.context == CONTEXTS[0])
    for layer in layers(few):
        measure(layer, replays=1)
        del layer


def layers(at: Iterable[Point]) -> Iterator[Layer]:
    """Yields a layer at a time: the caller lets go of it before it asks for the next."""
    backend.ops("cuda")
    if not torch.cuda.is_available():
        raise Unavailable("the one-layer benchmark needs a GPU, and this machine has none")
    gather = gather_of(Device())
    drawn: dict[tuple[int, int], list[Step]] = {}
    for point in at:
        kind = point.context, point.queries
        if kind not in drawn:
            drawn[kind] = draw(point)
        host_rows = min(HOST_ROWS_MAX, point.batch * point.context)
        batch = lay_out(point, drawn[kind], host_row_count=host_rows)
        yield Layer(point=point, batch=batch, gather=gather)
        torch.cuda.empty_cache()
