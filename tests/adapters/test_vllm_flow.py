"""From vLLM's first step to the pools of a decode worker, over HTTP and TCP.

Our class runs in stand-ins of vLLM's versions, over tensors as its workers have them; on the other
side are an Offload's pools.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ess import Offload
from ess.adapters.vllm.blocks import BlockReader, Blocks, CachePlace, all_places
from ess.adapters.vllm.outbox import BlockPages
from ess.adapters.vllm.requests import salt_of
from ess.adapters.vllm.settings import read_layout
from ess.adapters.vllm.staging import Staging
from ess.clock import RealClock
from ess.door.handoff import geometry
from ess.door.handoff.outgoing.units import Part
from ess.layout import ModelLayout
from ess.transfer.arrivals import Arrivals
from ess.transfer.endpoint import Identity
from ess.transfer.messages import (
    Count,
    Message,
    Piece,
    PieceKind,
    Reason,
    Refused,
    Release,
    Reserved,
    Seal,
    layout_hash,
    new_epoch,
    text_digest,
)
from ess.transfer.runs import Region, views
from ess.transfer.transport import Notification, PeerLost, Transfer
from ess.transfer.transports.tcp import TcpTransport
from ess.transfer.windows import unpacked_windows
from ess.units import PAGE_ROWS
from tests.adapters.test_vllm_requests import fresh, output
from tests.adapters.vllm_caches import FOREIGN, contents, name_of, tensor_of
from tests.adapters.vllm_stand_in import VERSIONS, connector

SECRET = "a secret that both sides know"
CONFIG = Path(__file__).parents[2] / "models" / "configs" / "deepseek-v3.2.json"
MODEL = {**json.loads(CONFIG.read_text()), "num_hidden_layers": 4}
LAYOUT = read_layout(MODEL, with_mtp=False)
TOKENS = 64 * 3 + 17
PROMPT = tuple(range(1000, 1000 + TOKENS))
BLOCK_ROWS = 64
BLOCKS = [9, 2, 5, 0]
GUARD_S = 60.0
versions = pytest.mark.parametrize(
    "version", VERSIONS, ids=[version["commit"][:8] for version in VERSIONS]
)


def until(happens: Callable[[], Any]) -> None:
    guard_s = time.monotonic() + GUARD_S
    while not happens():
        assert time.monotonic() < guard_s, "it did not happen"
        time.sleep(0.001)


def config(rank_count: int) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_producer", kv_connector_extra_config={"peers_port": 0}
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=rank_count, pipeline_parallel_size=1, data_parallel_rank=0
        ),
        cache_config=SimpleNamespace(block_size=BLOCK_ROWS),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: MODEL)),
        speculative_config=None,
    )


@dataclass
class Node:
    """vLLM as far as a connector sees it: its scheduler, and a worker for each rank."""

    scheduler: Any
    workers: list[Any]
    tensors: list[dict[str, torch.Tensor]]
    made: dict[CachePlace, np.ndarray] = field(default_factory=lambda: contents(TOKENS, LAYOUT))
    blocks: list[int] = field(default_factory=lambda: list(BLOCKS))

    def step(self, planned: Any, chunk: range = range(0)) -> None:
        """One step: every rank computes the same rows of the chunk, layer by layer."""
        metadata = self.scheduler.build_connector_meta(planned)
        assert pickle.loads(pickle.dumps(metadata.step)) == metadata.step
        sent = []
        for worker, tensors in zip(self.workers, self.tensors, strict=True):
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            for layer in range(LAYOUT.layer_total):
                name = name_of(CachePlace(PieceKind.ROWS, layer), LAYOUT)
                worker.wait_for_layer_load(name)
                if chunk:
                    self._compute(tensors, layer, chunk)
                    worker.save_kv_layer(name, tensors[name], None)
            worker.wait_for_save()
            sent.append(worker.get_finished(set())[0] or set())
            worker.clear_connector_metadata()
        self.counts = [count + len(names) for count, names in zip(self.counts, sent, strict=True)]
        done = set() if min(self.counts) == 0 else {"a"}
        self.scheduler.update_connector_output(SimpleNamespace(finished_sending=done))

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.workers)

    def _compute(self, tensors: dict[str, torch.Tensor], layer: int, chunk: range) -> None:
        """Keys before rows, as the indexer runs before attention. Only the chunk changes."""
        blocks = Blocks(np.array(self.blocks), BLOCK_ROWS)
        for place in (CachePlace(PieceKind.INDEX_KEYS, layer), CachePlace(PieceKind.ROWS, layer)):
            now = self.made[place][: chunk.stop]
            filled = tensor_of(place, now, blocks, BLOCK_ROWS)
            tensors[name_of(place, LAYOUT)][: len(filled)] = filled


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Node]]:
    monkeypatch.setenv("ESS_PEER_SECRET", SECRET)
    workers: list[Any] = []

    def build(version: Any, rank_count: int = 1) -> Node:
        module = connector(monkeypatch, version)
        role = module.KVConnectorRole
        scheduler = module.EssConnector(config(rank_count), role.SCHEDULER, None)
        tensors = []
        for rank in range(rank_count):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            worker = module.EssConnector(config(rank_count), role.WORKER, None)
            tensors.append(
                {
                    name_of(place, LAYOUT): torch.full(
                        (10, BLOCK_ROWS, 656 if place.kind is PieceKind.ROWS else 132),
                        FOREIGN,
                        dtype=torch.uint8,
                    )
                    for place in all_places(LAYOUT)
                }
            )
            worker.register_kv_caches(tensors[-1])
            workers.append(worker)
        reached = {rank: worker.get_handshake_metadata() for rank, worker in enumerate(workers)}
        scheduler.set_xfer_handshake_metadata(reached)
        return Node(scheduler, list(workers), tensors)

    yield build
    for worker in workers:
        worker.shutdown()


class Decode:
    """A decode worker's end: real pools, its own count, the protocol by hand."""

    def __init__(self, layout: ModelLayout = LAYOUT, *, secret: str = SECRET) -> None:
        self.seal = Seal(secret.encode())
        self.offload = Offload.create(
            layout, slot_bytes="16MiB", host_bytes=16 * layout.host_page_bytes, length_max=1024
        )
        self.latent = self.offload._pools.latent
        self.windows = Region(geometry.SLOTS, np.zeros(1 << 16, np.uint8))
        regions = [*geometry.pool_regions(self.latent), self.windows]
        self.regions = {region.number: region for region in regions}
        who = Identity(epoch=new_epoch(), seal=self.seal, layout=layout_hash(layout))
        self.transport = TcpTransport(who)
        self.transport.register(regions)
        self.arrivals = Arrivals(clock=RealClock())
        self.heard: list[Message] = []
        self.lost: set[int] = set()
        self.pages = np.empty(0, np.int64)
        self.room: Reserved | None = None

    def meet(self, port: int) -> int:
        call = HTTPConnection("127.0.0.1", port, timeout=60)
        call.request("POST", "/peers", self.transport.metadata())
        answer = call.getresponse()
        assert answer.status == 200, answer.read()
        return self.transport.connect(answer.read())

    def reserve(self, uid: int, peer: int, *, salt: bytes = b"") -> None:
        """The prompt's pages are not the first of the pool."""
        self.offload.open([7] * 65)
        pages = self.offload.open(list(range(TOKENS))).holding.host_pages.astype(np.int64)
        self.pages = pages
        self.transport.allow(uid)
        layout = self.offload.layout
        layers, groups = range(layout.layer_total), range(layout.group_count)
        shares = geometry.shares(layout, layers, groups, first_page=0, token_count=TOKENS - 1)
        self.arrivals.expect(uid=uid, sender=peer, shares=shares, within_s=GUARD_S)
        text, pool_pages = text_digest(PROMPT[:-1], salt), self.latent.pages.page_count
        room = Reserved(uid, uid, TOKENS - 1, text, 0, pool_pages, 0, tuple(pages.tolist()))
        self.room = room
        self.say(room, peer)

    def say(self, message: Message, peer: int) -> None:
        sealed = self.seal.sealed(message, sender=self.transport.epoch, receiver=peer)
        self.transport.post(Transfer(peer=peer, notification=sealed, within_s=GUARD_S))

    def poll(self) -> None:
        for event in self.transport.poll():
            if isinstance(event, PeerLost):
                self.lost.add(event.peer)
            if isinstance(event, Notification):
                message = self.seal.opened(event.content).message
                self.heard.append(message)
                if isinstance(message, Piece):
                    self.arrivals.take(message, sender=event.peer, read=self._landed)

    @property
    def pieces(self) -> list[Piece]:
        self.poll()
        return [message for message in self.heard if isinstance(message, Piece)]

    def has_heard(self, kind: type[Message]) -> bool:
        self.poll()
        return any(isinstance(message, kind) for message in self.heard)

    def has_all(self, uid: int, peer: int) -> bool:
        self.poll()
        arrival = self.arrivals.find(uid, sender=peer)
        return arrival is not None and arrival.is_complete

    def _landed(self, piece: Piece) -> list[memoryview]:
        assert self.room is not None
        return views(geometry.piece_runs(self.offload.layout, piece, self.room), self.regions)

    def check(self, node: Node, rank: int) -> None:
        """Pools hold the pages that are in vLLM's blocks, as read straight from there."""
        reader = BlockReader(LAYOUT, node.tensors[rank])
        blocks = Blocks(np.array(node.blocks), BLOCK_ROWS)
        for place in all_places(LAYOUT):
            wanted = reader.read(place, blocks, range(4), token_count=TOKENS - 1).numpy()
            if place.kind is PieceKind.ROWS:
                pool = self.latent.rows[place.layer].reshape(-1, PAGE_ROWS * 656)
            else:
                pool = self.latent.keys.pages[place.layer]
            assert np.array_equal(pool[self.pages], wanted)
        raw = self.windows.memory[:16].tobytes()
        assert unpacked_windows(raw, group_count=4, length=TOKENS - 1)[1] == 0

    def close(self) -> None:
        self.transport.close()
        self.offload.close()


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode()
    yield made
    made.close()


def asked(params: Any = None, salt: str | None = None) -> Any:
    return SimpleNamespace(
        request_id="a",
        kv_transfer_params={"do_remote_decode": True, **(params or {})},
        prompt_token_ids=list(PROMPT),
        num_prompt_tokens=TOKENS,
        cache_salt=salt,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def prefill(node: Node, request: Any) -> dict[str, Any]:
    """Two chunks, then the answer; vLLM keeps the blocks."""
    node.scheduler.update_state_after_alloc(request, None, 0)
    node.step(output([fresh(request, BLOCKS[:2])], counts={"a": 100}), range(100))
    rest = TOKENS - 100
    node.step(output(later=[("a", BLOCKS[2:], 100)], counts={"a": rest}), range(100, TOKENS))
    keeps, params = node.scheduler.request_finished_all_groups(request, (BLOCKS,))
    assert keeps
    return params


@versions
@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_prompt_lands_bit_for_bit_and_vllm_gets_its_blocks_back(
    version: Any, rank_count: int, node: Callable[..., Node], decode: Decode
) -> None:
    vllm = node(version, rank_count)
    params = prefill(vllm, asked(salt="s"))
    uid = int(params["ess_rooms"][0], 16)
    peer = decode.meet(params["remote_port"])
    assert params["remote_engine_id"] == f"{peer:016x}"
    decode.reserve(uid, peer, salt=salt_of("s").encode())
    vllm.step(output())
    until(lambda: decode.has_all(uid, peer))
    decode.check(vllm, uid % rank_count)
    assert [count for count in vllm.counts if not count] == [0], "kept by the source rank alone"
    decode.say(Release(uid, Reason.DONE), peer)

    def is_over() -> bool:
        decode.poll()
        vllm.step(output())
        return max(vllm.counts) == min(vllm.counts) == 1

    until(is_over)
    staging = [worker._departing._outbox._staging for worker in vllm.workers]
    assert [each.free_count for each in staging] == [4096] * rank_count
    if hasattr(vllm.scheduler, "has_pending_push_work"):
        assert not vllm.scheduler.has_pending_push_work()


def test_full_pages_leave_while_the_prompt_is_still_made(
    node: Callable[..., Node], decode: Decode
) -> None:
    """Where a router starts both legs at once the decode worker knows the room beforehand."""
    vllm, request = node(VERSIONS[-1]), asked({"transfer_id": "xfer-1"})
    peer = decode.meet(vllm.workers[0].get_handshake_metadata().reached.port)
    vllm.scheduler.update_state_after_alloc(request, None, 0)
    metadata = vllm.scheduler._requests._leaving["a"]
    decode.reserve(metadata.uid, peer)
    vllm.step(output([fresh(request, BLOCKS[:2])], counts={"a": 100}), range(100))

    def has_first_pages() -> bool:
        decode.poll()
        arrival = decode.arrivals.find(metadata.uid, sender=peer)
        return arrival is not None and arrival.count.arrived == 2 * LAYOUT.layer_total

    until(has_first_pages)
    rest = TOKENS - 100
    vllm.step(output(later=[("a", BLOCKS[2:], 100)], counts={"a": rest}), range(100, TOKENS))
    assert vllm.scheduler.request_finished(request, BLOCKS)[0]
    vllm.step(output())
    until(lambda: decode.has_all(metadata.uid, peer))
    decode.check(vllm, 0)


def test_a_layer_leaves_while_the_next_is_computed(
    node: Callable[..., Node], decode: Decode
) -> None:
    vllm, request = node(VERSIONS[-1]), asked({"transfer_id": "xfer-1"})
    worker, tensors = vllm.workers[0], vllm.tensors[0]
    peer = decode.meet(worker.get_handshake_metadata().reached.port)
    vllm.scheduler.update_state_after_alloc(request, None, 0)
    decode.reserve(vllm.scheduler._requests._leaving["a"].uid, peer)
    planned = output([fresh(request, BLOCKS[:2])], counts={"a": 100})
    worker.bind_connector_metadata(vllm.scheduler.build_connector_meta(planned))
    name = name_of(CachePlace(PieceKind.ROWS, 0), LAYOUT)
    vllm._compute(tensors, 0, range(100))
    worker.save_kv_layer(name, tensors[name], None)
    until(lambda: len(decode.pieces) == 2)
    assert {(piece.layer_begin, piece.layer_end) for piece in decode.pieces} == {(0, 1)}


def test_full_staging_makes_pages_wait() -> None:
    made = contents(TOKENS, LAYOUT)
    blocks = Blocks(np.array(BLOCKS), BLOCK_ROWS)
    tensors = {
        name_of(place, LAYOUT): tensor_of(place, records, blocks, BLOCK_ROWS)
        for place, records in made.items()
    }
    staging = Staging(slot_bytes=LAYOUT.page_bytes, slot_count=5)
    pages = BlockPages(BlockReader(LAYOUT, tensors), staging, row_count=TOKENS - 1)
    pages.blocks = blocks
    lent = pages.lend(Part(PieceKind.ROWS, range(2), range(2)))
    assert lent is not None
    assert staging.free_count == 1
    assert pages.lend(Part(PieceKind.INDEX_KEYS, range(1), range(2))) is None
    pages.give_back(lent)
    assert pages.lend(Part(PieceKind.INDEX_KEYS, range(1), range(2))) is not None


def test_a_preempted_prompt_is_given_up_before_its_blocks_are_written(
    node: Callable[..., Node], decode: Decode
) -> None:
    """The receiver gets a refusal; computed anew, the prompt leaves again when a later request
    needs it."""
    vllm, request = node(VERSIONS[-1]), asked({"transfer_id": "xfer-1"})
    peer = decode.meet(vllm.workers[0].get_handshake_metadata().reached.port)
    vllm.scheduler.update_state_after_alloc(request, None, 0)
    uid = vllm.scheduler._requests._leaving["a"].uid
    decode.reserve(uid, peer)
    vllm.step(output([fresh(request, BLOCKS[:2])], counts={"a": 100}), range(100))
    until(lambda: decode.has_heard(Piece))
    vllm.step(output(preempted={"a"}))
    for tensor in vllm.tensors[0].values():
        tensor[:] = FOREIGN
    until(lambda: decode.has_heard(Release))
    decode.arrivals.close(uid, sender=peer)
    decode.reserve(uid, peer)
    vllm.blocks = [3, 8, 1, 6]
    again = output(later=[("a", vllm.blocks, 0)], counts={"a": TOKENS}, resumed=["a"])
    vllm.step(again, range(TOKENS))
    assert vllm.scheduler.request_finished(request, vllm.blocks)[0]
    vllm.step(output())
    until(lambda: decode.has_all(uid, peer))
    decode.check(vllm, 0)


def test_an_error_that_nobody_expects_is_said_and_ends_all_that_leaves(
    node: Callable[..., Node],
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a device that vLLM has filled has no memory for copies. One prompt is complete, one
    is being made: its blocks are vLLM's, which hears of it when it has finished it, and once."""
    vllm = node(VERSIONS[-1])
    worker, params = vllm.workers[0], prefill(vllm, asked())
    vllm.step(output())
    vllm.scheduler.update_state_after_alloc(made := named("b"), None, 0)
    vllm.step(output([fresh(made, [1, 3])], counts={"b": 100}), range(100))
    peer = decode.meet(params["remote_port"])

    def no_memory(*_: object, **named: object) -> None:
        raise torch.OutOfMemoryError("no memory for a page")

    monkeypatch.setattr(BlockReader, "read", no_memory)
    decode.reserve(int(params["ess_rooms"][0], 16), peer)
    until(lambda: decode.poll() or peer in decode.lost)
    worker._departing._thread.join(GUARD_S)
    assert "rank 0 sends no more rows" in caplog.text
    assert "no memory for a page" in caplog.text
    assert worker.get_finished(set())[0] == {"a"}
    assert vllm.scheduler.request_finished(named("b", "FINISHED_ABORTED"), [1, 3]) == (False, None)
    vllm.step(output())
    assert worker.get_finished(set())[0] is None
    with pytest.raises(ConnectionRefusedError):
        decode.meet(params["remote_port"])
    prefill(vllm, asked())
    assert "request a does not leave: its rank has failed: OutOfMemoryError" in caplog.text
    vllm.step(output())
    assert vllm.counts == [1]


def named(name: str, status: str = "FINISHED_LENGTH_CAPPED") -> Any:
    request = asked()
    request.request_id, request.status = name, SimpleNamespace(name=status)
    return request


def test_another_text_or_secret_or_model_gets_nothing(
    node: Callable[..., Node], decode: Decode
) -> None:
    vllm = node(VERSIONS[-1])
    params = prefill(vllm, asked(salt="s"))
    peer = decode.meet(params["remote_port"])
    decode.reserve(int(params["ess_rooms"][0], 16), peer, salt=b"another")
    until(lambda: decode.has_heard(Refused))
    assert not any(isinstance(message, (Piece, Count)) for message in decode.heard)
    deeper = read_layout({**MODEL, "num_hidden_layers": 5}, with_mtp=False)
    for stranger in (Decode(secret="another secret of that size"), Decode(deeper)):
        with pytest.raises(AssertionError, match=r"not made with our secret|another model"):
            stranger.meet(params["remote_port"])
        stranger.close()
