"""Orders and reports as bytes: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

import math
import random

import pytest

from ess.errors import BadInput
from ess.prefill import orders, records, reports
from ess.prefill.orders import (
    Close,
    Enter,
    Forget,
    GiveUp,
    Load,
    Meet,
    Open,
    Part,
    Profile,
    Run,
    Stop,
    Text,
)
from ess.prefill.reports import Counted, Free, Hello, Ran, Released, Took

ORDERS = [
    Text(7, (1, 2, 3)),
    Open(number=7, uid=(1 << 63) - 1, cached_count=64, salt=b"\xff salt", tokens=(5, 1 << 31)),
    Open(number=8, uid=0, cached_count=0, load_max=9, salt=b"", tokens=()),
    Load(8, 7),
    Enter(8),
    Run(3, (Part(7, 64, 128, False), Part(8, 0, 0, True))),
    GiveUp(7),
    Close(8),
    Meet(b"sealed"),
    Forget(),
    Profile(4, 100),
    Stop(),
]
REPORTS = [
    Hello(
        first_layer=2,
        stop_layer=4,
        host_pages=64,
        index_pages=32,
        model=bytes(range(32)),
        metadata=b"m",
    ),
    Took(9, Free(1, 2, 3, 4)),
    Counted(8, 7),
    Ran(3, 0.25),
    Released(7, 5, "given up: Ä"),
]


def test_orders_come_out_as_they_went_in():
    assert orders.unpack(records.head(map(orders.pack, ORDERS))) == ORDERS


def test_reports_come_out_as_they_went_in():
    assert reports.unpack(reports.pack(REPORTS)) == REPORTS


@pytest.mark.parametrize(
    ("unpack", "content"),
    [
        (orders.unpack, records.head(map(orders.pack, ORDERS))),
        (reports.unpack, reports.pack(REPORTS)),
    ],
    ids=["orders", "reports"],
)
def test_bytes_that_are_changed_or_cut_are_refused_or_mean_something_else(unpack, content):
    """Never another error, and never something longer than what came."""
    chance = random.Random(0)
    refused_count = 0
    for _ in range(4000):
        changed = bytearray(content)
        for _ in range(chance.randint(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        cut = bytes(changed[: chance.randint(0, len(changed))])
        try:
            assert len(unpack(cut)) <= len(cut)
        except BadInput:
            refused_count += 1
    assert refused_count > 2000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not of a stage"),
        (records.MAGIC + b"\x01", "ends inside a record"),
        (records.MAGIC + b"\x04\xff\xff\xff\x7f", "a record of 2147483647 bytes"),
        (records.head([records.record(99, b"")]), "kind 99"),
        (records.head([records.record(4, b"123")]), "a give-up has 3 bytes"),
        (records.head([records.record(3, bytes(8))]), "0 parts of 0 prompts"),
        (records.head([records.record(3, bytes(8 + 24))]), "24 bytes"),
        (records.head([orders.pack(Stop())[:1] + b"\x01\x00\x00\x00x"]), "a stop has 1 bytes"),
    ],
)
def test_a_head_that_is_none_is_refused_by_name(content, sentence):
    with pytest.raises(BadInput, match=sentence):
        orders.unpack(content)


def test_no_prompt_has_two_parts_in_a_batch_and_only_a_last_part_is_empty():
    with pytest.raises(BadInput, match="2 parts of 1 prompts"):
        Run(1, (Part(7, 0, 64, False), Part(7, 64, 65, True)))
    with pytest.raises(BadInput, match=r"chunk 5\.\.5 of prompt 7"):
        Part(7, 5, 5, is_last=False)


def test_a_long_prompt_is_cut_into_orders_that_fit_a_frame():
    prompt = list(range(300_000))
    *before, last = orders.cut(prompt)
    assert [token for cut in (*before, last) for token in cut] == prompt
    packed = [orders.pack(Text(1, cut)) for cut in (*before, last)]
    assert all(len(records.head([each])) < records.HEAD_BYTES_MAX for each in packed)


def test_a_hello_of_a_stage_without_a_port_and_times_that_are_none():
    alone = reports.Hello(
        first_layer=0, stop_layer=2, host_pages=8, index_pages=8, model=bytes(32), metadata=b""
    )
    assert reports.unpack(reports.pack([alone])) == [alone]
    for seconds in (math.inf, math.nan, -1.0):
        with pytest.raises(BadInput, match="batch 7 ran for"):
            reports.unpack(reports.pack([reports.Ran(7, seconds)]))
