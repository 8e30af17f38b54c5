"""What `ess serve --device cuda` refuses, and what it says it will take of a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from ess.engine.devices import DEFAULTS, SERVED, DeviceReport
from ess.engine.process.messages import Launch
from ess.engine.step_bytes import graph_bytes, graph_bytes_more, room_bytes, staged_bytes
from ess.errors import BadInput, EssError, Unavailable
from ess.models.weights.expected.dry_run import make_plan, read_config
from ess.models.weights.expected.kept_bytes import kept_bytes
from ess.pool.device_bytes import PoolShape, pool_bytes
from ess.server.commands.pd.shares import told_settings
from ess.server.commands.ranks import servers
from ess.server.commands.start import banner, launch, resolving
from ess.server.commands.start.devices import device_probing
from ess.server.commands.start.devices.device_sizing import RESERVED, DeviceNeeds, plan_on_device
from ess.server.commands.start.devices.device_stages import COMING, LEAVING, plan_stages
from ess.server.commands.start.files.checkpoint import read_checkpoint, read_entries
from ess.server.commands.start.resolving import layout_of
from ess.server.commands.start.server_facts import launch_of
from ess.server.commands.start.settings import resolve
from ess.server.commands.start.sizing import MemoryPlan
from ess.server.commands.start.topology import launches_of
from ess.units import format_bytes, parse_size
from tests.pd.pairs import SECRET
from tests.server.test_stages import TORCHRUN

GIB = 1 << 30
HOST = 8 * GIB
WEIGHTS = 977 * GIB // 10
SHARED = {"pp_devices": "1,1"}
STAGES = {"role": "prefill", "peer_secret": SECRET, "device": "cuda", "pp_size": 2}
FOUND = DeviceReport(
    torch="2.13.0+cu130",
    torch_cuda="13.0",
    torch_count=1,
    count=1,
    name="a GPU",
    arch="sm_90a",
    free_bytes=70 << 30,
    total_bytes=80 << 30,
)


def planned(
    report: DeviceReport = FOUND,
    *,
    free: int = HOST,
    environment: Mapping[str, str] = MappingProxyType({}),
    **given: Any,
) -> MemoryPlan:
    flags = {"device": "cuda", "max_model_len": "8k", **given}
    settings = resolve(flags, environment=environment).settings
    config = read_checkpoint("").config
    needed = DeviceNeeds(
        config=config,
        layout=config.layout(row=settings.row),
        weight_bytes=3 << 30,
        file_bytes=4 << 30,
    )
    return plan_on_device(settings, needed, report, free=free)


def test_a_device_brings_its_defaults_and_what_is_given_stays():
    settled = resolve({"device": "cuda:1", "form": "bf16"}, environment={})
    settings = {name: getattr(settled.settings, name) for name in DEFAULTS}
    assert settings == {**DEFAULTS, "form": "bf16"}
    assert [settled.origins[name] for name in ("backend", "form")] == ["derived", "flag"]
    assert resolve({"device": "auto"}, environment={}).settings.device == "cpu"


@pytest.mark.parametrize("name", SERVED)
def test_what_a_device_does_not_serve_is_refused_by_name(name: str):
    others = {
        "backend": "cpu",
        "evict": "sieve",
        "deterministic": True,
        "tp_size": 2,
        "cp_size": 2,
        "transport": "shared",
    }
    with pytest.raises(BadInput, match=rf"{name} is .*, and device is 'cuda'"):
        resolve({"device": "cuda", name: others[name]}, environment={})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "tpu"}, "device is 'tpu', must be cpu, cuda or cuda:N"),
        ({"device": "cuda", "pp_size": 2}, "pp_size is 2, and device is 'cuda': an engine that"),
        ({**STAGES, "device": "cuda:1"}, "device is 'cuda:1', and 2 stages of a pipeline run here"),
        ({**STAGES, "pp_devices": "0"}, "pp_devices is '0', must be .* each of the 2 stages here"),
        ({**STAGES, "pp_devices": "0,"}, "pp_devices is '0,', must be .* each of the 2 stages"),
        ({"device": "cuda", "pp_devices": "1"}, "pp_devices is '1', and no pipeline runs"),
        ({"device": "cuda:x"}, "device is 'cuda:x', must be"),
        ({"backend": "cuda"}, "backend is 'cuda', and device is 'cpu': --device cuda brings both"),
        ({"form": "stored"}, "form is 'stored', and device is 'cpu'"),
        ({"graph_sizes": "1,4,2"}, "graph_sizes is '1,4,2', must be ascending numbers of requests"),
        ({"graph_sizes": "0,2"}, "graph_sizes is '0,2', must be ascending"),
        ({"graph_sizes": "8,32"}, "graph_sizes is '8,32', .* to max_running, which is 16"),
        ({"graph_sizes": "few"}, "graph_sizes is 'few', must be"),
    ],
)
def test_other_devices_are_refused(given: dict[str, str], says: str):
    with pytest.raises(BadInput, match=says):
        resolve(given, environment={})


def test_a_length_in_which_no_graph_can_be_captured_is_refused_before_weights_are_loaded():
    says = (
        "max_model_len is 4, but graphs are captured with requests of 5 tokens, with mtp 2: give 5"
    )
    with pytest.raises(BadInput, match=says):
        planned(max_model_len="4", mtp=2)
    assert planned(max_model_len="5", mtp=2).length_max == 5
    assert planned(max_model_len="2", mtp=2, graphs=0).length_max == 2


def test_a_prefill_worker_captures_no_graphs():
    """Whatever a file says that serves workers of both roles."""
    told = {"role": "prefill", "peer_secret": SECRET, "max_model_len": "2", "mtp": 2}
    plan = planned(**told, environment={"ESS_GRAPHS": "8"})
    assert plan.length_max == 2
    assert [line.bytes for line in plan.device.lines if line.item == "graphs"] == [0]
    assert of_stages(TWO, **SIZES, mtp=2, max_model_len="2").length_max == 2
    with pytest.raises(BadInput, match="graphs has no effect on a prefill worker"):
        planned(**told, graphs=8)


def test_a_share_of_a_device_says_nothing_of_a_host():
    given = {"device_bytes": "0.9", "graph_sizes": "1,2"}
    assert resolve(given, environment={}).notes == (
        "device_bytes has no effect: device is cpu",
        "graph_sizes has no effect: device is cpu",
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (
            {"fault": "cuInit answers NO_DEVICE (100)", "count": 0},
            "cuInit answers NO_DEVICE (100);",
        ),
        ({"count": 0}, "the driver has 0 CUDA devices; torch 2.13.0+cu130 is built for CUDA 13.0"),
        ({"torch_cuda": "", "torch_count": 0}, "torch 2.13.0+cu130 is built without CUDA; `ess"),
        ({"torch_count": 0}, "is built for CUDA 13.0 and sees 0 devices; `ess serve --device cpu`"),
    ],
)
def test_what_was_found_is_said(changed: dict[str, Any], says: str):
    assert FOUND.why_not("cuda:0") == ""
    said = msgspec.structs.replace(FOUND, **changed).why_not("cuda:0")
    assert said.startswith("device is 'cuda:0', and CUDA device 0 cannot be used here: ")
    assert says in said
    assert "CUDA device 1 cannot be used" in FOUND.why_not("cuda:1")


def test_slots_take_what_the_rest_leaves_but_no_more_than_there_are_rows():
    report = msgspec.structs.replace(FOUND, free_bytes=(4 << 30) + RESERVED)
    plan = planned(report, host_bytes="6GiB", graphs=0)
    chunk = read_checkpoint("").config.layout().chunk_bytes
    assert plan.device.room == 4 << 30
    assert 0 <= plan.device.room - plan.device.taken < 2 * chunk
    ample = planned(host_bytes="64MiB", max_running=2)
    assert 64 << 20 > ample.slot_bytes > 48 << 20
    assert ample.device.room == (70 << 30) - RESERVED
    assert ample.rooms[-1].count > 0


def test_slots_leave_what_the_driver_may_keep_of_graphs():
    """How much is not known: the plan counts the least, and names what may come on top of it."""
    layout = read_checkpoint("").config.layout()
    more = graph_bytes_more(layout, 70)
    report = msgspec.structs.replace(FOUND, free_bytes=(4 << 30) + RESERVED)
    for device_bytes, left in (("4GiB", more), (f"{(4 << 30) - more}", 0)):
        device = planned(report, device_bytes=device_bytes, host_bytes="6GiB", graphs=70).device
        assert left <= device.room - device.taken < left + 2 * layout.chunk_bytes
        says = f"70 graphs at most; the driver may keep {format_bytes(more)} more for them"
        assert device.lines[-1].note == f"estimated, {says}"


def test_a_device_that_others_use_is_not_planned_to_the_last_byte():
    """Libraries take memory that no line has, and the usual share of a device would leave it."""
    most, full = int((80 << 30) * 0.9), msgspec.structs.replace(FOUND, free_bytes=80 << 30)
    for report, room in ((full, most), (FOUND, (70 << 30) - RESERVED)):
        assert planned(report, host_bytes="96MiB").device.room == room
    little = msgspec.structs.replace(FOUND, free_bytes=RESERVED // 2)
    with pytest.raises(Unavailable, match=r"may take 0.*512\.00 MiB are free, of which 1\.00 GiB"):
        planned(little, host_bytes="96MiB")


@pytest.mark.parametrize(("chunk_tokens", "larger"), [(512, "prompts"), (16, "decoding")])
def test_a_library_for_experts_has_its_room_beside_tokens_and_in_graphs(
    chunk_tokens: int, larger: str
):
    """Weights that are not in fp8 are not multiplied by it."""
    there = msgspec.structs.replace(FOUND, has_rooms=True)
    plain, roomy, other = (
        planned(report, host_bytes="96MiB", form=form, chunk_tokens=chunk_tokens)
        for report, form in ((FOUND, "stored"), (there, "stored"), (there, "bf16"))
    )
    assert plain.device is not None
    assert roomy.device is not None
    assert other.device is not None
    before, after = (
        {line.item: line.bytes for line in device.lines} for device in (plain.device, roomy.device)
    )
    config = read_checkpoint("").config
    rooms = {larger: room_bytes(config, chunk_tokens, 1), "graphs": room_bytes(config, 16, 1)}
    assert min(rooms.values()) > 0
    assert {name: after[name] - before[name] for name in rooms} == rooms
    assert sum(after.values()) == sum(before.values()) + sum(rooms.values())
    assert [line.bytes for line in other.device.lines] == [*before.values()]


def test_the_sizes_that_are_told_the_engine_are_those_of_the_plan():
    plan = planned(slot_bytes="64MiB", index_bytes="32MiB", host_bytes="96MiB")
    sizes = {line.item: line.bytes for line in plan.device.lines}
    assert sizes["weights"] == 3 << 30
    assert sizes["slots"] == plan.slot_bytes <= 64 << 20
    assert plan.index_bytes <= 32 << 20
    layout = read_checkpoint("").config.layout()
    shape = PoolShape(
        layout=layout,
        chunks=plan.slot_bytes // layout.chunk_bytes,
        index_pages=plan.index_bytes // layout.index_page_bytes,
        sequence_max=16,
        length_max=8192,
        query_max=16,
    )
    pools = ("slots", "index keys", "residency")
    assert sum(sizes[name] for name in pools) == sum(pool_bytes(shape).values())
    assert plan.device.locked > plan.host_bytes // layout.host_page_bytes * layout.host_page_bytes


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"slot_bytes": "75GiB"}, r"slots 75.00 GiB.*may take 69.00 GiB.*slot_bytes decides, now"),
        ({"device_bytes": "2GiB"}, r"weights 3.00 GiB.*may take 2.00 GiB: device_bytes is 2GiB of"),
        ({"slot_bytes": "64KiB"}, r"slot_bytes is 64KiB, the least that works is"),
        ({"index_bytes": "1KiB"}, r"index_bytes is 1KiB, the least that works is"),
        ({"host_bytes": "9GiB"}, r"host_bytes is 9.00 GiB, but 8.00 GiB are free"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_numbers(given: dict[str, str], says: str):
    with pytest.raises(EssError, match=says) as caught:
        planned(**given)
    assert isinstance(caught.value, Unavailable) == ("the least" not in says)


TOO_MUCH = r"\(weights.*; it would not fit either if nothing else ran here$"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"device": "cpu", "host_bytes": "9GiB"},
            "9.00 GiB, but 8.00 GiB are free on this machine$",
        ),
        ({"device": "cpu", "host_bytes": "17GiB"}, "; it would not fit either if nothing else ran"),
        ({"host_bytes": "9GiB"}, "9.00 GiB, but 8.00 GiB are free on this machine$"),
        ({"host_bytes": "17GiB"}, "17.00 GiB, but 8.00 GiB are free .* if nothing else ran here$"),
        ({"slot_bytes": "70GiB"}, r"slots 70.00 GiB.*slot_bytes decides, now 70GiB$"),
        ({"slot_bytes": "75GiB"}, TOO_MUCH),
        ({"device_bytes": "100MiB"}, TOO_MUCH),
        ({**STAGES, **SHARED, "index_bytes": "66GiB"}, r"on cuda:1, .*index_bytes .*, now 66GiB$"),
        ({**STAGES, **SHARED, "index_bytes": "75GiB"}, TOO_MUCH),
    ],
)
def test_a_plan_that_would_not_fit_on_an_empty_machine_is_the_settings_fault(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], says: str
):
    """Nothing but a change of the settings helps then, so that a supervisor need not try again."""
    report = msgspec.structs.replace(FOUND, count=2, torch_count=2)
    monkeypatch.setattr(device_probing, "ask", lambda ordinal: report)
    monkeypatch.setattr(resolving, "memory_free", lambda: 8 * GIB)
    monkeypatch.setattr(resolving, "memory_total", lambda: 16 * GIB)
    asked = {"device": "cuda", "max_model_len": "8k", "host_bytes": "96MiB", **given}
    settings, checkpoint = resolve(asked, environment={}).settings, read_checkpoint("")
    with pytest.raises(EssError, match=says) as caught:
        launch.planned(settings, checkpoint, layout_of(settings, checkpoint))
    assert type(caught.value) is (BadInput if "would not fit" in str(caught.value) else Unavailable)


# ---- stages


def of_stages(
    founds: dict[str, DeviceReport],
    *,
    free: int = HOST,
    environment: Mapping[str, str] = MappingProxyType({}),
    **given: Any,
) -> MemoryPlan:
    flags = {**STAGES, "max_model_len": "8k", **given}
    settings = resolve(flags, environment=environment).settings
    checkpoint = read_checkpoint("")
    entries = read_entries(Path(checkpoint.path))
    layout = layout_of(settings, checkpoint)
    return plan_stages(settings, checkpoint, entries, layout, founds, free=free)


def lines_of(plan: MemoryPlan, name: str) -> list[int]:
    return [line.bytes for stage in plan.stages for line in stage.lines if line.item == name]


TWO = {"cuda:0": FOUND, "cuda:1": FOUND}
SIZES = {"host_bytes": "96MiB", "form": "f32", "max_running": 4}


def test_each_stage_has_a_plan_and_all_together_are_one_engine():
    plan = of_stages(TWO, mtp=2, **SIZES)
    first, last = plan.stages
    assert first.name.startswith("stage 0 (layers 0 to ")
    assert first.name.endswith(" on cuda:0, a GPU")
    assert " on cuda:1, " in last.name
    config = read_checkpoint("").config
    entries = read_entries(Path(read_checkpoint("").path))
    assert sum(lines_of(plan, "weights")) > kept_bytes(config, entries, "f32"), "one table more"
    keys = sum(lines_of(plan, "index keys"))
    pages = plan.index_bytes // config.layout().index_page_bytes
    maps = config.layout().group_count * pages * 64 * 4
    assert keys == pages * config.layout().key_page_bytes + maps
    assert lines_of(plan, "graphs") == lines_of(plan, "decoding") == []
    state = 512 * config.residual_dim * 4
    assert lines_of(plan, "states") == [LEAVING * state, (COMING + 1) * state]
    assert plan.rooms[-1].count > 0


def test_stages_that_share_a_device_share_its_room():
    plan = of_stages({"cuda:1": FOUND}, pp_devices="1,1", **SIZES)
    reserved = 2 * 2 * RESERVED
    assert [stage.room for stage in plan.stages] == [((70 << 30) - reserved) // 2] * 2
    assert all(" on cuda:1, " in stage.name for stage in plan.stages)


def test_a_stage_that_does_not_fit_is_refused_by_name():
    with pytest.raises(Unavailable, match=r"of stage 0 \(layers .*\) on cuda:0, a GPU \(weights"):
        of_stages(TWO, device_bytes="1MiB", **SIZES)
    with pytest.raises(Unavailable, match=r"host.s memory, of which .* are free: lower host"):
        of_stages(TWO, host_bytes="96MiB", free=97 << 20)


def test_the_stages_of_another_machine_are_planned_there():
    given = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:9"}
    [plan] = of_stages({"cuda:0": FOUND}, **given, **SIZES).stages
    assert plan.name.startswith("stage 1 (layers ")
    environment = {**TORCHRUN, "RANK": "1", "WORLD_SIZE": "2"}
    plans = of_stages(TWO, environment=environment, **SIZES).stages
    assert [plan.name[:7] for plan in plans] == ["stage 0", "stage 1"], "one of two processes here"


def test_ranks_are_told_their_devices():
    launch = Launch(model="m", config=None, length_max=2, slot_bytes=1, host_bytes=1, index_bytes=1)

    def told(**given: Any) -> list[str]:
        settings = resolve({**STAGES, **given}, environment={}).settings
        made = launches_of(settings, launch, ((0, 2), (2, 4)), 0, "10.0.0.1:9")
        return [each.rank.device for each in made]

    assert told() == ["cuda:0", "cuda:1"]
    assert told(pp_devices="3,1") == ["cuda:3", "cuda:1"]
    assert told(device="cpu", pp_devices="3,1") == ["cpu", "cpu"]
    given = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:9", "host_bytes": "1GiB"}
    assert told(device="cuda:5", **given) == ["cuda:5"]


def test_the_plans_of_stages_are_printed(capsys: pytest.CaptureFixture[str]):
    resolved = resolve(STAGES, environment={})
    banner.greet(resolved, of_stages(TWO, **SIZES), url="http://here", json=False)
    said = capsys.readouterr().out
    assert "that may be taken of stage 0 (layers" in said
    assert "that may be taken of stage 1 (layers" in said
    assert said.count("host pool") == 1


def of_graphs(**given: Any) -> int:
    """As it is planned, shown and told the engine."""
    plan = planned(host_bytes="96MiB", **given)
    assert plan.device is not None
    [line] = [line for line in plan.device.lines if line.item == "graphs"]
    settings = resolve({"device": "cuda", **given}, environment={}).settings
    told = launch_of(settings, read_checkpoint(""), plan).config
    assert line.bytes == plan.graph_bytes == told.graph_byte_max
    sizes = {line.item: line.bytes for line in plan.device.lines}
    assert told.beside_bytes == sizes["decoding"] + sizes["prompts"]
    return line.bytes


def test_graphs_have_what_they_are_estimated_to_take():
    config = read_checkpoint("").config
    sizes = {"layout": config.layout(), "length_max": 8192}
    assert of_graphs() == graph_bytes(config, query_max=16, graph_count=64, **sizes)
    assert of_graphs(max_running=64, mtp=2) == graph_bytes(
        config, query_max=128, graph_count=77, **sizes
    )
    assert of_graphs(graph_sizes="1,3", mtp=2, graphs=5) == graph_bytes(
        config, query_max=6, graph_count=5, **sizes
    )
    assert of_graphs(graph_bytes="3MiB") == 3 << 20
    assert of_graphs(graphs=0) == of_graphs(graphs=0, graph_bytes="3MiB") == 0


def test_what_comes_behind_steps_and_from_prompts_is_locked_too():
    layout = read_checkpoint("").config.layout()
    size, chunk = 200 * layout.host_page_bytes, {"chunk_tokens": 256}
    staged = staged_bytes(layout, **chunk, length_max=8192)
    with pytest.raises(Unavailable, match=r"host.s memory, of which .* are free: lower host"):
        planned(host_bytes=str(size), free=size + staged, **chunk)
    planned(host_bytes=str(size), free=size + staged + (1 << 20), **chunk)


def test_the_plan_is_printed_with_its_sums(capsys: pytest.CaptureFixture[str]):
    resolved = resolve({"device": "cuda"}, environment={})
    banner.greet(resolved, planned(host_bytes="96MiB"), url="http://here", json=False)
    said = capsys.readouterr().out
    for name in ("weights", "slots", "index keys", "residency", "decoding", "prompts", "graphs"):
        assert name in said
    assert "of 69.00 GiB that may be taken of a GPU" in said
    assert "70.00 GiB of 80.00 GiB are free" in said
    assert f"{parse_size('96MiB') >> 20}.00 MiB" in said


H200 = msgspec.structs.replace(
    FOUND, free_bytes=1398 * GIB // 10, total_bytes=1404 * GIB // 10, has_rooms=True
)


@pytest.mark.parametrize(
    ("given", "short", "long"),
    [
        ({}, 16, 16),
        ({"max_running": 64, "chunk_tokens": 8192}, 38, 8),
        ({"max_running": 128, "chunk_tokens": 8192, "mtp": 4}, 31, 7),
        ({"max_running": 128}, 45, 10),
        ({"slot_bytes": "2GiB"}, 8, 8),
        ({"index_bytes": "4GiB", "max_running": 64}, 62, 3),
        ({"device_bytes": "74%"}, 3, 1),
    ],
)
def test_index_keys_leave_room_for_slots(given: dict[str, Any], short: int, long: int):
    """A rank of eight that divide DeepSeek-V3.2's experts, on a node of 1.9 TiB: the index keys of
    all requests at their longest would take all that weights leave of an H200. Where there is no
    room for the floors of all beside the keys of the longest, slots take what is left."""
    config = make_plan(read_config("deepseek-v3.2")).config
    asked = {"device": "cuda", "dp_size": 8, "mtp": 2, "max_model_len": "128k", **given}
    settings = resolve(asked, environment={}).settings
    layout = config.layout()
    needed = DeviceNeeds(config=config, layout=layout, weight_bytes=WEIGHTS, file_bytes=WEIGHTS)
    plan = plan_on_device(settings, needed, H200, free=1900 * GIB // 8)
    rooms = {room.length: room.count for room in plan.rooms}
    assert (rooms[8192], rooms[131072]) == (short, long)
    assert plan.device is not None
    assert plan.device.taken <= plan.device.room
    if "slot_bytes" not in given:
        assert plan.device.room - plan.device.taken < GIB // 4, "room is left over"


@pytest.mark.parametrize("name", ["dots3-note", "mistral-large-4"])
def test_a_model_that_no_device_serves_is_refused_before_weights_are_loaded(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(device_probing, "ask", lambda ordinal: FOUND)
    settings = resolve({"device": "cuda", "max_model_len": "8k"}, environment={}).settings
    layout = make_plan(read_config(name)).config.layout()
    with pytest.raises(BadInput, match="has rows of several sizes: not on 'cuda' yet"):
        launch.planned(settings, read_checkpoint(""), layout)


def test_ranks_of_one_command_plan_each_for_its_own_device(monkeypatch: pytest.MonkeyPatch):
    """Of the second device others have nearly all."""
    crowded = msgspec.structs.replace(FOUND, count=2, free_bytes=2 * RESERVED + GIB)
    reports = {0: msgspec.structs.replace(crowded, free_bytes=70 * GIB), 1: crowded}
    reports = {at: msgspec.structs.replace(each, torch_count=2) for at, each in reports.items()}
    monkeypatch.setattr(device_probing, "ask", reports.get)
    given = {"device": "cuda", "dp_size": 2, "host_bytes": "4GiB", "max_model_len": "8k"}
    told = servers.divided(resolve(given, environment={}))
    plans = []
    for rank in range(2):
        place = {"dp_rank": rank, "dist_init_addr": "127.0.0.1:9", "peer_secret": SECRET}
        own = {**told_settings(told, but=servers.OF_RANK), **place}
        own |= servers.device_of(told.settings, rank)
        settings = resolve(own, environment={}).settings
        checkpoint = read_checkpoint("")
        plans.append(launch.planned(settings, checkpoint, layout_of(settings, checkpoint)))
    assert plans[0].slot_bytes > 2 * plans[1].slot_bytes > 0
    assert plans[0].length_max == plans[1].length_max == 8192
    given["slot_bytes"] = "256MiB"
    told = servers.divided(resolve(given, environment={}))
    assert told_settings(told, but=servers.OF_RANK)["slot_bytes"] == "256MiB"
