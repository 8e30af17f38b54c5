"""/metrics: the engine's published status and the server's tally, in Prometheus' text form.

Counters are kept where things happen, as plain numbers; this module only writes them. Names of vLLM
and SGLang are added for routers and dashboards that know those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

import ess
from ess.engine.process.messages import HandoffStatus
from ess.engine.tpot_control import TPOT
from ess.pool.capacity import HOST_PAGES, INDEX_PAGES, SEQUENCES, SLOTS, WINDOW_SLOTS
from ess.server.process.handoffs import moved_bytes
from ess.server.process.service import Service
from ess.server.process.tally import WAIT_BOUNDS_S, Waits
from ess.units import PAGE_ROWS

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

Values = Mapping[Any, float]
"""Numbers by the values of their labels, a tuple of texts."""
Labelled = GaugeMetricFamily | CounterMetricFamily


def exposition(service: Service) -> bytes:
    page = CollectorRegistry(auto_describe=False)
    page.register(StatusCollector(service))
    ProcessCollector(registry=page)
    return generate_latest(page)


class StatusCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        yield from _own(service)
        yield from _pools(service)
        yield from _groups(service)
        yield from _waits(service)
        yield from _handoffs(service)
        yield from _stages(service)
        yield from _disk(service)
        yield from _graphs(service)
        yield from _experts(service)
        for name in service.compat:
            yield from COMPAT[name](service)


def _own(service: Service) -> Iterator[Metric]:
    status, tally, link = service.board.status, service.tally_of_all, service.link
    engine = link.engine
    yield _gauge("ess_up", "1 while the engine is there", not engine.why_lost)
    yield _count("ess_engine_restarts", "engines that were lost and replaced", engine.restart_count)
    yield _count("ess_resumed", "requests that went on in another engine", link.resumed_count)
    yield _gauge("ess_draining", "1 while the server drains", service.draining)
    yield _gauge("ess_paused", "1 while generation is paused", engine.is_held)
    version = {(ess.__version__,): 1.0}
    yield _gauges("ess_build_info", "1, with the version of ESS", ["version"], version)
    yield _gauge("ess_requests_running", "requests in the engine's batch", status.running_count)
    yield _gauge("ess_requests_waiting", "requests that wait for room", service.waiting_count)
    sentence = "the longest that an open request has had no token"
    yield _gauge("ess_oldest_wait_seconds", sentence, link.calls.oldest_wait_s)
    yield _gauge("ess_connections", "open HTTP connections", tally.connection_count)
    yield _gauge("ess_requests_preempted", "requests set aside now", status.preempted_count)
    yield _count("ess_preemptions", "times a request was set aside", status.preemption_count)
    speed = service.board.tokens_per_s
    yield _gauge("ess_tokens_per_second", "tokens made a second, of late", speed)
    yield _gauge("ess_step_seconds", "duration of the last step", status.step_s)
    yield _count("ess_steps", "engine steps", status.step_count)
    yield _count("ess_turns", "requests in steps, each step counted", status.turn_count)
    sentence = "layers checked against the host's rows"
    yield _count("ess_verified_layers", sentence, status.verified_count)
    sentence = "checked layers that differed from the host's rows"
    yield _count("ess_verify_mismatch", sentence, status.mismatch_count)
    yield _count("ess_tokens", "tokens made", status.made_count)
    yield _count("ess_prompt_tokens", "prompt tokens, cached ones included", status.prompt_count)
    sentence = "prompt tokens found in the prefix cache"
    yield _count("ess_cached_tokens", sentence, status.cached_count)
    sentence = "clients that left before their answer's end"
    yield _count("ess_disconnects", sentence, tally.disconnect_count)
    answers = {(route, str(code)): n for (route, code), n in sorted(tally.answers.items())}
    yield _counts("ess_answers", "HTTP answers", ["route", "status"], answers)
    sentence = "requests answered 503, slow clients cut off"
    yield _by_name("ess_refusals", sentence, "reason", tally.refusals)
    yield _by_name("ess_finished", "answers ended", "how", tally.finishes)
    short = {(name,): float(name == status.limiter) for name in LIMITERS}
    yield _gauges("ess_limiter", "1 for what waiting requests are short of", ["limiter"], short)


MODES: Final = ("resident", "none", "da", "dba")
LIMITERS: Final = (SLOTS, WINDOW_SLOTS, INDEX_PAGES, HOST_PAGES, SEQUENCES, TPOT)


def _pools(service: Service) -> Iterator[Metric]:
    pools = service.board.status.pools
    used = {(pool.name,): float(pool.used) for pool in pools}
    yield _gauges("ess_pool_used", "pages in use", ["pool"], used)
    capacity = {(pool.name,): float(pool.capacity) for pool in pools}
    yield _gauges("ess_pool_capacity", "pages there are", ["pool"], capacity)


def _groups(service: Service) -> Iterator[Metric]:
    status = service.board.status
    for make, label, name, sentence, values in (
        (_counts, "group", "ess_row_hits", "selected rows that were resident", status.hits),
        (_counts, "group", "ess_row_misses", "selected rows that were fetched", status.misses),
        (_counts, "group", "ess_row_places", "selected rows read in host memory", status.places),
        (_counts, "group", "ess_fetched_bytes", "bytes copied to slots", status.fetched_bytes),
        (_counts, "group", "ess_stored_bytes", "bytes copied to the host", status.stored_bytes),
        (
            *(_counts, "layer", "ess_transfer_seconds"),
            *("seconds of fetches", _seconds(status.transfer_us)),
        ),
        (
            *(_counts, "layer", "ess_exposed_seconds"),
            *("seconds of fetches that a step waited for", _seconds(status.exposed_us)),
        ),
        (_gauges, "group", "ess_slots_used", "slots that hold a row", status.slots_used),
        (_gauges, "group", "ess_slots", "slots there are", status.slots),
    ):
        yield make(name, sentence, [label], {(str(at),): v for at, v in enumerate(values)})
    modes = {
        (str(layer), mode): count
        for layer, counts in enumerate(status.modes)
        for mode, count in zip(MODES, counts, strict=True)
    }
    yield _counts("ess_layer_mode", "runs of a layer in a mode", ["layer", "mode"], modes)


def _seconds(times_us: Sequence[float]) -> list[float]:
    return [time_us / 1e6 for time_us in times_us]


def _waits(service: Service) -> Iterator[Metric]:
    tally = service.tally_of_all
    for name, sentence, waits in (
        ("first_token", "from a request to its first token", tally.first_token),
        ("between_tokens", "from a token of an answer to its next", tally.between_tokens),
        ("request", "from a request to the end of its answer", tally.whole),
        ("token_to_socket", "of a token from the engine to the socket", tally.to_socket),
    ):
        yield _histogram(f"ess_{name}_seconds", sentence, waits)


def _stages(service: Service) -> Iterator[Metric]:
    """Metrics of a worker that runs in stages, with a label per stage."""
    lines = service.board.status.stages
    if not lines:
        return
    busy = {(str(line.rank),): line.busy_share for line in lines}
    sentence = "share of its time, of late, in which a stage ran chunks"
    yield _gauges("ess_stage_busy_share", sentence, ["stage"], busy)
    ran = {str(line.rank): line.chunk_count for line in lines}
    yield _by_name("ess_stage_chunks", "chunks that a stage has run", "stage", ran)
    silent = {(str(line.rank),): line.beat_s for line in lines}
    sentence = "since a stage's last sign of life"
    yield _gauges("ess_stage_silent_seconds", sentence, ["stage"], silent)


def _handoffs(service: Service) -> Iterator[Metric]:
    stats = service.board.status.handoff
    if stats is None:
        return
    ended = {
        "landed": stats.landed_count,
        "missed": stats.missed_count,
        "sent": stats.sent_count,
        "lapsed": stats.lapsed_count,
    }
    yield _by_name("ess_handoffs", "handoffs ended", "how", ended)
    arrivals, departures = stats.open_arrival_count, stats.open_departure_count
    under_way = {("arrival",): float(arrivals), ("departure",): float(departures)}
    yield _gauges("ess_handoffs_open", "handoffs under way", ["way"], under_way)
    moved = {"received": stats.received_bytes, "sent": stats.sent_bytes}
    sentence = "bytes of handoffs: rows, keys and windows"
    yield _by_name("ess_kv_transfer_bytes", sentence, "way", moved)
    yield _count(
        "ess_handoff_pieces_again", "pieces of handoffs asked for again", stats.again_count
    )
    yield _count("ess_handoff_refused", "messages of handoffs refused", stats.refused_count)
    sentence = "failed transfers of handoffs, each tried again while its handoff lives"
    yield _count("ess_handoff_transfers_failed", sentence, stats.failed_count)
    ups = {(peer.address,): float(peer.is_up) for peer in stats.peers}
    yield _gauges("ess_peer_up", "1 while another worker is heard", ["address"], ups)
    silent = {(peer.address,): peer.heard_s for peer in stats.peers}
    sentence = "since another worker's last sign of life"
    yield _gauges("ess_peer_silent_seconds", sentence, ["address"], silent)
    yield from _transfers(service, stats, "ess_", {})


def _disk(service: Service) -> Iterator[Metric]:
    stats = service.board.status.disk
    if stats is None:
        return
    yield _gauge("ess_disk_pages", "pages of prompts on disk", stats.page_count)
    yield _gauge("ess_disk_pages_max", "pages of prompts that may be on disk", stats.page_max)
    yield _gauge("ess_disk_queue", "pages that wait to be stored on disk", stats.queue_count)
    moved = {"stored": stats.stored_count, "loaded": stats.loaded_count}
    counts = {**moved, "dropped": stats.dropped_count, "damaged": stats.damaged_count}
    yield _by_name("ess_disk_moved_pages", "pages to and from the disk", "how", counts)
    sizes = {how: count * stats.page_bytes for how, count in moved.items()}
    yield _by_name("ess_disk_bytes", "bytes to and from the disk", "how", sizes)
    seconds = {"stored": stats.store_s, "loaded": stats.load_s}
    sentence = "seconds that pages to and from the disk took"
    yield _by_name("ess_disk_seconds", sentence, "how", seconds)
    yield _gauge(
        "ess_disk_failed",
        "1 when no page is stored on disk, which is full or broken",
        bool(stats.fault),
    )


def _graphs(service: Service) -> Iterator[Metric]:
    """Metrics of steps on a device."""
    stats = service.board.status.graphs
    if stats is None:
        return
    yield _gauge("ess_graphs", "graphs of steps that are kept", stats.held)
    yield _gauge("ess_graphs_max", "graphs that may be kept", stats.most)
    yield _gauge("ess_graph_bytes", "bytes of the graphs that are kept", stats.bytes)
    yield _gauge("ess_graph_bytes_max", "bytes that graphs may take", stats.byte_max)
    yield _count("ess_graphs_dropped", "graphs that gave way to others", stats.dropped)
    counts = {"replayed": stats.replayed, "captured": stats.captured}
    yield _by_name("ess_graph_steps", "steps that ran as graphs", "how", counts)
    yield _by_name("ess_eager_steps", "steps that ran without a graph", "cause", stats.eager)


def _experts(service: Service) -> Iterator[Metric]:
    """Metrics of servers that divide the experts, over the last steps."""
    stats = service.board.status.experts
    if stats is None:
        return
    sentence = "steps in which choices of experts were counted"
    yield _gauge("ess_expert_steps", sentence, stats.step_count)
    yield _gauge("ess_experts_chosen", "how often a token chose an expert", stats.chosen_count)
    sentence = "mean work of a rank, as a share of the busiest rank's"
    yield _gauge("ess_expert_balance", sentence, stats.balance)


def _transfers(
    service: Service, stats: HandoffStatus, prefix: str, labels: dict[str, str]
) -> Iterator[Metric]:
    """Transfers under SGLang's names: recent speed, and the times of successful handoffs."""
    seen, count = service.board.handoffs, stats.landed_count + stats.sent_count
    speed, sentence = {tuple(labels.values()): seen.gb_per_s}, "GB a second of handoffs, of late"
    yield _gauges(f"{prefix}kv_transfer_speed_gb_s", sentence, list(labels), speed)
    for name, sentence, waits in (
        ("latency_ms", "milliseconds of handoffs", seen.latency),
        ("bootstrap_ms", "milliseconds until the pages of a handoff were reserved", seen.bootstrap),
    ):
        metric = f"{prefix}kv_transfer_{name}"
        yield _histogram(metric, sentence, waits, labels=labels, scale=1e3)
    size = moved_bytes(stats) / 1e6
    yield _summed(f"{prefix}kv_transfer_total_mb", "megabytes of handoffs", count, size, labels)


def _as_vllm(service: Service) -> Iterator[Metric]:
    status, tally, name = service.board.status, service.tally_of_all, service.name
    for make, metric, sentence, value in (
        (_gauges, "num_requests_running", "as ess_requests_running", status.running_count),
        (_gauges, "num_requests_waiting", "as ess_requests_waiting", service.waiting_count),
        (_gauges, "kv_cache_usage_perc", "the fullest pool, 0 to 1", status.fullness),
        (_counts, "prompt_tokens", "as ess_prompt_tokens", status.prompt_count),
        (_counts, "generation_tokens", "as ess_tokens", status.made_count),
        (_counts, "prefix_cache_queries", "as ess_prompt_tokens", status.prompt_count),
        (_counts, "prefix_cache_hits", "as ess_cached_tokens", status.cached_count),
        (_counts, "num_preemptions", "as ess_preemptions", status.preemption_count),
    ):
        yield make(f"vllm:{metric}", sentence, ["model_name"], {(name,): value})
    ended = {(name, how): count for how, count in sorted(tally.finishes.items())}
    labels = ["model_name", "finished_reason"]
    yield _counts("vllm:request_success", "as ess_finished", labels, ended)
    sizes = {(str(PAGE_ROWS), str(service.token_capacity // PAGE_ROWS)): 1.0}
    yield _gauges("vllm:cache_config_info", "pages", ["block_size", "num_gpu_blocks"], sizes)
    for metric, waits in (
        ("vllm:time_to_first_token_seconds", tally.first_token),
        ("vllm:inter_token_latency_seconds", tally.between_tokens),
        ("vllm:e2e_request_latency_seconds", tally.whole),
    ):
        yield _histogram(metric, "seconds", waits, labels={"model_name": name})
    yield from _transfers_as_vllm(service, {"model_name": name})


def _transfers_as_vllm(service: Service, labels: dict[str, str]) -> Iterator[Metric]:
    stats = service.board.status.handoff
    if stats is None:
        return
    latency = service.board.handoffs.latency
    yield _histogram("vllm:nixl_xfer_time_seconds", "seconds", latency, labels=labels)
    count, size = stats.landed_count + stats.sent_count, moved_bytes(stats)
    yield _summed("vllm:nixl_bytes_transferred", "bytes", count, size, labels)
    for metric, sentence, value in (
        ("vllm:nixl_num_failed_transfers", "handoffs missed", stats.missed_count),
        ("vllm:nixl_num_kv_expired_reqs", "handoffs lapsed", stats.lapsed_count),
    ):
        yield _counts(metric, sentence, list(labels), {tuple(labels.values()): value})


def _as_sglang(service: Service) -> Iterator[Metric]:
    status, name, stats = service.board.status, service.name, service.board.status.handoff
    values = {
        "num_running_reqs": status.running_count,
        "num_queue_reqs": service.waiting_count,
        "token_usage": status.fullness,
        "gen_throughput": service.board.tokens_per_s,
        "cache_hit_rate": status.cached_count / max(status.prompt_count, 1),
    }
    if stats is not None:
        values["num_prefill_inflight_queue_reqs"] = stats.open_departure_count
        values["num_decode_transfer_queue_reqs"] = stats.open_arrival_count
    for metric, value in values.items():
        yield _gauges(f"sglang:{metric}", "SGLang's name", ["model_name"], {(name,): value})
    sizes = {(str(PAGE_ROWS), str(service.token_capacity // PAGE_ROWS)): 1.0}
    yield _gauges("sglang:cache_config_info", "pages", ["page_size", "num_pages"], sizes)
    if stats is not None:
        failed = {name: stats.missed_count + stats.lapsed_count}
        yield _by_name("sglang:num_transfer_failed_reqs", "SGLang's name", "model_name", failed)
        yield from _transfers(service, stats, "sglang:", {"model_name": name})


COMPAT: Final = {"vllm": _as_vllm, "sglang": _as_sglang}


def _gauge(name: str, sentence: str, value: float) -> Metric:
    return GaugeMetricFamily(name, sentence, value=float(value))


def _count(name: str, sentence: str, value: float) -> Metric:
    return CounterMetricFamily(name, sentence, value=float(value))


def _gauges(name: str, sentence: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(name, sentence, labels=labels), values)


def _counts(name: str, sentence: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(CounterMetricFamily(name, sentence, labels=labels), values)


def _by_name(name: str, sentence: str, label: str, counts: Mapping[str, float]) -> Metric:
    return _counts(name, sentence, [label], {(key,): counts[key] for key in sorted(counts)})


def _filled(metric: Labelled, values: Values) -> Metric:
    for keys, value in values.items():
        metric.add_metric(keys, float(value))
    return metric


def _histogram(
    name: str,
    sentence: str,
    waits: Waits,
    *,
    labels: dict[str, str] | None = None,
    scale: float = 1.0,
) -> Metric:
    running, buckets = 0, []
    bounds = (*(f"{scale * bound:.12g}" for bound in WAIT_BOUNDS_S), "+Inf")
    for bound, count in zip(bounds, waits.counts, strict=True):
        running += count
        buckets.append((bound, running))
    metric = HistogramMetricFamily(name, sentence, labels=list(labels or ()))
    metric.add_metric(list((labels or {}).values()), buckets, scale * waits.total_s)
    return metric


def _summed(name: str, sentence: str, count: int, total: float, labels: dict[str, str]) -> Metric:
    """A histogram of which only the count and the sum are known."""
    metric = HistogramMetricFamily(name, sentence, labels=list(labels))
    metric.add_metric(list(labels.values()), [("+Inf", count)], total)
    return metric
