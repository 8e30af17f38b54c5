"""KV events over real sockets, read by a consumer that knows only the published schemas."""

from __future__ import annotations

import itertools
import random
import re
import stat
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from ess.door import Offload
from ess.engine.process.kv_events import (
    BATCH_PAGES_MAX,
    KEPT_BYTES_MAX,
    KvEvents,
    block_name,
)
from ess.errors import BadInput, BadState, Unavailable
from ess.pool.latent import LatentPool
from ess.pool.prefix import PrefixIndex, page_hash, page_hashes, root_hash
from ess.server.commands.start.setting_checks import check_events
from ess.server.commands.start.settings import Settings
from tests.server.harness import until
from tests.support.kv_consumer import Consumer
from tests.support.layouts import PLAIN as LAYOUT
from tests.support.process import Process


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = zmq.Context()
    made.linger = 1000  # or a closed socket waits for ever with words for a peer that has gone
    yield made
    made.destroy(linger=0)


@pytest.fixture
def publisher(context) -> Iterator[Callable[..., KvEvents]]:
    """Makes publishers and closes them."""
    with ExitStack() as opened:

        def publisher_at(address: str, replay: str = "", **given: str) -> KvEvents:
            return opened.enter_context(closing(KvEvents(context, address, replay=replay, **given)))

        yield publisher_at


@pytest.fixture
def consume(context) -> Iterator[Callable[..., Consumer]]:
    """Makes consumers and closes them."""
    made: list[Consumer] = []

    def consumer_at(*addresses: str, form: str = "sglang") -> Consumer:
        made.append(Consumer(context, *addresses, form=form))
        return made[-1]

    yield consumer_at
    for consumer in made:
        consumer.close()


@pytest.fixture
def at(tmp_path: Path) -> tuple[str, str]:
    return f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"


def publish(index: PrefixIndex, first_page: int, tokens: list[int], *, salt: bytes = b"") -> None:
    """As sequences do: page after page, each with its parent's hash."""
    parent = root_hash(salt)
    for page in range(len(tokens) // 64):
        text = tokens[64 * page : 64 * page + 64]
        content = page_hash(parent, text)
        index.publish(first_page + page, content, parent=parent, text=text)
        parent = content


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_both_schemas_carry_the_same_blocks(publisher, consume, at, form):
    events = publisher(*at, form=form, topic="kv@here@model")
    consumer = consume(*at, form=form)
    index = PrefixIndex()
    index.listeners.append(events)
    tokens = list(range(192))
    publish(index, 0, tokens)
    events.flush()
    consumer.catch_up()
    assert consumer.topics == ({b"kv@here@model"} if form == "vllm" else set())
    names = [block_name(content) for content in page_hashes(tokens)]
    assert list(consumer.known) == names
    assert consumer.known[names[0]] == (None, tuple(range(64)))
    assert consumer.known[names[2]] == (names[1], tuple(range(128, 192)))
    assert consumer.kinds == ["BlockStored"], "a chain is one event"
    index.idle(2)
    index.forget_oldest(1)
    events.flush()
    consumer.catch_up()
    assert list(consumer.known) == names[:2]
    for page in (0, 1):
        index.idle(page)
    assert index.forget_idle() == [0, 1]
    events.flush()
    consumer.catch_up()
    assert consumer.kinds == ["BlockStored", "BlockRemoved", "AllBlocksCleared"]
    assert consumer.lost == []


def test_an_array_has_the_fields_of_sglang_and_no_more(context, publisher, at):
    events = publisher(*at)
    index = PrefixIndex()
    index.listeners.append(events)
    publish(index, 0, [5] * 64)
    events.flush()
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(at[1])
        dealer.send_multipart([b"", bytes(8)])
        _, number, payload = dealer.recv_multipart()
    time_s, listed, rank = msgspec.msgpack.decode(payload)
    name = block_name(page_hashes([5] * 64)[0])
    assert number == bytes(8)
    assert listed == [["BlockStored", [name], None, [5] * 64, 64, None, "CPU"]]
    assert (isinstance(time_s, float), rank) == (True, 0)


def test_a_salted_prompt_s_pages_hang_on_another_root(publisher, consume, at):
    """A router that takes None for the empty prompt never offers them to an open request."""
    events = publisher(*at)
    consumer = consume(*at)
    index = PrefixIndex()
    index.listeners.append(events)
    publish(index, 0, [7] * 64, salt=b"tenant")
    events.flush()
    consumer.catch_up()
    [(parent, _)] = consumer.known.values()
    assert parent == block_name(root_hash(b"tenant"))


def test_a_subscriber_hears_its_topic_live_and_asks_for_what_it_missed(publisher, consume, at):
    events = publisher(*at, topic="kv@here@model")
    index = PrefixIndex()
    index.listeners.append(events)
    publish(index, 0, [1] * 64)
    events.flush()
    consumer = consume(*at)
    page = 1

    def is_heard() -> bool:
        nonlocal page
        publish(index, page, [page + 1] * 64)
        events.flush()
        page += 1
        return consumer.hear(within_ms=20)

    until(is_heard, "a batch over PUB and SUB")
    consumer.catch_up()
    assert len(consumer.known) == page, "the batch from before the subscription too"
    assert consumer.lost == []
    assert {topic for topic, _, _ in consumer.frames} == {b"kv@here@model"}


PAGES = 24


class Workload:
    """Sequences come with texts that often share prefixes, and go; now and then all is forgotten.
    The pool is small, so that pages are forgotten for room."""

    def __init__(self, seed: int) -> None:
        self.latent = LatentPool(LAYOUT, np.zeros(PAGES * LAYOUT.host_page_bytes, np.uint8))
        self.random = random.Random(seed)
        self.held: list[np.ndarray] = []
        self.contents: set[bytes] = set()

    def turn(self) -> None:
        act = self.random.random()
        if act < 0.55:
            self.open()
        elif act < 0.95 and self.held:
            self.latent.drop(self.held.pop(self.random.randrange(len(self.held))))
        elif act >= 0.95:
            while act >= 0.97 and self.held:
                self.latent.drop(self.held.pop())
            self.latent.forget()
        self.latent.prefix.check()

    def open(self) -> None:
        text = [self.random.randrange(2) for _ in range(self.random.randrange(1, 6))]
        tokens = [mark for mark in text for _ in range(64)]
        salt = self.random.choice([b"", b"", b"tenant"])
        hashes = page_hashes(tokens, salt=salt)
        self.contents.update(hashes)
        cached = self.latent.prefix.find(hashes)
        self.latent.hold(np.array(cached, np.int32))
        count = len(hashes) - len(cached)
        if count > self.latent.free_count:
            self.latent.drop(np.array(cached, np.int32))
            return
        pages = np.concatenate([np.array(cached, np.int32), self.latent.take(count)])
        self.publish(pages, tokens, [root_hash(salt), *hashes], first=len(cached))
        self.held.append(pages)

    def publish(
        self, pages: np.ndarray, tokens: list[int], chain: list[bytes], *, first: int
    ) -> None:
        for at in range(first, len(pages)):
            page = int(pages[at])
            self.latent.stored[:, page] = self.latent.keyed[:, page] = np.uint64(2**64 - 1)
            text = tokens[64 * at : 64 * at + 64]
            self.latent.publish(page, chain[at + 1], parent=chain[at], text=text)


@pytest.mark.parametrize("seed", range(6))
def test_after_any_workload_a_consumer_knows_exactly_the_index(publisher, consume, at, seed):
    events = publisher(*at, form="vllm" if seed % 2 else "sglang")
    consumer = consume(*at, form="vllm" if seed % 2 else "sglang")
    load = Workload(seed)
    load.latent.prefix.listeners.append(events)
    for turn in range(300):
        load.turn()
        if load.random.random() < 0.5:
            events.flush()
        if turn % 60 == 59:
            events.flush()
            consumer.catch_up()
            held = {c for c in load.contents if load.latent.prefix.find([c])}
            assert set(consumer.known) == {block_name(content) for content in held}
    assert consumer.lost == []
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(consumer.kinds)


def chain(events: KvEvents, number: int, count: int = BATCH_PAGES_MAX) -> None:
    """A batch of one event, `count` pages long."""
    names = [(number * 1000 + at).to_bytes(8, "big") * 2 for at in range(count + 1)]
    for parent, content in itertools.pairwise(names):
        events.published(content, parent=parent, text=[100_000] * 64)
    events.flush()


def test_a_long_chain_is_cut_into_batches(publisher, consume, at):
    events = publisher(*at)
    consumer = consume(*at)
    chain(events, 0, 2 * BATCH_PAGES_MAX + 1)
    consumer.catch_up()
    assert (consumer.expected, len(consumer.known)) == (3, 2 * BATCH_PAGES_MAX + 1)
    assert consumer.kinds == ["BlockStored"] * 3


def first_kept(context: zmq.Context, address: str, number: int) -> int | None:
    """The first batch that a replay from `number` on begins with."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        dealer.send_multipart([b"", number.to_bytes(8, "big")])
        assert dealer.poll(30_000)
        _, frame, payload = dealer.recv_multipart()
        return int.from_bytes(frame, "big") if payload else None


@pytest.mark.slow
def test_a_slow_subscriber_loses_batches_and_sees_it(context, publisher, consume, at):
    """It takes nothing while much is published. What is kept for it is bounded in batches, what is
    kept for replays in bytes; both ends show in the numbers."""
    events = publisher(*at)
    slow = consume(at[0])
    number = itertools.count()

    def is_heard() -> bool:
        chain(events, next(number), 1)
        return slow.hear(within_ms=20)

    until(is_heard, "a batch over PUB and SUB")
    for _ in range(1600):
        last = next(number)
        chain(events, last)
        if last % 100 == 0:
            until(lambda last=last: first_kept(context, at[1], last) == last, "the thread")
    until(lambda: first_kept(context, at[1], last) == last, "the thread")
    assert first_kept(context, at[1], 0) >= 1600 - KEPT_BYTES_MAX // (BATCH_PAGES_MAX * 64 * 5)
    count = 0
    while slow.hear(within_ms=1000):
        count += 1
    assert slow.lost == [] or slow.lost[0] > slow.expected - 1600
    assert count < 1500, "the queue for it has no bound"
    chain(events, next(number), 1)
    assert slow.hear()
    assert len(slow.lost) > 100, "the gap is seen"


def test_malformed_requests_for_a_replay_are_passed_over(context, publisher, at):
    events = publisher(*at)
    chain(events, 0, 1)
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(at[1])
        for frames in ([b""], [b"", b"7"], [b"", b"", bytes(8)], [b"x" * 4096], [b"", b"\xff" * 9]):
            dealer.send_multipart(frames)
        dealer.send_multipart([b"", bytes(8)])
    assert first_kept(context, at[1], 0) == 0


def test_one_that_asks_and_takes_nothing_keeps_nobody_waiting(context, publisher, consume, at):
    events = publisher(*at)
    for number in range(150):
        chain(events, number)
    with context.socket(zmq.DEALER) as stuck:
        stuck.setsockopt(zmq.RCVHWM, 1)
        stuck.connect(at[1])
        stuck.send_multipart([b"", bytes(8)])
        consumer = consume(*at)
        consumer.catch_up()
        chain(events, 150)
        consumer.catch_up()
        assert consumer.expected == 151


def test_what_was_flushed_still_leaves_when_it_closes(context, consume, at):
    """In the order of the numbers, and the files' rights are this user's alone."""
    events = KvEvents(context, at[0], replay=at[1])
    for address in at:
        mode = Path(address.removeprefix("ipc://")).stat().st_mode
        assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    consumer = consume(at[0])

    def is_heard() -> bool:
        chain(events, 0, 1)
        return consumer.hear(within_ms=20)

    until(is_heard, "a batch over PUB and SUB")
    consumer.known.clear()
    events.emptied()
    events.flush()
    events.close()
    while "AllBlocksCleared" not in consumer.kinds:
        assert consumer.hear()


def test_a_taken_address_is_named(context, tmp_path):
    with context.socket(zmq.PUB) as taken:
        taken.bind("tcp://127.0.0.1:*")
        address = taken.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        with pytest.raises(Unavailable, match=f"kv_events: cannot listen on {address}: Address"):
            KvEvents(context, address)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"kv_events": "tcp://0.0.0.0:5557"}, "which other machines reach"),
        ({"kv_events": "tcp://*:5557"}, "which other machines reach"),
        ({"kv_events": "tcp://[::]:5557"}, "which other machines reach"),
        ({"kv_events": "tcp://eth0:5557"}, "which other machines reach"),
        (
            {"kv_events": "tcp://127.0.0.1:5557", "kv_events_replay": "tcp://10.1.2.3:5558"},
            "kv_events_replay is 'tcp://10.1.2.3:5558', which other machines reach",
        ),
        ({"kv_events": "5557"}, "must be tcp://HOST:PORT or ipc://PATH"),
        ({"kv_events": "tcp://127.0.0.1:70000"}, "must be tcp://HOST:PORT"),
        ({"kv_events": "udp://127.0.0.1:7000"}, "must be tcp://HOST:PORT"),
        ({"kv_events_replay": "tcp://127.0.0.1:5558"}, "without kv_events"),
        (
            {"kv_events": "ipc:///tmp/x", "engine": "paced"},
            "the paced engine has no pages to report",
        ),
    ],
)
def test_an_address_that_would_show_prompts_must_be_asked_for(given, sentence):
    with pytest.raises(BadInput, match=re.escape(sentence)):
        check_events(Settings(**given))
    if "other machines" in sentence:
        check_events(Settings(**given, kv_events_public=True))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", "tcp://[::1]:1", "tcp://localhost:1"])
def test_this_machine_s_own_addresses_need_no_word(address):
    check_events(Settings(kv_events=address, kv_events_replay="ipc://here"))


def test_the_prefix_cache_has_one_listener(publisher, tmp_path):
    offload = Offload.create(LAYOUT, slot_bytes="64KiB", host_bytes="64KiB")
    for at in (0, 1):
        events = publisher(f"ipc://{tmp_path}/{at}")
        with pytest.raises(BadState, match="followed already") if at else nullcontext():
            offload.follow_prefixes(events)
    offload.close()


@pytest.mark.slow
def test_a_server_says_which_prompts_it_keeps(consume, tmp_path):
    """The prompt's full pages when it is done; nothing once the cache is flushed."""
    at = f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay"
    with Process("--kv-events", at[0], "--kv-events-replay", at[1]).wait_ready() as process:
        consumer = consume(*at)
        client = process.client()
        prompt = [(7 * at) % 500 + 5 for at in range(200)]
        client.completions.create(model="ess-embedded", prompt=prompt, max_tokens=3)
        names = {block_name(content) for content in page_hashes(prompt)}

        def knows(what: Callable[[], bool]) -> bool:
            """What the engine has told of may still be on its way when its answer is there."""
            consumer.catch_up()
            return what()

        until(lambda: knows(lambda: set(consumer.known) >= names), "the prompt's pages")
        assert consumer.known[block_name(page_hashes(prompt)[0])] == (None, tuple(prompt[:64]))
        urllib.request.urlopen(f"{process.url}/flush_cache", data=b"").read()
        until(lambda: knows(lambda: not consumer.known), "nothing's being kept")
