"""Pipelines that are timed: real processes, asked as the benchmarks and the tuner ask them."""

from __future__ import annotations

import json

import pytest

from ess.engine.config import ProcessConfig
from ess.errors import BadState
from ess.models.load import EMBEDDED
from ess.prefill.trial.pipe import Pipe, PipeTrial
from ess.prefill.trial.pipe_messages import Slow
from ess.server.commands import cli
from ess.server.commands.tune import TriedSetting, Tuning, judged, lines
from tests.support.checkpoints import tokens
from tests.support.few import few

HALVES = ((0, 3), (3, 6))
CONFIG = ProcessConfig(threads=1, mtp=2)


def plan_of(layers=HALVES, **more) -> PipeTrial:
    given = {"model": str(EMBEDDED), "context": 400, "prompts": 2, "config": CONFIG, **more}
    return PipeTrial(layers=layers, **given)


def text(length: int, *, seed: int) -> list[int]:
    return tokens(length, 4096, seed=seed)


@pytest.mark.slow
def test_chunks_are_those_asked_for_and_every_layer_is_timed():
    first = text(400, seed=1)
    with Pipe(plan_of()) as pipe:
        ran = pipe.run([first], [128, 320])
        again = pipe.run([first[:300] + text(100, seed=2)], [64, 448], forgets=False)
        both = pipe.run([text(150, seed=3), text(90, seed=4)], [100])
        peaks = pipe.peaks()
        processes = list(pipe._processes)
    assert [chunk.chunks for chunk in ran.chunks] == [((0, 128),), ((128, 320),), ((320, 399),)]
    for chunk in ran.chunks:
        for kind in ("wall", "core"):
            assert len(chunk.layer_s(kind)) == 7
            assert min(chunk.layer_s(kind)) > 0
            assert sum(chunk.stage_s(kind)) == pytest.approx(sum(chunk.layer_s(kind)))
        assert sum(chunk.stage_s("core")) <= sum(chunk.stage_s("wall")) * 1.05
    assert ran.span_s >= max(
        sum(chunk.stage_s("wall")[stage] for chunk in ran.chunks) for stage in range(2)
    )
    assert again.answer.cached_counts == [192]
    assert [chunk.chunks for chunk in again.chunks] == [((192, 399),)]
    assert sum(chunk.count for chunk in both.chunks) == 149 + 89
    assert all(0 < peak.pool_bytes < peak.bytes for peak in peaks)
    assert [process.returncode for process in processes] == [0, 0]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
@pytest.mark.parametrize("is_async", few([True], all_of=[True, False]))
def test_slow_links_end_in_order(is_async: bool, capfd: pytest.CaptureFixture[str]):
    links = Slow(latency_s=0.002, bytes_per_s=4e6, is_async=is_async)
    with Pipe(plan_of(links=links)) as pipe:
        ran = pipe.run([text(400, seed=5)], [128, 256])
        processes = list(pipe._processes)
    sent_s = 399 * 256 * 4 / 4e6
    assert ran.span_s > sent_s
    assert [process.returncode for process in processes] == [0, 0]
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_a_rank_that_fails_ends_the_pipeline():
    with Pipe(plan_of()) as pipe:
        pipe._processes[1].kill()
        with pytest.raises(BadState, match="has ended"):
            pipe.run([text(400, seed=6)], [128])
        processes = list(pipe._processes)
    assert all(process.returncode is not None for process in processes)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_trials")
def test_tune_prints_what_to_set(capsys: pytest.CaptureFixture[str]):
    tuned = ("prefill", "--tune", "--tune-prompt", "512", "--tune-rounds", "1", "--json")
    assert cli.main([*tuned, "--pp-size", "2", "--chunk", "128", "--threads", "1"]) == 0
    tuning = json.loads(capsys.readouterr().out)
    assert tuning["tried"][0]["flags"].startswith("--chunk 128 --pp-layer-partition")
    assert tuning["flags"] in [each["flags"] for each in tuning["tried"]]
    assert 2 <= len(tuning["tried"]) <= 4
    assert all(min(each["first_token_s"]) > 0 for each in tuning["tried"])
    assert not tuning["verdict"].startswith("sure"), "of one round nothing is sure"


def tried(name: str, *seconds: float) -> TriedSetting:
    return TriedSetting(
        flags=name,
        expected_first_token_s=1.0,
        expected_tokens_per_s=1000.0,
        bubble_share=0.1,
        chunk_count=8,
        first_token_s=list(seconds),
    )


@pytest.mark.parametrize(
    ("seconds", "kept", "says", "is_sure"),
    [
        ((0.8, 0.81, 0.82), False, "sure: 19.0% sooner", True),
        ((0.8, 0.81, 1.2), False, "likely, not sure", False),
        ((0.9, 0.999, 1.2), True, "less than rounds differ", False),
    ],
)
def test_the_default_gives_way_to_what_is_clearly_faster(seconds, kept, says, is_sure):
    default, best = tried("default", 0.99, 1.0, 1.1), tried("best", *seconds)
    taken, verdict, sure = judged(default, best, [default, best])
    assert (taken is default, sure) == (kept, is_sure)
    assert says in verdict
    assert "up to" in verdict


def test_the_result_of_a_single_round_does_not_speak_of_rounds_that_overlap():
    default, best = tried("default", 1.0), tried("best", 0.8)
    taken, verdict, sure = judged(default, best, [default, best])
    assert (taken, sure) == (best, False)
    assert verdict.startswith("likely, not sure: 20.0% sooner, but in a single round; try on")


def test_a_pipeline_of_a_single_stage_is_named_so():
    alone = tried("default", 1.0)
    tuning = Tuning(
        prompt=2048,
        stages=1,
        times="",
        profile="",
        flags=alone.flags,
        verdict="",
        is_sure=True,
        first_token_s=1.0,
        tokens_per_s=1000.0,
        tried=[alone],
    )
    assert lines(tuning)[0] == "1 stage, a prompt of 2,048 tokens"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tune-prompt", "100"), "tune_prompt is 100"),
        (("--tune-prompt", "1m"), "tune_prompt is 1m"),
        (("--tune-rounds", "0"), "tune_rounds is 0"),
        (("--pp-size", "2", "--tp-size", "2"), "tp_size 2"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["prefill", "--tune", *flags]) == 2
    assert named in capsys.readouterr().err
