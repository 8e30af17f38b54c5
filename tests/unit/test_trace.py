"""Traces: what is written is read back; what is damaged is refused, never misread."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ess.errors import BadInput, BadState
from ess.trace import RequestStep, TraceHeader, TraceReader, TraceStep, TraceWriter, form, varints

Steps = list[tuple[int, tuple[RequestStep, ...], list[np.ndarray]]]
LONG = (pytest.mark.slow, pytest.mark.long)


def make_header(**changes: object) -> TraceHeader:
    settled = {"layout": "ess-embedded", "group_count": 2, "top_k": 8, "mtp": 2, "context": 1000}
    return TraceHeader(**(settled | changes))


def make_steps(rng: np.random.Generator, header: TraceHeader, count: int) -> Steps:
    steps = []
    for number in range(count):
        requests = tuple(make_request(rng, header, each) for each in range(int(rng.integers(0, 4))))
        query_count = sum(entry.query_count for entry in requests)
        groups = [make_selection(rng, header, query_count) for _ in range(header.group_count)]
        steps.append((3 * number, requests, groups))
    return steps


def make_request(rng: np.random.Generator, header: TraceHeader, request: int) -> RequestStep:
    query_count = int(rng.integers(0, header.mtp + 1))
    accepted = int(rng.integers(0, query_count + 1))
    length = int(rng.integers(0, header.context - query_count + 1))
    return RequestStep(request=request, length=length, query_count=query_count, accepted=accepted)


def make_selection(rng: np.random.Generator, header: TraceHeader, query_count: int) -> np.ndarray:
    selection = np.full((query_count, header.top_k), -1, dtype=np.int32)
    for row in selection:
        drawn = np.unique(rng.integers(0, header.context, size=rng.integers(0, header.top_k + 1)))
        row[: len(drawn)] = drawn
    return selection


def write_steps(writer: TraceWriter, steps: Steps) -> None:
    for number, requests, groups in steps:
        for group, selection in enumerate(groups):
            writer.write_group(group, selection)
        writer.commit_step(number, requests)


def write(path: Path, header: TraceHeader, steps: Steps) -> Path:
    with TraceWriter(path, header=header) as writer:
        write_steps(writer, steps)
    return path


def same(step: TraceStep, written: tuple) -> bool:
    number, requests, groups = written
    return (step.number, step.requests) == (number, requests) and all(
        np.array_equal(step.selection(group), selection) for group, selection in enumerate(groups)
    )


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Steps]:
    header = make_header(metadata={"model": "tiny", "seed": 7, "share": 0.5, "sparse": True})
    steps = make_steps(np.random.default_rng(1), header, 5)
    return write(tmp_path / "small.trace", header, steps), steps


@example([128])
@example([0, (1 << 63) - 1, (1 << 56) - 1])
@given(st.lists(st.integers(0, (1 << 63) - 1) | st.integers(0, 300), max_size=60))
def test_varints_round_trip(values: list[int]) -> None:
    stream = varints.encode(values)
    assert varints.decode(stream, count_max=len(values)).tolist() == values
    assert len(stream) == sum(max(1, -(-value.bit_length() // 7)) for value in values)


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (b"\x80", "cut off"),
        (b"\x01\xff", "cut off"),
        (b"\x80\x00", "padded with a zero byte"),
        (b"\xff" * 9 + b"\x01", "takes 10 bytes"),
        (b"\x01\x01\x01", "at most 2"),
    ],
)
def test_varints_refuse_what_nobody_writes(stream: bytes, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        varints.decode(stream, count_max=2)


@settings(deadline=None, max_examples=60)
@given(drawn=st.data())
def test_what_is_written_is_read(
    drawn: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    header = make_header(
        group_count=drawn.draw(st.integers(1, 4)),
        top_k=drawn.draw(st.integers(1, 40)),
        mtp=drawn.draw(st.integers(1, 4)),
        context=drawn.draw(st.sampled_from([4, 64, 5000, (1 << 31) - 1])),
    )
    rng = np.random.default_rng(drawn.draw(st.integers(0, 1 << 32)))
    steps = make_steps(rng, header, drawn.draw(st.integers(0, 5)))
    path = write(tmp_path_factory.mktemp("trace") / "x.trace", header, steps)
    for recover in (False, True):
        with TraceReader(path, recover=recover) as reader:
            assert (reader.header, len(reader), reader.dropped_bytes) == (header, len(steps), 0)
            assert all(same(step, written) for step, written in zip(reader, steps, strict=True))


def test_any_step_in_any_order(small: tuple[Path, Steps]) -> None:
    path, steps = small
    with TraceReader(path) as reader:
        for place in (4, 0, 2, 2, 3, 1):
            assert same(reader.step(place), steps[place])
        for place in (-1, 5):
            with pytest.raises(BadInput, match=r"outside 0\.\.4"):
                reader.step(place)
        with pytest.raises(BadInput, match=r"group 2 is outside 0\.\.1$"):
            reader.step(0).selection(2)
        step = reader.step(0)
    with pytest.raises(BadState, match="is closed"):
        step.selection(0)


def test_int64_selections_and_fewer_columns_than_top_k(tmp_path: Path) -> None:
    request = RequestStep(request=5, length=20, query_count=2, accepted=1)
    selection = np.array([[3, 9, -1], [0, 1, 999]], dtype=np.int64)
    with TraceWriter(tmp_path / "x", header=make_header(group_count=1)) as writer:
        writer.write_group(0, selection[:, ::1])
        writer.commit_step(8, [request])
    with TraceReader(tmp_path / "x") as reader:
        read = reader.step(0).selection(0)
    assert read.dtype == np.int32
    assert read.tolist() == [[3, 9, *[-1] * 6], [0, 1, 999, *[-1] * 5]]


@pytest.mark.parametrize(
    ("selection", "says"),
    [
        ([[5, 5, -1]], "query 0: 5 follows 5 in column 1"),
        ([[1, 2, 3], [7, 6, 8]], "query 1: 6 follows 7 in column 1"),
        ([[1, -1, 3]], "3 follows -1"),
        ([[1, 1000, -1]], r"leave -1\.\.999"),
        ([[-2, 1, 2]], "positions -2"),
        ([[0] * 9], "more than the top_k 8"),
        ([1, 2], "not int64 of shape"),
        ([[1.0, 2.0]], "not float64"),
    ],
)
def test_a_wrong_selection_changes_nothing(tmp_path: Path, selection: object, says: str) -> None:
    good = np.array([[1, 2, 4]])
    request = RequestStep(request=0, length=5, query_count=1, accepted=0)
    with TraceWriter(tmp_path / "x", header=make_header(group_count=1)) as writer:
        with pytest.raises(BadInput, match=says):
            writer.write_group(0, np.array(selection))
        writer.write_group(0, good)
        writer.commit_step(0, [request])
    with TraceReader(tmp_path / "x") as reader:
        assert reader.step(0).selection(0)[0, :3].tolist() == [1, 2, 4]


def test_too_many_values_are_refused_before_they_are_touched(tmp_path: Path) -> None:
    wide = np.broadcast_to(np.int32(-1), (1 << 14, 1 << 11))
    with (
        TraceWriter(tmp_path / "x", header=make_header(top_k=1 << 11)) as writer,
        pytest.raises(BadInput, match="exceed 16777216 values"),
    ):
        writer.write_group(0, wide)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"query_count": 3}, "mtp 2"),
        ({"accepted": 2}, "accepted"),
        ({"length": 1000}, "context 1000"),
        ({"request": -1}, "request=-1"),
        ({"request": 1 << 63}, "request=9223372036854775808"),
        ({"query_count": 2}, "requests with 2 queries, groups with 1"),
    ],
)
def test_wrong_requests_are_refused(tmp_path: Path, changes: dict[str, int], says: str) -> None:
    request = {"request": 0, "length": 5, "query_count": 1, "accepted": 0}
    with TraceWriter(tmp_path / "x", header=make_header(group_count=1)) as writer:
        writer.write_group(0, np.array([[1]]))
        with pytest.raises(BadInput, match=says):
            writer.commit_step(0, [RequestStep(**(request | changes))])
        writer.commit_step(0, [RequestStep(**request)])
        assert writer.step_count == 1


def test_calls_out_of_order_are_refused(tmp_path: Path) -> None:
    one = np.array([[1]])
    request = RequestStep(request=0, length=5, query_count=1, accepted=0)
    writer = TraceWriter(tmp_path / "x", header=make_header())
    with pytest.raises(BadInput, match="exists"):
        TraceWriter(tmp_path / "x", header=make_header())
    with pytest.raises(BadState, match="0 of 2 groups"):
        writer.commit_step(0, [])
    with pytest.raises(BadInput, match="group 1 cannot come now"):
        writer.write_group(1, one)
    writer.write_group(0, one)
    with pytest.raises(BadInput, match="2 queries, the first group had 1"):
        writer.write_group(1, np.array([[1], [2]]))
    writer.write_group(1, one)
    with pytest.raises(BadInput, match="group 2 cannot come now"):
        writer.write_group(2, one)
    writer.commit_step(4, [request])
    writer.write_group(0, one)
    writer.write_group(1, one)
    for number in (4, 3, 1 << 63):
        with pytest.raises(BadInput, match=f"step {number} does not follow step 4"):
            writer.commit_step(number, [request])
    with pytest.raises(BadState, match="2 groups of a step never committed"):
        writer.close()
    writer.close()
    with pytest.raises(BadState, match="closed after 1 steps"):
        writer.write_group(0, one)
    with TraceReader(tmp_path / "x") as reader:
        assert [step.number for step in reader] == [4]


def test_an_exception_keeps_the_whole_steps(tmp_path: Path) -> None:
    def record() -> None:
        with TraceWriter(tmp_path / "x", header=make_header(group_count=1)) as writer:
            writer.write_group(0, np.zeros((0, 8), dtype=np.int32))
            writer.commit_step(0, [])
            writer.write_group(0, np.zeros((0, 8), dtype=np.int32))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record()
    with TraceReader(tmp_path / "x") as reader:
        assert len(reader) == 1


@pytest.mark.parametrize("field", ["group_count", "top_k", "mtp", "context"])
@pytest.mark.parametrize("value", [0, -1, 1 << 31])
def test_a_header_names_what_is_out_of_range(field: str, value: int) -> None:
    with pytest.raises(BadInput, match=f"{field} is {value}, must be in 1"):
        make_header(**{field: value})


def test_a_header_too_large_leaves_no_file(tmp_path: Path) -> None:
    room = form.HEADER_BYTES_MAX - len(form.encode_preamble(make_header(metadata={"x": ""}))[0])
    fits = "y" * (room + form.PREAMBLE.size - 4)
    with TraceWriter(tmp_path / "fits", header=make_header(metadata={"x": fits})):
        pass
    with TraceReader(tmp_path / "fits") as reader:
        assert reader.header.metadata == {"x": fits}
    with pytest.raises(BadInput, match="takes 1048577 bytes, at most 1048576"):
        TraceWriter(tmp_path / "x", header=make_header(metadata={"x": fits + "y"}))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("value", [{"deep": 1}, [1], None, 1 << 70, object()])
def test_metadata_that_could_not_be_read_back(tmp_path: Path, value: object) -> None:
    with pytest.raises(BadInput, match="header"):
        TraceWriter(tmp_path / "x", header=make_header(metadata={"x": value}))
    assert not (tmp_path / "x").exists()


def test_a_full_disk_leaves_a_recoverable_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk:
        closed = False

        def __init__(self, file: object, room: int) -> None:
            self.file, self.room = file, room

        def write(self, piece: memoryview) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            taken = self.file.write(piece[: min(7, self.room)])
            self.room -= taken
            return taken

        def close(self) -> None:
            self.closed = True
            self.file.close()

    header = make_header()
    steps = make_steps(np.random.default_rng(3), header, 6)
    whole = write(tmp_path / "whole", header, steps).read_bytes()
    writer = TraceWriter(tmp_path / "x", header=header)
    monkeypatch.setattr(writer, "_file", FullDisk(writer._file, len(whole) // 2))
    with pytest.raises(OSError, match="No space left"):
        write_steps(writer, steps)
    with pytest.raises(BadState, match="is closed"):
        writer.write_group(0, steps[0][2][0])
    writer.close()
    with TraceReader(tmp_path / "x", recover=True) as reader:
        assert len(reader) == writer.step_count < len(steps)
        assert all(same(step, written) for step, written in zip(reader, steps, strict=False))


def test_every_length_of_a_torn_file_recovers_its_whole_steps(
    small: tuple[Path, Steps], tmp_path: Path
) -> None:
    path, steps = small
    raw = path.read_bytes()
    with TraceReader(path) as reader:
        ends = [int(end) for end in reader._offsets]
    for size in range(0, len(raw), 3):
        torn = tmp_path / "torn"
        torn.write_bytes(raw[:size])
        with pytest.raises(BadInput):
            TraceReader(torn)
        if size < ends[0]:
            with pytest.raises(BadInput):
                TraceReader(torn, recover=True)
            continue
        with TraceReader(torn, recover=True) as reader:
            whole = sum(end <= size for end in ends[1:])
            assert (len(reader), reader.dropped_bytes) == (whole, size - ends[whole])
            assert all(same(step, written) for step, written in zip(reader, steps, strict=False))


def foreign(raw: bytes, version: int) -> bytes:
    return raw[:8] + version.to_bytes(4, "little") + raw[12:]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda raw: b"", "not an ESS trace"),
        (lambda raw: b"PK" + raw[2:], "not an ESS trace"),
        (lambda raw: raw[:15], "not an ESS trace"),
        (lambda raw: foreign(raw, 3), "version 3 of the format; this ESS reads 1 and 2"),
        (lambda raw: raw[:12] + b"\xff\xff\xff\x7f" + raw[16:], "a header of 2147483647 bytes"),
        (lambda raw: raw[:12] + b"\x00\x00\x0f\x00" + raw[16:], "truncated"),
        (lambda raw: raw[:30] + b"?" + raw[31:], "the header is damaged"),
        (lambda raw: raw[:-8], "no index.*, or --recover of ess-bench"),
        (lambda raw: raw[:-1] + b"?", "no index.*, or --recover of ess-bench"),
        (lambda raw: raw[:-9] + b"?" + raw[-8:], "the trailer is damaged; recover=True"),
    ],
)
def test_a_refusal_says_what_is_wrong(small: tuple[Path, Steps], change: object, says: str) -> None:
    path, _ = small
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(BadInput, match=says) as refusal:
        TraceReader(path)
    assert str(path) in str(refusal.value)


def test_a_sound_frame_is_refused_in_another_place(tmp_path: Path) -> None:
    header = make_header(group_count=1)
    empty = np.zeros((0, 8), dtype=np.int32)
    steps: Steps = [(number, (), [empty]) for number in range(2)]
    path = write(tmp_path / "x", header, steps)
    with TraceReader(path) as reader:
        first, second, end = (int(offset) for offset in reader._offsets)
    raw = path.read_bytes()
    assert second - first == end - second
    path.write_bytes(raw[:first] + raw[second:end] + raw[first:second] + raw[end:])
    with TraceReader(path) as reader, pytest.raises(BadInput, match="damaged"):
        reader.step(0)
    with TraceReader(path, recover=True) as reader:
        assert (len(reader), reader.dropped_bytes) == (0, len(raw) - first)


def test_sound_checks_around_impossible_numbers(tmp_path: Path) -> None:
    """What only a malicious writer makes: every check fits, the numbers do not."""
    header = make_header(group_count=1)
    preamble, seed = form.encode_preamble(header)

    def crafted(step: list[int], selection: bytes) -> int:
        raw = bytearray(preamble)
        frames = [(form.STEP, varints.encode(step)), (form.SELECTION, selection)]
        for kind, payload in frames:
            raw += form.encode_frame(kind, payload, offset=len(raw), seed=seed)
        (tmp_path / "x").write_bytes(raw)
        with TraceReader(tmp_path / "x", recover=True) as reader:
            return len(reader)

    sound = varints.encode([0, 1, 2, 5, 9])
    size = form.FRAME.size + len(sound)
    assert crafted([0, 1, 0, 5, 1, 1, size], sound) == 1
    for step in (
        [0, 1, 0, 5, 1, 1, size + 1],
        [0, 1, 0, 5, 1, 1, size - 1],
        [0, 1, 0, 5, 1, 2, size],
        [0, 2, 0, 5, 1, 1, size],
        [0, 1 << 60, 0, 5, 1, 1, size],
        [0],
        [],
    ):
        assert crafted(step, sound) == 0, step
    for numbers in (
        [1, 1, 2, 5, 9],
        [0, 2, 2, 5, 9],
        [0, 1, 3, 5, 9],
        [0, 1, 1, 5, 9],
        [0, 1, 2, 5, 994],
        [0, 1, 2, 5, (1 << 63) - 1],
        [0, 1, 9, *[0] * 9],
        [0, 1],
        [],
    ):
        stream = varints.encode(numbers)
        step = [0, 1, 0, 5, 1, 1, form.FRAME.size + len(stream)]
        assert crafted(step, stream) == 0, numbers


def damage(rng: random.Random, raw: bytes) -> bytes:
    start, end = sorted(rng.randrange(len(raw) + 1) for _ in range(2))
    end = min(end, start + rng.choice((1, 4, 64)))
    noise = rng.randbytes(end - start)
    match rng.randrange(6):
        case 0:
            return raw[:start]
        case 1:
            return raw[:start] + raw[end:]
        case 2:
            return raw[:start] + noise + raw[start:]
        case 3:
            return raw[:start] + noise + raw[end:]
        case 4:
            return raw[:start] + bytes(end - start) + raw[end:]
        case _:
            place = rng.randrange(len(raw))
            return raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]


def read_all(path: Path, *, recover: bool) -> list[tuple]:
    with TraceReader(path, recover=recover) as reader:
        groups = range(reader.header.group_count)
        return [(s.number, s.requests, [s.selection(group) for group in groups]) for s in reader]


def assert_prefix(read: list[tuple], written: Steps) -> None:
    assert len(read) <= len(written)
    for got, meant in zip(read, written, strict=False):
        assert got[:2] == meant[:2]
        assert all(np.array_equal(a, b) for a, b in zip(got[2], meant[2], strict=True))


@pytest.mark.parametrize("seeds", [range(250), pytest.param(range(2250), marks=LONG)])
def test_damaged_files_are_refused(small: tuple[Path, Steps], tmp_path: Path, seeds: range) -> None:
    path, steps = small
    raw = path.read_bytes()
    damaged = tmp_path / "damaged"
    refused = 0
    for seed in seeds:
        changed = damage(random.Random(seed), raw)
        damaged.write_bytes(changed)
        for recover in (False, True):
            try:
                read = read_all(damaged, recover=recover)
            except BadInput:
                refused += 1
                assert changed != raw, f"seed={seed}"
                continue
            assert_prefix(read, steps)
            assert recover or len(read) == len(steps), f"seed={seed}"
    assert refused > len(seeds), "damage went unnoticed"
