"""A calibration is a benchmark document; what is wrong with one is said by name."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from ess.bench.engine.calibrate import Times, calibrate_benchmark, fitted, line
from ess.cost import Calibration
from ess.errors import BadInput
from ess.layout import ModelLayout
from ess.models.load import load_model
from ess.overlap.calibration import DEFAULT, load, shape_of

NAMES = [field.name for field in fields(Calibration)]
LAYOUT = ModelLayout(
    name="small", layer_count=1, groups=((0,), (1,)), mtp_layer_count=1, top_k=24, head_count=4
)
SHAPE = shape_of(LAYOUT)


def rows(**misses: list[float]) -> list[dict]:
    constants = [{"name": f"calibrate: {name}", "value": at + 1.5} for at, name in enumerate(NAMES)]
    listed = [
        {
            "name": "calibrate: misses",
            "value": value,
            "config": {"context": int(context[1:]), "layer": layer},
        }
        for context, values in misses.items()
        for layer, value in enumerate(values)
    ]
    other = {"name": "roof: copy", "value": 3.0, "unit": "GB/s"}
    rate = {"name": "calibrate: bytes_per_us", "value": 900.0, "config": {"layout": SHAPE}}
    return [*constants, other, rate, *listed]


def written(folder: Path, listed: list[dict]) -> Path:
    path = folder / "calibration.json"
    machine = {"cpu": "a CPU", "cores": 2, "isa": "avx2"}
    path.write_bytes(msgspec.json.encode({"machine": machine, "rows": listed}))
    return path


def test_a_document_says_what_it_was_measured_to_say(tmp_path):
    calibration = load(written(tmp_path, rows(c1024=[1.0, 2.0], c4096=[3.0, 4.0])), LAYOUT)
    assert calibration.machine == "a CPU, 2 cores"
    assert calibration.bytes_per_us == 900.0
    assert calibration.constants == Calibration(**{name: at + 1.5 for at, name in enumerate(NAMES)})
    assert calibration.misses_at(300, 2) == calibration.misses_at(2047, 2) == (1.0, 2.0)
    assert calibration.misses_at(2049, 2) == calibration.misses_at(1 << 20, 2) == (3.0, 4.0)
    assert calibration.misses_at(1024, 1) == (1.0,), "without the MTP layer, which comes last"


def test_without_a_document_nothing_is_expected():
    assert DEFAULT.misses_at(4096, 3) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda listed: listed.pop(2), f"has no row 'calibrate: {NAMES[2]}'"),
        (lambda listed: listed.pop(-5), "has no row 'calibrate: bytes_per_us'"),
        (lambda listed: listed.pop(-3), "misses of context 1024, layer 2"),
        (lambda listed: listed[-1].pop("config"), "misses of context None, layer None"),
        (lambda listed: listed[0].update(value="fast"), "Expected `float`"),
        (lambda listed: listed[0].update(value=-1.0), "-1.0, must be at least 0"),
        (lambda listed: listed[9].update(value=0.0), "0.0, must be above 0"),
        (lambda listed: listed[9].pop("config"), "does not say with which layout"),
        (
            lambda listed: listed[9]["config"].update(layout={**SHAPE, "top_k": 2048}),
            "another model: top_k 2048, not 24",
        ),
        (lambda listed: [listed.pop() for _ in range(3)], "1 layers at context 1024, .* has 2"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, spoil, match):
    listed = rows(c1024=[1.0, 2.0, 3.0, 4.0])
    spoil(listed)
    with pytest.raises(BadInput, match=match):
        load(written(tmp_path, listed), LAYOUT)


def test_a_file_that_is_not_there_or_no_document(tmp_path):
    with pytest.raises(BadInput, match="No such file"):
        load(tmp_path / "none.json", LAYOUT)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(BadInput, match=r"bad\.json is not a file of `ess-bench calibrate"):
        load(tmp_path / "bad.json", LAYOUT)


def test_a_line_never_starts_or_falls_below_zero():
    assert line([1, 2, 4], [3.0, 5.0, 9.0]) == pytest.approx((1.0, 2.0))
    fixed, each = line([1, 2, 4], [1.0, 3.0, 8.0])
    assert fixed == 0.0
    assert each == pytest.approx((1 + 6 + 32) / 21)
    assert line([1, 2, 4], [9.0, 5.0, 4.0]) == (6.0, 0.0)


def times(queries: int, *, attend_us: float, select_us: float) -> Times:
    return Times(
        query_count=queries,
        key_count=100.0 * queries,
        pre_attn_us=10 + 2.0 * queries,
        attend_us=attend_us,
        select_us=select_us,
        bytes_per_us=1.0,
    )


def test_constants_are_differences_between_schedules():
    none = [times(q, attend_us=30.0 * q, select_us=5.0 + q) for q in (1, 2, 4)]
    da = [times(q, attend_us=30.0 * q + 7 + q, select_us=5.0 + q) for q in (1, 2, 4)]
    dba = [times(q, attend_us=30.0 * q + 7 + q, select_us=11.0 + q) for q in (1, 2, 4)]
    constants = fitted(none, da, dba)
    expected = Calibration(
        pre_attn_fixed_us=10.0,
        pre_attn_query_us=2.0,
        attend_query_us=30.0,
        index_fixed_us=5.0,
        index_key_us=0.01,
        split_fixed_us=7.0,
        split_query_us=1.0,
        index_split_us=6.0,
    )
    for name in NAMES:
        assert getattr(constants, name) == pytest.approx(getattr(expected, name)), name


@pytest.mark.slow
def test_what_the_benchmark_measures_is_what_the_policy_reads(tmp_path):
    measured = calibrate_benchmark(smoke=True)
    layout = load_model().config.layout()
    calibration = load(written(tmp_path, [msgspec.to_builtins(row) for row in measured]), layout)
    [misses] = calibration.misses.values()
    assert len(misses) == layout.layer_total
    assert min(misses) > 0
    assert calibration.bytes_per_us > 10
    assert calibration.constants.attend_query_us > 1
