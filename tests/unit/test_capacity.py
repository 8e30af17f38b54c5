"""The door, the planner, the server and the weights' plan compute with the same arithmetic how many
requests fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ess.door import Offload
from ess.errors import BadInput
from ess.kernels.served import LOGIT_BYTES, SELECT_BYTES
from ess.layout import IndexCodec, ModelLayout, RowCodec
from ess.models.weights.expected.dry_run import make_plan, plan_lines, read_config
from ess.pool.capacity import capacity_of
from ess.pool.ledger import Ledger
from ess.server.commands.start.settings import resolve
from ess.server.commands.start.sizing import plan_memory
from ess.sim.memory_budget import Budget

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
EMBEDDED = ModelLayout.embedded()
UNEQUAL = ModelLayout(
    name="unequal",
    layer_count=2,
    groups=((0, 1), (2,)),
    row=RowCodec(form="opaque", opaque_bytes=16),
    index=IndexCodec(key_dim=8, head_count=1),
    mtp_layer_count=1,
    slot_floor=8,
)


def open_pools(layout: ModelLayout, **sizes: int) -> Offload:
    enough = {"slot_bytes": 1 << 22, "host_bytes": 1 << 22, "sequence_max": 2, "length_max": 128}
    return Offload.create(layout, **{**enough, **sizes})


def accounts(ledger: Ledger) -> list[tuple[str, int, int]]:
    return [
        (account.name + account.times, account.unit_bytes, account.capacity)
        for account in ledger._accounts.values()
    ]


@pytest.mark.parametrize(
    ("layout", "chunk_count", "slots", "bytes_each"),
    [
        (EMBEDDED, 7, 64, (4592, 60_928, 353_024)),
        (EMBEDDED, 22, 192, (4592, 60_928, 353_024)),
        (UNEQUAL, 2, 64, (48, 2048, 4608)),
        (UNEQUAL, 7, 256, (48, 2048, 4608)),
    ],
)
def test_the_door_opens_these_accounts(layout, chunk_count, slots, bytes_each):
    slot, index_page, host_page = bytes_each
    sizes = {
        "slot_bytes": chunk_count * layout.chunk_bytes + 5,
        "index_bytes": 2 * index_page + 1,
        "host_bytes": 3 * host_page + 1,
    }
    with open_pools(layout, **sizes) as offload:
        assert accounts(offload._pools.ledger) == [
            (f"slots x {layout.group_count} groups", slot, slots),
            ("index pages", index_page, 2),
            ("host pages", host_page, 3),
        ]


@pytest.mark.parametrize("layout", [EMBEDDED, UNEQUAL])
@pytest.mark.parametrize("extra_count", [0, 1, 3, 4, 9, 20])
def test_what_is_counted_beforehand_is_what_the_door_opens(layout, extra_count):
    """Also where a slot of one group costs more than that of another."""
    sizes = {
        "slot_bytes": (layout.group_count + extra_count) * layout.chunk_bytes,
        "host_bytes": 1 << 22,
        "index_bytes": 1 << 20,
    }
    counted = Ledger(capacity_of(layout, **sizes).accounts(layout))
    with open_pools(layout, **sizes) as offload:
        assert accounts(offload._pools.ledger) == accounts(counted)
    assert capacity_of(layout, **sizes | {"slot_bytes": layout.chunk_bytes}).slots == 0


@pytest.mark.parametrize(
    ("sizes", "match"),
    [
        ({"slot_bytes": 200_000}, r"195\.31 KiB, .* works is 287\.00 KiB \(7 x 41\.00 KiB\)"),
        ({"host_bytes": 5}, r"5 B, .* works is 344\.75 KiB \(1 x 344\.75 KiB\)"),
        ({"index_bytes": 50_000}, r"48\.83 KiB, .* works is 59\.50 KiB \(1 x 59\.50 KiB\)"),
    ],
)
def test_the_door_says_how_much_is_the_least(sizes, match):
    [name] = sizes
    with pytest.raises(BadInput, match=rf"^{name} is {match}$"):
        open_pools(EMBEDDED, **sizes)


@pytest.mark.parametrize(
    ("layout", "count_map", "expected"),
    [
        (ModelLayout.deepseek_v32(), True, (62, 40_672, 101_420, 539_648, 3_126_784, 2747)),
        (ModelLayout.deepseek_v32(), False, (62, 40_672, 101_543, 523_776, 3_126_784, 2747)),
        (ModelLayout.glm_52(), True, (22, 51_824, 81_712, 191_488, 3_502_592, 2452)),
        (ModelLayout.glm_52(), False, (22, 51_824, 81_746, 185_856, 3_502_592, 2452)),
    ],
)
def test_the_planner_predicts_these_accounts(layout, count_map, expected):
    groups, slot, slots, index_page, host_page, host_pages = expected
    budget = Budget(layout=layout, device_bytes=4 * GIB, host_bytes=8 * GIB, count_map=count_map)
    assert accounts(budget.books(context=4000, batch=5)) == [
        (f"slots x {groups} groups", slot, slots),
        ("index pages", index_page, 315),
        ("host pages", host_page, host_pages),
    ]
    assert budget.batch_max(context=4000, slots_each=2000) == 37


def test_the_planner_refuses_in_these_words():
    budget = Budget(layout=ModelLayout.glm_52(), device_bytes=4 * GIB)
    short = budget.refusal(context=4000, batch=9, slots_each=20_000)
    said = "needs 180,000 slots x 22 groups = 8.69 GiB, more than the pool's 3.90 GiB"
    assert str(short) == said


def test_the_server_plans_these_bytes():
    asked = {"max_model_len": "2k", "host_bytes": "64MiB", "max_running": 16, "threads": 3}
    plan, scored = (
        plan_memory(
            resolve(each, environment={}).settings, EMBEDDED, positions_max=131_072, weight_bytes=0
        )
        for each in (asked, asked | {"evict": "score", "mtp": 2})
    )
    assert plan.token_capacity == 190 * 64
    assert plan.index_bytes == 190 * 60_928
    assert plan.slot_bytes == 321 * 7 * 64 * 656
    assert plan.logit_bytes == 3 * 2048 * SELECT_BYTES
    assert scored.logit_bytes == plan.logit_bytes + 16 * 2 * 2048 * LOGIT_BYTES
    queries = SELECT_BYTES // LOGIT_BYTES - 3
    assert f"kRunQueries = {queries};" in (ROOT / "csrc/cpu/kernels.cpp").read_text()
    pools = plan.host_bytes + plan.slot_bytes + plan.index_bytes
    assert plan.total_bytes == pools + plan.logit_bytes
    assert [(room.length, room.count, room.limiter) for room in plan.rooms] == [
        (2048, 5, "host_bytes")
    ]


@pytest.mark.parametrize(
    ("name", "context", "expected"),
    [
        ("deepseek-v3.2", 131_072, ("host 5.96 GiB", "device 1.27 GiB at", "5.99 GiB with")),
        ("glm-5.2", 100, ("host 6.68 MiB", "device 5.31 MiB at", "6.69 MiB with")),
    ],
)
def test_the_weights_plan_says_these_bytes(name, context, expected):
    lines = plan_lines(make_plan(read_config(name)), context=context, device_bytes=139 * GIB)
    [line] = [line for line in lines if line.startswith("context")]
    assert all(part in line for part in expected), line
