"""KV events: which prompts' pages this engine holds, told to routers that send prompts to them.

Batches leave over a ZMQ PUB socket as [topic, sequence number, msgpack of [time, events, rank]].
Events are BlockStored, BlockRemoved and AllBlocksCleared with the fields that SGLang and vLLM give
them; SGLang writes an event as an array, vLLM as a map. A page is a block, the first eight bytes of
its content hash are its name. A page of a salted prompt hangs on a root of its own, so that no
router takes it for the page of an open prompt.

Sequence numbers count every batch, so a subscriber that was too slow sees the gap; a ROUTER socket
sends again what is kept of the last batches: as [number, payload] in SGLang's form, with the topic
before them in vLLM's, which has it since 0.26. A thread of its own owns both sockets: it never
waits for a subscriber, and the engine never waits for it. Events hold the tokens of prompts, and
the sockets know no key: `ess serve` refuses an address that other machines reach unless asked.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import zmq

from ess.engine.config import ProcessConfig
from ess.errors import Unavailable
from ess.pool.prefix import root_hash
from ess.units import PAGE_ROWS

Form = Literal["sglang", "vllm"]
MEDIUM: Final = "CPU"
BATCH_PAGES_MAX: Final = 256
QUEUE_MAX: Final = 256
UNREAD_MAX: Final = 1024
KEPT_MAX: Final = 10_000
KEPT_BYTES_MAX: Final = 64 << 20
REPLAYS_MAX: Final = 16
REPLAY_BITE: Final = 32
REQUEST_BYTES_MAX: Final = 1024
RETRY_MS: Final = 10
SEQUENCE_BYTES: Final = 8
END: Final = b"\xff" * SEQUENCE_BYTES
ROOT: Final = root_hash(b"")

Socket = zmq.Socket[bytes]


@dataclass(slots=True, eq=False)
class Stored:
    """A run of pages, each the next one's parent."""

    parent: bytes
    contents: list[bytes] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Removed:
    contents: list[bytes]


class KvEvents:
    """Listens to the prefix index; `flush` sends the events since the last flush. For the engine's
    thread."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        *,
        replay: str = "",
        topic: str = "",
        form: Form = "sglang",
    ) -> None:
        self._form = form
        self._encoder = msgspec.msgpack.Encoder()
        self._heard: list[Stored | Removed | None] = []
        self._number = 0
        self._post = Post(
            context, address, replay=replay, topic=topic.encode(), repeats_topic=form == "vllm"
        )

    # ---- what the index says

    def published(self, content: bytes, *, parent: bytes, text: Sequence[int]) -> None:
        last = self._heard[-1] if self._heard else None
        if (
            not isinstance(last, Stored)
            or last.contents[-1] != parent
            or len(last.contents) == BATCH_PAGES_MAX
        ):
            last = Stored(parent)
            self._heard.append(last)
        last.contents.append(content)
        last.tokens.extend(text)

    def forgotten(self, contents: Sequence[bytes]) -> None:
        last = self._heard[-1] if self._heard else None
        if isinstance(last, Removed) and len(last.contents) + len(contents) <= BATCH_PAGES_MAX:
            last.contents.extend(contents)
        else:
            self._heard.append(Removed(list(contents)))

    def emptied(self) -> None:
        """Drops the events that were not flushed: the index is empty."""
        self._heard = [None]

    # ---- what leaves

    def flush(self) -> None:
        heard, self._heard = self._heard, []
        for part in _batches(heard):
            events = [_written(event, self._form) for event in part]
            payload = self._encoder.encode([time.time(), events, 0])
            self._post.send(self._number, payload)
            self._number += 1

    def close(self) -> None:
        """Closes the sockets; events that were flushed still leave."""
        self._post.close()


def _batches(
    heard: Sequence[Stored | Removed | None],
) -> Iterator[list[Stored | Removed | None]]:
    """The batches in order, none with more than BATCH_PAGES_MAX pages unless it is a single
    event."""
    part: list[Stored | Removed | None] = []
    count = 0
    for event in heard:
        size = 0 if event is None else len(event.contents)
        if part and count + size > BATCH_PAGES_MAX:
            yield part
            part, count = [], 0
        part.append(event)
        count += size
    if part:
        yield part


def _written(event: Stored | Removed | None, form: Form) -> object:
    name, fields = _fields(event)
    if form == "sglang":
        return [name, *fields.values()]
    if isinstance(event, Stored):
        fields["lora_name"] = None
    return {"type": name, **fields}


def _fields(event: Stored | Removed | None) -> tuple[str, dict[str, Any]]:
    """The fields in the order of the array form."""
    if event is None:
        return "AllBlocksCleared", {}
    names = [block_name(content) for content in event.contents]
    if isinstance(event, Removed):
        return "BlockRemoved", {"block_hashes": names, "medium": MEDIUM}
    return "BlockStored", {
        "block_hashes": names,
        "parent_block_hash": None if event.parent == ROOT else block_name(event.parent),
        "token_ids": event.tokens,
        "block_size": PAGE_ROWS,
        "lora_id": None,
        "medium": MEDIUM,
    }


def block_name(content: bytes) -> int:
    return int.from_bytes(content[:SEQUENCE_BYTES], "big")


class Post:
    """The thread that owns the sockets. `send` drops a batch rather than wait; its number is then
    missing everywhere, in the replay too. `repeats_topic`: batches that are sent again begin with
    their topic."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: str,
        *,
        replay: str,
        topic: bytes,
        repeats_topic: bool,
    ) -> None:
        self._topic = topic
        self._repeats_topic = repeats_topic
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._replays: OrderedDict[bytes, int] = OrderedDict()
        with contextlib.ExitStack() as opened:
            self._pub = opened.enter_context(_listening(context, zmq.PUB, address, "kv_events"))
            self._router = (
                opened.enter_context(_listening(context, zmq.ROUTER, replay, "kv_events_replay"))
                if replay
                else None
            )
            opened.pop_all()
        inside = f"inproc://kv-events-{id(self):x}"
        self._in = context.socket(zmq.PULL)
        self._in.setsockopt(zmq.RCVHWM, QUEUE_MAX)
        self._in.bind(inside)
        self._out = context.socket(zmq.PUSH)
        self._out.setsockopt(zmq.SNDHWM, QUEUE_MAX)
        self._out.connect(inside)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def send(self, number: int, payload: bytes) -> None:
        with contextlib.suppress(zmq.Again):
            self._out.send_multipart([_packed(number), payload], zmq.NOBLOCK)

    def close(self) -> None:
        self._out.send(b"")
        self._thread.join()
        self._out.close()

    # ---- in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._in, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(RETRY_MS if self._replays else None))
            if not self._publish():
                break
            if self._router in ready:
                self._ask()
            self._replay()
        for socket in (self._in, self._pub, self._router):
            if socket is not None:
                socket.close()

    def _publish(self) -> bool:
        """All that has come from the engine, so that a replay has what was flushed before it was
        asked for. False when nothing more will come."""
        with contextlib.suppress(zmq.Again):
            while frames := self._in.recv_multipart(zmq.NOBLOCK):
                if len(frames) == 1:
                    return False
                self._pub.send_multipart([self._topic, *frames])
                self._keep(*frames)
        return True

    def _keep(self, number: bytes, payload: bytes) -> None:
        self._kept.append((_unpacked(number), payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_MAX or self._kept_bytes > KEPT_BYTES_MAX:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _ask(self) -> None:
        """[who, empty or not there, the first number wanted]; anything else is ignored."""
        assert self._router is not None, "there is no replay"
        who, *rest = self._router.recv_multipart()
        if rest and len(rest[-1]) == SEQUENCE_BYTES and rest[:-1] in ([], [b""]):
            self._replays[who] = _unpacked(rest[-1])
            while len(self._replays) > REPLAYS_MAX:
                self._replays.popitem(last=False)

    def _replay(self) -> None:
        """Sends a few batches to each subscriber in turn, so that none keeps the others waiting."""
        for who, number in list(self._replays.items()):
            try:
                self._send_some(who, number)
            except zmq.Again:
                continue
            except zmq.ZMQError:
                self._replays.pop(who, None)

    def _send_some(self, who: bytes, number: int) -> None:
        assert self._router is not None, "there is no replay"
        for _ in range(REPLAY_BITE):
            batch = self._kept_from(number)
            number, payload = (-1, b"") if batch is None else batch
            topics = [self._topic if batch else b""] if self._repeats_topic else []
            frames = [who, b"", *topics, END if batch is None else _packed(number), payload]
            self._router.send_multipart(frames, zmq.NOBLOCK)
            if batch is None:
                del self._replays[who]
                return
            number += 1
            self._replays[who] = number

    def _kept_from(self, number: int) -> tuple[int, bytes] | None:
        """The first kept batch whose number is at least this one; numbers may have gaps."""
        if not self._kept or self._kept[-1][0] < number:
            return None
        at = max(0, len(self._kept) - 1 - (self._kept[-1][0] - number))
        while self._kept[at][0] < number:
            at += 1
        return self._kept[at]


def _listening(context: zmq.Context[Socket], kind: int, address: str, name: str) -> Socket:
    """A socket that reads little of what a subscriber sends. Its file is for this user alone."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, UNREAD_MAX)
    socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
    socket.setsockopt(zmq.IPV6, 1)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    before = os.umask(0o177)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close()
        raise Unavailable(f"{name}: cannot listen on {address}: {error.strerror}") from None
    finally:
        os.umask(before)
    return socket


def _packed(number: int) -> bytes:
    return number.to_bytes(SEQUENCE_BYTES, "big")


def _unpacked(frame: bytes) -> int:
    return int.from_bytes(frame, "big")


def events_of(config: ProcessConfig, context: zmq.Context[zmq.Socket[bytes]]) -> KvEvents | None:
    if not config.kv_events:
        return None
    return KvEvents(
        context,
        config.kv_events,
        replay=config.kv_events_replay,
        topic=config.kv_events_topic,
        form=config.kv_events_form,
    )
