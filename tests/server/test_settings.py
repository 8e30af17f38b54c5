"""Where settings come from, how they are refused, and what they make of the machine's memory."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ess.config import Setting, settings_of
from ess.engine.config import ProcessConfig
from ess.engine.devices import DEFAULTS
from ess.engine.process.messages import Launch
from ess.errors import BadInput, EssError, PoolFull, Unavailable
from ess.free_resources import memory_free
from ess.layout import ModelLayout
from ess.server.commands import cli
from ess.server.commands.serve import COMMON, shown_default
from ess.server.commands.start import begin, launch, resolving
from ess.server.commands.start.compat import compat_answers as theirs
from ess.server.commands.start.compat.compat_flags import (
    FLAGS,
    SAME,
    VALUES,
    check_foreign,
)
from ess.server.commands.start.files.checkpoint import read_checkpoint
from ess.server.commands.start.settings import FIELDS, SECTIONS, Settings, resolve
from ess.server.commands.start.sizing import plan_memory, size_of

ROOT = Path(__file__).resolve().parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_a_flag_beats_the_environment_which_beats_the_file(tmp_path: Path):
    config = written(tmp_path, 'port = 1\nmax-running = 2\nhost = "127.0.0.2"\nwarm = false\n')
    environment = {"ESS_PORT": "2", "ESS_MAX_RUNNING": "3", "HOME": "x", "ESS_VERIFY_EVERY": "7"}
    settled = resolve({"port": 3, "host": None}, config=config, environment=environment)
    assert settled.settings.port == 3
    assert settled.settings.max_running == 3
    assert settled.settings.host == "127.0.0.2"
    assert settled.settings.warm is False
    assert settled.settings.verify_every == 7
    origins = settled.origins
    assert [origins[n] for n in ("port", "max_running", "host", "mtp")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]


def test_threads_leave_a_core_of_those_that_the_server_may_use(monkeypatch: pytest.MonkeyPatch):
    checkpoint = read_checkpoint("ess-embedded")
    for cores, pp_size, threads in ((1, 1, 1), (2, 1, 1), (9, 1, 8), (9, 2, 4)):
        monkeypatch.setattr(resolving, "cores_free", lambda cores=cores: cores)
        given = {"pp_size": pp_size}
        assert (
            launch.derived(resolve(given, environment={}), checkpoint).settings.threads == threads
        )
    given = {"threads": 3}
    assert launch.derived(resolve(given, environment={}), checkpoint).settings.threads == 3


def test_a_setting_may_be_a_word_or_a_number():
    for given, read in (("8", 8), ("auto", "auto")):
        assert resolve({}, environment={"ESS_TBO": given}).settings.tbo == read
        assert resolve({"tbo": given}, environment={}).settings.tbo == read
    with pytest.raises(BadInput, match="tbo from flag is 'some'"):
        resolve({"tbo": "some"}, environment={})


def told(*words: str, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """What `ess serve` with these words on its command line would tell the engine process."""
    flags: dict[str, object] = {}
    monkeypatch.setattr(begin, "serve_flags", lambda given, **_: flags.update(given))
    assert cli.main(["serve", *words]) == 0
    settled = resolve(flags, environment={"ESS_PEER_SECRET": "sixteen bytes are enough"})
    message = launch.launch_of(settled.settings, read_checkpoint(""), planned(max_model_len="2k"))
    return msgspec.json.decode(msgspec.json.encode(message), type=Launch)


@functools.cache
def told_before(*words: str) -> Launch:
    """The same, made once: most settings need the same words, or none."""
    with pytest.MonkeyPatch.context() as patch:
        return told(*words, monkeypatch=patch)


STAGES = ("--role", "prefill", "--pp-size", "2")
NODES = (*STAGES, "--dist-init-addr", "10.0.0.1:5", "--host-bytes", "1GiB")
NEEDS = {
    "pp_size": STAGES[:2],
    "tp_size": STAGES[:2],
    "cp_size": STAGES[:2],
    "dynamic_chunking": STAGES[:2],
    "pp_layer_partition": STAGES,
    "pp_devices": (*STAGES, "--device", "cuda"),
    "redundant_experts": ("--dp-size", "2"),
    "expert_load": ("--dp-size", "2"),
    "record_expert_load": ("--dp-size", "2"),
    "nnodes": NODES,
    "node_rank": (*NODES, "--nnodes", "2"),
}
OTHERS = {
    "device": "cuda:1",
    "smooth": 0.5,
    "graph_sizes": "1,2",
    "dist_init_addr": "10.0.0.1:5",
    "pp_layer_partition": "3,4",
    "pp_devices": "1,0",
}


def other_than_default(known: Setting) -> tuple[list[str], object]:
    """The words of a flag, and what they set."""
    if known.type is bool:
        return [f"--no-{known.flag[2:]}" if known.default else known.flag], not known.default
    if known.choices and known.choices != (known.default,):
        value = next(choice for choice in known.choices if choice != known.default)
        return [known.flag, value], value
    number = 1 if known.choices else known.default
    value = "a file" if known.type is str else number + 1
    value = OTHERS.get(known.name, value)
    return [known.flag, str(value)], value


@pytest.mark.parametrize("known", settings_of(ProcessConfig).values(), ids=lambda known: known.name)
def test_every_setting_of_the_engine_reaches_its_process(
    known: Setting, monkeypatch: pytest.MonkeyPatch
):
    """From its definition alone: a flag, a value of its type, a field of the launch message."""
    words, value = other_than_default(known)
    needed = NEEDS.get(known.name, ())
    config = told(*needed, *words, monkeypatch=monkeypatch).config
    plain = told_before(*needed).config
    brought = DEFAULTS if known.name == "device" else {}
    changed = {**brought, known.name: value, "query_max": config.query_max}
    assert config == replace(plain, **changed)
    assert config != plain


def test_every_setting_has_a_section_a_help_and_is_shown():
    assert set(FIELDS) == set(settings_of(Settings)) == set(resolve({}, environment={}).shown())
    assert all(known.help.endswith(".") for known in FIELDS.values())
    assert set(FLAGS) | set(VALUES) | {name for name, _ in SAME.values()} <= set(FIELDS)


def test_the_help_begins_with_what_most_set_and_names_each_flag_once(
    capsys: pytest.CaptureFixture[str],
):
    assert cli.main(["serve", "--help"]) == 0
    said = capsys.readouterr().out
    shown = re.findall(r"^\W (--[\w-]+)", said.partition("Common")[2], re.MULTILINE)
    flags = {name: known.flag for name, known in FIELDS.items()}
    assert set(shown[: len(COMMON)]) == {flags[name] for name in COMMON}
    assert sorted(shown) == sorted({*flags.values()} - {"--model", "--register-key"})
    for other in (flag for others in FLAGS.values() for flag in others):
        assert other in said, f"{other} is accepted and not in the help"


def row_of(known: Setting) -> str:
    """A row of docs/serving.md: ours, then what vLLM and SGLang call it."""
    others = [f"`{flag}`" for flag in FLAGS.get(known.name, ())]
    others += [f"`{value}` for {ours}" for value, ours in VALUES.get(known.name, {}).items()]
    others += [
        f"`{variable}`" + (f" in {form[2:]}" if form != "{}" else "")
        for variable, (name, form) in SAME.items()
        if name == known.name
    ]
    flag = "MODEL" if known.name == "model" else known.flag
    allowed = f" ({known.allowed})" if known.allowed else ""
    return f"| `{flag}` | {shown_default(known)} | {known.help}{allowed} | {', '.join(others)} |"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_document_has_every_setting(section: str):
    listed = [row_of(known) for known in FIELDS.values() if known.section == section]
    head = [f"| {section} | default | | elsewhere |", "|---|---|---|---|"]
    table = "\n".join([*head, *listed]) + "\n\n"
    assert table in (ROOT / "docs" / "serving.md").read_text(), f"write into it:\n{table}"


def test_every_flag_of_theirs_says_what_becomes_of_it():
    others = [other for flags in theirs.ALSO.values() for other in flags]
    assert sorted([*theirs.ANSWERED, *others]) == sorted(theirs.ANSWER_OF), "two answers"
    assert {*theirs.ALSO, *theirs.AS_DONE} <= {*theirs.ANSWERED}
    kinds = [*theirs.SWITCHES, *theirs.WHOLE, *theirs.NUMBERS]
    assert {*kinds, *theirs.NAMES} <= {*theirs.ANSWER_OF}
    assert len({*kinds}) == len(kinds), "two kinds"
    assert len(check_foreign({"enable_metrics": True, "swap_space": 4.0})) == 2
    assert check_foreign({"enable_metrics": False, "page_size": 64}) == []


@pytest.mark.parametrize(
    ("variable", "given", "name", "value"),
    [
        ("VLLM_API_KEY", "k", "api_key", "k"),
        ("VLLM_BATCH_INVARIANT", "1", "deterministic", True),
        ("SGLANG_ENABLE_DETERMINISTIC_INFERENCE", "true", "deterministic", True),
        ("VLLM_ENGINE_ITERATION_TIMEOUT_S", "60", "watchdog_s", 60.0),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5", "idle_s", 5.0),
        ("SGLANG_TIMEOUT_KEEP_ALIVE", "6", "idle_s", 6.0),
        ("VLLM_CPU_KVCACHE_SPACE", "40", "host_bytes", "40GiB"),
    ],
)
def test_a_variable_of_theirs_sets_ours(variable: str, given: str, name: str, value: object):
    assert variable in SAME
    settled = resolve({}, environment={variable: given})
    assert getattr(settled.settings, name) == value
    assert (settled.origins[name], settled.notes) == ("environment", ())
    assert getattr(resolve({}, environment={variable: ""}).settings, name) != value
    ours = {variable: given, f"ESS_{name.upper()}": "0" if value is True else "77"}
    assert getattr(resolve({}, environment=ours).settings, name) != value


def test_a_variable_of_theirs_that_sets_nothing_is_named():
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "SGLANG_PP_LAYER_PARTITION": "15,15,15,16",
        "VLLM_NO_USAGE_STATS": "1",
        "HOME": "x",
    }
    assert resolve({}, environment=environment).notes == (
        "the variable VLLM_WORKER_MULTIPROC_METHOD has no effect: nothing here has that name",
        "pp_layer_partition from environment has no effect: there is one stage",
    )
    pair = {"VLLM_BATCH_INVARIANT": "1", "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0"}
    with pytest.raises(BadInput, match="VLLM_BATCH_INVARIANT and another variable give"):
        resolve({}, environment=pair)


def test_a_value_of_theirs_is_read():
    settled = resolve({"form": "bfloat16", "row": "fp8_ds_mla"}, environment={"ESS_ROW": "auto"})
    assert (settled.settings.form, settled.settings.row) == ("bf16", "fp8")
    assert resolve({"form": "float32"}, environment={}).settings.form == "f32"
    with pytest.raises(BadInput, match=r"form \(--dtype\) from flag is 'float16'"):
        resolve({"form": "float16"}, environment={})


def test_a_cluster_s_own_variables_are_no_settings():
    """Kubernetes sets such variables in every container for a service named ess or vllm."""
    environment = {
        "ESS_PORT": "tcp://10.0.0.1:8000",
        "ESS_PORT_8000_TCP_ADDR": "10.0.0.1",
        "ESS_SERVICE_HOST": "10.0.0.1",
        "ESS_SERVICE_PORT_HTTP": "8000",
        "VLLM_PORT": "tcp://10.0.0.2:8000",
        "VLLM_SERVICE_PORT": "8000",
    }
    settled = resolve({}, environment=environment)
    assert (settled.settings.port, settled.origins["port"], settled.notes) == (8000, "default", ())


def test_a_key_is_never_shown():
    settled = resolve({"api_key": "hushed"}, environment={})
    assert settled.shown()["api_key"] == {"value": "set", "from": "flag"}
    assert "hushed" not in repr(settled.shown())
    assert settled.settings.keys == ("hushed",)
    several = resolve({"api_key": " a, b ,"}, environment={})
    assert several.settings.keys == ("a", "b")


@pytest.mark.parametrize(
    ("text", "environment", "says"),
    [
        ("prot = 1", {}, "unknown key 'prot'; did you mean 'port'"),
        ("zzzzzz = 1", {}, "'zzzzzz'; `ess serve --help` lists all"),
        ("port = ", {}, "not TOML"),
        ("port = 'x'", {}, "port from file is 'x'"),
        ("port = 1.5", {}, "port from file is 1.5"),
        ("api-key = ['secret']", {}, "api_key from file is no text"),
        ("", {"ESS_MAX_RUNING": "1"}, "did you mean 'ESS_MAX_RUNNING'"),
        ("", {"ESS_PORT": "many"}, "port from environment is 'many'"),
        ("", {"ESS_MTP": "9"}, "mtp is 9, must be 1..8"),
        ("", {"ESS_DEPTH": "2"}, "depth is 2, must be 0..1"),
        ("", {"ESS_TBO": "0"}, "tbo is 0, must be off, on, auto, 1..1048576"),
        ("tls-cert = 'x'", {}, "given together"),
        ("metrics-compat = 'vllm,x'", {}, "['x']"),
        ("modes = 'all'", {}, "modes from file is 'all'"),
        ("[serve]\nport = 1", {}, "has the table [serve]: settings stand at the top level"),
        ("form = 'float16'", {}, "form (--dtype) from file is 'float16': must be bf16, f32"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str, environment: dict, says: str):
    with pytest.raises(BadInput) as caught:
        resolve({}, config=written(tmp_path, text), environment=environment)
    assert says in str(caught.value)


def test_a_missing_file_is_said(tmp_path: Path):
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        resolve({}, config=tmp_path / "none.toml", environment={})


def test_a_size_is_in_bytes_or_a_share():
    assert size_of("1.5GiB", of=1) == 3 << 29
    assert size_of("25%", of=1 << 20) == 1 << 18
    for wrong in ("0%", "101%", "x%"):
        with pytest.raises(BadInput, match="share"):
            size_of(wrong, of=1)


def test_deterministic_names_what_it_excludes():
    assert resolve({"deterministic": True, "modes": "none"}, environment={})
    for name, value in (
        ("modes", "da"),
        ("modes", "resident"),
        ("sbo", "combine-down"),
        ("tbo", "on"),
        ("tbo", 8),
    ):
        with pytest.raises(BadInput, match=f"deterministic .*{name}.* is {value!r}$"):
            resolve({"deterministic": True, name: value}, environment={})


def test_a_calibration_needs_modes_that_it_can_start():
    for changed, why in (({"modes": "da"}, "modes is 'da'"), ({"deterministic": True}, "is set")):
        with pytest.raises(BadInput, match=f"calibration is where layerwise.* {why}"):
            resolve({"calibration": "x", **changed}, environment={})


def test_a_file_may_be_json(tmp_path: Path):
    path = tmp_path / "serve.json"
    path.write_text('{"max-running": 3, "modes": ["none", "da"]}')
    settled = resolve({}, config=path, environment={})
    assert (settled.settings.max_running, settled.settings.modes) == (3, ["none", "da"])
    assert settled.origins["max_running"] == "file"
    path.write_text("[1]")
    with pytest.raises(BadInput, match="not a table of settings"):
        resolve({}, config=path, environment={})
    path.write_text("port = 1")
    with pytest.raises(BadInput, match="is not JSON"):
        resolve({}, config=path, environment={})


def test_what_the_checkpoint_decides_is_named_so():
    checkpoint = read_checkpoint("")
    settled = launch.derived(resolve({}, environment={}), checkpoint)
    assert (settled.settings.mtp, settled.origins["mtp"]) == (2, "derived")
    kept = launch.derived(resolve({"mtp": 1}, environment={}), checkpoint)
    assert (kept.settings.mtp, kept.origins["mtp"]) == (1, "flag")
    unable = msgspec.structs.replace(checkpoint.config, mtp_layer_count=0)
    plain = msgspec.structs.replace(checkpoint, config=unable)
    assert launch.derived(resolve({}, environment={}), plain).origins["mtp"] == "default"


LAYOUT = ModelLayout.embedded()


def planned(*, free: int | None = None, **changed: object):
    settings = resolve(changed, environment={}).settings
    return plan_memory(settings, LAYOUT, positions_max=131072, weight_bytes=1 << 20, free=free)


def test_the_plan_says_how_many_fit_and_why_no_more():
    plan = planned(max_model_len="2k", host_bytes="64MiB", max_running=100)
    pages = (64 << 20) // LAYOUT.host_page_bytes
    assert plan.token_capacity == pages * 64
    [room] = plan.rooms
    assert (room.count, room.limiter) == (pages // 32, "host_bytes")
    assert planned(max_model_len="2k", max_running=3).rooms[0].limiter == "max_running"
    tight = planned(max_model_len="2k", max_running=40, slot_bytes="40MiB")
    assert (tight.rooms[0].count, tight.rooms[0].limiter) == (8, "slot_bytes")
    narrow = planned(max_model_len="2k", index_bytes="16MiB")
    assert narrow.rooms[0].limiter == "index_bytes"


@pytest.mark.parametrize("asked", [{}, {"max_running": 40}, {"max_model_len": "700"}])
def test_the_pools_hold_what_the_plan_says(asked: dict):
    """The real pools, with the plan's bytes: so many requests open, and not one more."""
    from ess.door import Offload

    asked = {"max_model_len": "2k", "host_bytes": "64MiB", **asked}
    plan = planned(**asked)
    room = plan.rooms[-1]
    offload = Offload.create(
        LAYOUT,
        slot_bytes=plan.slot_bytes,
        host_bytes=plan.host_bytes,
        index_bytes=plan.index_bytes,
        length_max=plan.length_max,
        sequence_max=asked.get("max_running", 16),
    )
    with offload:
        for number in range(room.count):
            offload.open([number], length_max=room.length)
        with pytest.raises(PoolFull) as caught:
            offload.open([0], length_max=room.length)
    expected = {"host_bytes": "host pages", "max_running": "sequences", "slot_bytes": "slots"}
    assert caught.value.limiter == expected[room.limiter]


def test_an_impossible_length_is_refused():
    with pytest.raises(BadInput, match="is 262,144, must be 2 to 131,072 for this model"):
        planned(max_model_len="256k")
    with pytest.raises(BadInput, match="less than one page"):
        planned(host_bytes="1KiB")


@pytest.mark.parametrize(
    ("given", "environment", "says"),
    [
        ({"api_key": ""}, {}, "api_key from flag is empty"),
        ({}, {"ESS_API_KEY": ""}, "api_key from environment is empty"),
        ({"api_key": " , "}, {}, "api_key has no key in it"),
        ({"api_key": "secret\n1"}, {}, "not visible ASCII"),
        ({"api_key": "secret", "without_key": True}, {}, "not both"),
        ({"host": "0.0.0.0"}, {}, "--without-key to serve everybody"),
        ({"host": "::"}, {"VLLM_API_KEY": ""}, "--without-key to serve everybody"),
        ({"api_key": "secret", "api_key_file": "x"}, {}, "both given"),
        ({"api_key_file": "/no/file"}, {}, "api_key_file /no/file cannot be read: No such file"),
    ],
)
def test_a_server_is_open_only_if_that_was_asked_for(given: dict, environment: dict, says: str):
    with pytest.raises(BadInput) as caught:
        resolve(given, environment=environment)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


def test_an_address_of_this_machine_needs_no_key():
    for host in ("127.0.0.1", "::1", "localhost"):
        assert resolve({"host": host}, environment={}).settings.keys == ()
    assert resolve({"host": "0.0.0.0", "without_key": True}, environment={})
    assert resolve({"host": "0.0.0.0", "api_key": "k"}, environment={})


def test_keys_from_a_file_are_as_secret(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("hushed-1\n hushed-2 \n\n")
    settled = resolve({"host": "0.0.0.0", "api_key_file": str(path)}, environment={})
    assert settled.settings.keys == ("hushed-1", "hushed-2")
    assert settled.shown()["api_key"] == {"value": "set", "from": "flag"}
    assert "hushed" not in repr(settled)
    for wrong in (b"", b"\n", b"\xff\xfe", b"good\nh\xc3\xbcshed"):
        path.write_bytes(wrong)
        with pytest.raises(BadInput, match=r"keys (has no key|is not text|has a character that)"):
            resolve({"api_key_file": str(path)}, environment={})


def test_a_login_in_an_address_is_not_shown():
    settled = resolve({"otlp_endpoint": "http://me:secret@box:4318/v1/traces"}, environment={})
    assert settled.shown()["otlp_endpoint"]["value"] == "http://...@box:4318/v1/traces"


GIB = 1 << 30


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"host_bytes": "10TiB"}, "host_bytes is 10.00 TiB, but 23.50 GiB are free"),
        ({"slot_bytes": "24GiB"}, "slot_bytes is 24.00 GiB, but 23.50 GiB are free"),
        ({"max_running": 4096, "max_model_len": "128k"}, "lower max_running, now 4,096, or max_mo"),
        ({"host_bytes": "23GiB", "max_running": 1}, "lower host_bytes, now 23GiB"),
        ({"slot_bytes": "1MiB"}, "slot_bytes is 1.00 MiB: not one request of 2,048 tokens fits"),
        ({"index_bytes": "64KiB"}, "index_bytes is 64.00 KiB: not one request of 2,048"),
    ],
)
def test_a_plan_that_the_machine_cannot_hold_is_refused(asked: dict, says: str):
    with pytest.raises(EssError) as caught:
        planned(free=47 * GIB // 2, **{"max_model_len": "2k", **asked})
    assert says in str(caught.value)
    assert isinstance(caught.value, Unavailable) == ("not one request" not in says)


@pytest.mark.parametrize("name", ["slot_bytes", "index_bytes"])
def test_the_least_that_is_named_is_enough(name: str):
    asked = {"max_model_len": "2k", "max_running": 1}
    with pytest.raises(BadInput) as caught:
        planned(**asked, **{name: "64KiB"})
    least = str(caught.value).split("give ")[1].split(",")[0]
    assert planned(**asked, **{name: least}).rooms[-1].count == 1


def test_free_memory_is_what_machine_and_group_leave(tmp_path: Path):
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 4194304 kB\n")
    assert memory_free(tmp_path) == 4 * GIB
    group = "sys/fs/cgroup/memory"
    for limit, use in (("max", "current"), ("limit_in_bytes", "usage_in_bytes")):
        folder = f"{group}." if limit == "max" else f"{group}/memory."
        write(f"{folder}{use}", f"{GIB}\n")
        write(f"{folder}stat", f"anon 7\ninactive_file {GIB // 2}\n")
        write(f"{folder}{limit}", f"{2 * GIB}\n")
        assert memory_free(tmp_path) == 3 * GIB // 2
        write(f"{folder}{limit}", "max\n" if limit == "max" else f"{1 << 62}\n")
        assert memory_free(tmp_path) == 4 * GIB
