"""A router's side of KV events: the schemas of SGLang and vLLM, and an index kept by replaying."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq

WAIT_MS = 30_000
END = (-1).to_bytes(8, "big", signed=True)


class Event(msgspec.Struct, array_like=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    """As SGLang has it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


class MapEvent(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class MapStored(MapEvent, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class MapRemoved(MapEvent, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class MapCleared(MapEvent, tag="AllBlocksCleared"):
    pass


class MapBatch(msgspec.Struct, array_like=True):
    """As vLLM has it since its events are maps."""

    ts: float
    events: list[MapStored | MapRemoved | MapCleared]
    data_parallel_rank: int | None = None


BATCH = {"sglang": Batch, "vllm": MapBatch}


class Consumer:
    """Applies batches in the order of their numbers; `known` has the parent and tokens of every
    block. `lost` are numbers that neither came nor were there to be replayed, `topics` those of
    batches that were."""

    def __init__(
        self, context: zmq.Context, address: str, replay: str = "", *, form: str = "sglang"
    ) -> None:
        self.known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.expected = 0
        self.lost: list[int] = []
        self.kinds: list[str] = []
        self.frames: list[list[bytes]] = []
        self.topics: set[bytes] = set()
        self.sub = context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.SUBSCRIBE, b"")
        self.sub.setsockopt(zmq.RCVHWM, 1)
        self.sub.connect(address)
        self.dealer = context.socket(zmq.DEALER)
        if replay:
            self.dealer.connect(replay)
        self._has_replay = bool(replay)
        self._form = form
        self._decoder = msgspec.msgpack.Decoder(BATCH[form])

    def close(self) -> None:
        self.sub.close(linger=0)
        self.dealer.close(linger=0)

    def hear(self, *, within_ms: int = WAIT_MS) -> bool:
        """One batch, and before it those that were missed."""
        if not self.sub.poll(within_ms):
            return False
        frames = self.sub.recv_multipart()
        self.frames.append(frames)
        _, number, payload = frames
        if int.from_bytes(number, "big") > self.expected and self._has_replay:
            self.catch_up()
        self._take(number, payload)
        return True

    def catch_up(self) -> None:
        """All that is kept from the first number that has not come."""
        self.dealer.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            assert self.dealer.poll(WAIT_MS), "the replay does not end"
            empty, *topic, number, payload = self.dealer.recv_multipart()
            assert (empty, len(topic)) == (b"", 1 if self._form == "vllm" else 0)
            if number == END:
                assert (topic, payload) == ([b""] if topic else [], b"")
                return
            self.topics.update(topic)
            self._take(number, payload)

    def _take(self, frame: bytes, payload: bytes) -> None:
        number = int.from_bytes(frame, "big")
        if number < self.expected:
            return
        self.lost += range(self.expected, number)
        self.expected = number + 1
        for event in self._decoder.decode(payload).events:
            self._apply(event)

    def _apply(self, event: Any) -> None:
        kind = type(event).__struct_config__.tag
        self.kinds.append(kind)
        if kind == "AllBlocksCleared":
            self.known.clear()
        elif kind == "BlockRemoved":
            for name in event.block_hashes:
                del self.known[name]
        else:
            self._store(event)

    def _store(self, event: Any) -> None:
        assert (event.lora_id, event.block_size, event.medium) == (None, 64, "CPU")
        assert len(event.token_ids) == 64 * len(event.block_hashes)
        parent = event.parent_block_hash
        for at, name in enumerate(event.block_hashes):
            assert name not in self.known, "stored twice"
            self.known[name] = (parent, tuple(event.token_ids[64 * at : 64 * at + 64]))
            parent = name
