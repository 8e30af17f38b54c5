"""The doors of routers, probes and scrapers."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

import ess
from ess.engine.process.messages import GraphLine, PoolUse, RequestLine, Status
from ess.server.dialects.routes.generate import GrowingList
from ess.server.process.board import RECENT_S, SUBSCRIBERS_MAX, Board
from ess.server.process.service import Limits
from tests.server.harness import TOKENIZER, PacedEngine, Served, counting, saying, until
from tests.support.manual_clock import ManualClock

TEXT = "one two three four"
STATUS = Status(
    step_count=7,
    running_count=2,
    made_count=90,
    prompt_count=40,
    cached_count=10,
    pools=(PoolUse("host pages", 25, 100), PoolUse("index pages", 10, 20)),
    hits=(80, 60),
    misses=(20, 40),
    places=(0, 0),
    slots_used=(5, 6),
    slots=(8, 8),
    modes=((4, 3, 2, 1),),
    graphs=GraphLine(
        held=5,
        most=64,
        bytes=900,
        byte_max=1000,
        replayed=30,
        captured=6,
        dropped=1,
        eager={"memory": 10},
    ),
    depth_reasons=("request 3: a grammar follows the output",),
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(PacedEngine(saying(TEXT), cached_count=4, status=STATUS)) as made:
        until(lambda: made.service.board.status.step_count == 7, "a status")
        yield made


def ask(served: Served, path: str, body: object = None, *, method: str | None = None):
    sent = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(served.url + path, sent, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def stream(served: Served, path: str, body: object) -> list[dict]:
    request = urllib.request.Request(served.url + path, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(each.removeprefix("data: ")) for each in events[:-2]]


def test_generate_speaks_sglang(served: Served):
    sampling = {"max_new_tokens": 50, "temperature": 0, "sampling_seed": 3}
    answer = ask(
        served,
        "/generate",
        {"text": "hello", "sampling_params": sampling, "model": None, "return_entropy": False},
    )
    assert answer["text"] == TEXT
    assert answer["output_ids"] == [*TOKENIZER.encode(TEXT), 1]
    meant = answer["meta_info"]
    assert meant["finish_reason"] == {"type": "stop", "matched": 1}
    assert (meant["completion_tokens"], meant["cached_tokens"]) == (len(answer["output_ids"]), 4)
    assert served.engine.adds[-1].sampling.seed == 3


def test_generate_streams_everything_so_far(served: Served):
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    events = stream(served, "/generate", {**body, "return_prompt_token_ids": True})
    assert [len(each["output_ids"]) for each in events] == [1, 2, 3]
    assert [each.get("prompt_token_ids") for each in events] == [None, None, [5, 6]]
    assert TEXT.startswith(events[-1]["text"])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert [each["meta_info"]["finish_reason"] for each in events[:-1]] == [None, None]


@pytest.mark.parametrize("choices", [1, 2])
def test_every_event_of_generate_is_what_a_document_of_so_many_tokens_is(
    served: Served, choices: int
):
    """Chances of prompt and answer included: each event goes on from the JSON of the one before."""

    def asked(count: int, **more: object) -> dict:
        sampling = {"max_new_tokens": count, "n": choices, "temperature": 0.5}
        wanted = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2}
        shown = {"return_text_in_logprobs": True}
        ids = {"input_ids": [5, 6, 7]}
        return {**ids, "sampling_params": sampling, **wanted, **shown, **more}

    def told(answer: dict) -> dict:
        unlike = ("id", "finish_reason", "cached_tokens")
        return {**answer, "meta_info": {**answer["meta_info"], **dict.fromkeys(unlike)}}

    events = stream(served, "/generate", asked(4, stream=True))
    assert len(events) >= 2 * choices
    for event in events:
        whole = ask(served, "/generate", asked(len(event["output_ids"])))
        one = whole[event["index"]] if choices > 1 else whole
        assert told(event) == told(one)


def test_what_an_event_before_had_is_not_encoded_again():
    asked: list[int] = []

    def shown(at: int) -> list[int]:
        asked.append(at)
        return [at, -at]

    grown = GrowingList()
    for count in (0, 2, 2, 5):
        made = msgspec.json.decode(grown.up_to(count, shown))
        assert made == [[at, -at] for at in range(count)]
    assert asked == [0, 1, 2, 3, 4]


def test_generate_in_batches_and_with_logprobs(served: Served):
    answer = ask(
        served,
        "/generate",
        {
            "text": ["a", "b"],
            "sampling_params": [{"max_new_tokens": 2}] * 2,
            "return_logprob": True,
        },
    )
    assert [each["index"] for each in answer] == [0, 1]
    assert [each["meta_info"]["completion_tokens"] for each in answer] == [2, 2]
    [first, _] = answer[0]["meta_info"]["output_token_logprobs"]
    assert first == [-0.5, answer[0]["output_ids"][0], None]
    many = ask(served, "/generate", {"input_ids": [[5]], "sampling_params": {"max_new_tokens": 1}})
    assert isinstance(many, list)


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([{"n": 1}, {"n": 2}], "sampling_params: n must be the same for all prompts"),
        ([{"n": 1}] * 3, "sampling_params has 3 entries for 2 prompts"),
        ([{"n": 1}], "sampling_params has 1 entry for 2 prompts"),
        ([{"best": 1, "beam_width": 4}] * 2, "beam_width is not served: there is no beam search"),
        ([{"stop_token_ids": [1] * 2000}] * 2, "[0]: stop_token_ids has 2,000 entries"),
        (
            [{}, {"max_new_tokens": 9999}],
            "sampling_params[1]: max_new_tokens is 9,999, but after 1 token of",
        ),
        ([{}, {"top_p": 2}], "sampling_params[1]: top_p is 2.0, must be"),
        ([{}, {"truncate_prompt_tokens": 0}], "sampling_params[1]: truncate_prompt_tokens is 0;"),
        ([{"regex": "a"}, {"regex": "b", "ebnf": "c"}], "sampling_params[1]: 2 constraints on"),
        ([{}, {"bad_words": [""]}], "sampling_params[1]: bad_words has a word of 0 characters"),
        ([{}, {"bad_words": ["😀" * 90]}], "sampling_params[1]: bad_words: 360 ids in a"),
    ],
)
def test_entries_of_prompts_are_checked_each(served: Served, entries, says):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(served, "/generate", {"text": ["a", "b"], "sampling_params": entries})
    assert says in json.loads(caught.value.read())["error"]["message"]


ENTRIES = (
    {"max_new_tokens": 0, "regex": "a+", "n": 2, "sampling_seed": 7},
    {"max_new_tokens": 3, "temperature": 0.5, "bad_words": ["x"], "truncate_prompt_tokens": 1},
    {"max_new_tokens": 9, "stop": ["two"], "ebnf": 'root ::= "b"', "no_stop_trim": True},
)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_long", [False, True])
def test_each_prompt_of_generate_has_its_own_sampling_params(
    served: Served, is_streamed: bool, is_long: bool
):
    """Long bodies are read in a text process, whose answer has the forms of all prompts too."""
    entries = [{"n": 2, **entry} for entry in ENTRIES]
    texts = ["one two", "three four", "five" * (1 + 2000 * is_long)]
    body = {"text": texts, "sampling_params": entries, "stream": is_streamed}
    if is_streamed:
        answers = {event["index"]: event for event in stream(served, "/generate", body)}
    else:
        answers = dict(enumerate(ask(served, "/generate", body)))
    assert [len(answers[place]["output_ids"]) for place in range(4)] == [0, 0, 3, 3]
    assert [answers[place]["text"] for place in (0, 4, 5)] == ["", "one two", "one two"]
    matched = [answers[place]["meta_info"]["finish_reason"].get("matched") for place in range(6)]
    assert matched == [None] * 4 + ["two"] * 2
    adds = served.engine.adds[-6:]
    samplings = [add.sampling for add in adds]
    assert [sampling.tokens_max for sampling in samplings] == [1, 1, 3, 3, 9, 9]
    assert [sampling.seed for sampling in samplings[:2]] == [7, 8]
    assert [bool(sampling.bad_words) for sampling in samplings] == [False] * 2 + [True] * 2 + [
        False
    ] * 2
    kinds = [sampling.grammar and sampling.grammar.kind for sampling in samplings]
    assert kinds == ["regex", "regex", None, None, "lark", "lark"]
    assert len(adds[2].prompt) == 1 < len(adds[0].prompt)


def test_generate_scores_the_prompt_from_a_position_on(served: Served):
    body = {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": 1,
        "top_logprobs_num": 2,
    }
    meant = ask(served, "/generate", body)["meta_info"]
    assert meant["input_token_logprobs"] == [[None, 6, None], [-0.5, 7, None], [-0.5, 8, None]]
    nothing, *tops = meant["input_top_logprobs"]
    assert nothing is None
    assert [[token for _, token, _ in top] for top in tops] == [[7, 8], [8, 9]]
    assert served.engine.adds[-1].sampling.prompt_start == 1
    for streamed in (False, True):  # the prompt alone, as SGLang's `select` and `cache_prefix` ask
        asked = {**body, "sampling_params": {"max_new_tokens": 0}, "stream": streamed}
        events = (
            stream(served, "/generate", asked) if streamed else [ask(served, "/generate", asked)]
        )
        alone, said = events[-1], events[-1]["meta_info"]
        assert (alone["text"], alone["output_ids"], said["completion_tokens"]) == ("", [], 0)
        assert said["finish_reason"] == {"type": "length", "length": 0}
        assert said["output_token_logprobs"] == said["output_top_logprobs"] == []
        for name in ("input_token_logprobs", "input_top_logprobs"):
            assert said[name] == meant[name]
    for start in (-1, 4):
        meant = ask(served, "/generate", {**body, "logprob_start_len": start})["meta_info"]
        assert meant["input_token_logprobs"] == []
        assert "input_top_logprobs" not in meant
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served, "/generate", {**body, "logprob_start_len": 5})
    assert refused.value.code == 400
    assert b"logprob_start_len is 5, the prompt has 4 tokens" in refused.value.read()


def test_each_prompt_of_generate_has_its_own_log_probabilities(served: Served):
    body = {
        "input_ids": [[5, 6], [5, 6, 7], [5]],
        "sampling_params": {"max_new_tokens": 2, "n": 2},
        "return_logprob": [True, True, False],
        "logprob_start_len": [-1, 1, 0],
        "top_logprobs_num": [3, 0, 0],
    }
    said = [each["meta_info"] for each in ask(served, "/generate", body)]
    assert [len(each.get("input_token_logprobs", "none")) for each in said] == [0, 0, 2, 2, 4, 4]
    tops = [[len(top) for top in each["output_top_logprobs"]] for each in said[:4]]
    assert tops == [[3, 3]] * 2 + [[0, 0]] * 2
    assert "output_token_logprobs" not in said[4] | said[5]
    samplings = [add.sampling for add in served.engine.adds[-6:]]
    assert [each.logprobs for each in samplings] == [3, 3, 0, 0, None, None]
    assert [each.prompt_logprobs for each in samplings] == [None, None, 0, None, None, None]


def test_tokens_in_come_with_their_chances(served: Served):
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    nothing, second = ask(served, "/inference/v1/generate", body)["prompt_logprobs"]
    assert nothing is None
    assert second["6"]["logprob"] == -0.5
    with pytest.raises(urllib.error.HTTPError):
        ask(served, "/inference/v1/generate", {**body, "stream": True})


def test_tokens_in_tokens_out(served: Served):
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 3, "logprobs": 1, "min_tokens": 1},
        "request_id": "mine",
    }
    answer = ask(served, "/inference/v1/generate", body)
    [choice] = answer["choices"]
    assert answer["request_id"] == "mine"
    assert choice["token_ids"] == TOKENIZER.encode(TEXT)[:3]
    assert choice["finish_reason"] == "length"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-0.5] * 3
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, last = stream(served, "/inference/v1/generate", {**body, **options})
    assert [t for each in events for t in each["choices"][0]["token_ids"]] == choice["token_ids"]
    assert last["usage"] == answer["usage"]


def test_models_version_and_what_is_configured(served: Served):
    [listed] = ask(served, "/v1/models")["data"]
    assert (listed["id"], listed["max_model_len"]) == ("test-model", 4096)
    assert listed["max_input_tokens"] == 4095, "one position is left for an answer"
    assert (listed["type"], listed["display_name"]) == ("model", "test-model")
    assert datetime.fromisoformat(listed["created_at"]).timestamp() == listed["created"]
    assert ask(served, "/version") == {"version": ess.__version__}
    for path in ("/server_info", "/get_server_info"):
        answer = ask(served, path)
        assert answer["served_model_name"] == "test-model"
        assert answer["max_running_requests"] == 16
        assert answer["internal_states"][0]["max_total_num_tokens"] == 65536
        assert answer["engine"]["depth_reasons"] == ["request 3: a grammar follows the output"]
        assert answer["engine"]["graphs"]["eager"] == {"memory": 10}
        assert answer["engine"]["modes"] == [{"resident": 4, "none": 3, "da": 2, "dba": 1}]
        bounds = {bound["what"]: bound for bound in answer["bounds"]}
        assert bounds["connections"]["most"] == "1,024"
    served.service.described = {"max_connections": {"value": 7, "from": "flag"}}
    [most] = [
        b["most"] for b in ask(served, "/server_info")["bounds"] if b["what"] == "connections"
    ]
    assert most == "7"
    for path in ("/model_info", "/get_model_info"):
        shown = ask(served, path)
        assert (shown["is_generation"], shown["weight_version"]) == (True, "default")


def test_one_model_is_shown_or_absent(served: Served):
    [listed] = ask(served, "/v1/models")["data"]
    assert ask(served, "/v1/models/test-model") == listed
    for path in ("/v1/models/deepseek-ai/DeepSeek-V3.2", "/v1/models/unknown"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(served, path)
        error = json.loads(refused.value.read())["error"]
        assert (refused.value.code, error["code"]) == (404, "model_not_found")
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(served, "/v1/completions", {"model": "a/b", "prompt": "x"})
    assert json.loads(refused.value.read())["error"]["code"] == "model_not_found"


def test_texts_to_ids_and_back(served: Served):
    for prefix in ("", "/v1"):
        answer = ask(served, f"{prefix}/tokenize", {"prompt": "hello ä", "return_token_strs": True})
        assert answer["tokens"] == TOKENIZER.encode("hello ä", add_special=True)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        back = ask(served, f"{prefix}/detokenize", {"tokens": answer["tokens"]})
        assert back["prompt"] == "hello ä"
    messages = [{"role": "user", "content": "hi"}]
    answer = ask(served, "/tokenize", {"messages": messages})
    assert TOKENIZER.decode(answer["tokens"]) == "user: hi\nassistant:"
    many = ask(served, "/detokenize", {"tokens": [[5], [6]]})
    assert len(many["prompt"]) == 2


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "prompt or messages, one of"),
        ("/detokenize", {"tokens": "x"}, "tokens must be a list"),
        ("/detokenize", {"tokens": [4096]}, "0..4095"),
        ("/generate", {}, "text or input_ids, one of"),
        ("/generate", {"text": []}, "empty list"),
        ("/generate", {"input_ids": []}, "empty"),
        ("/inference/v1/generate", {"token_ids": []}, "empty"),
        ("/abort_request", {}, "give rid"),
    ],
)
def test_wrong_bodies_are_explained(served: Served, path, body, says):
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(served, path, body)
    assert caught.value.code == 400
    assert says in json.loads(caught.value.read())["error"]["message"]


def test_probes_answer_while_the_server_is_ready(served: Served):
    assert ask(served, "/health") == {"status": "ready"}
    assert ask(served, "/ready") == {"status": "ready"}
    assert ask(served, "/ping") == ask(served, "/ping", {}) == {"status": "ready"}
    before = len(served.engine.adds)
    assert ask(served, "/health_generate") == {"status": "ok"}
    assert served.engine.adds[before].sampling.tokens_max == 1


def test_a_full_queue_is_no_fault_while_tokens_are_made():
    limits = Limits(running_max=1, waiting_max=0, length_max=4096, probe_s=2.0)
    body = {"prompt": "a", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with Served(PacedEngine(counting(4000), pace_s=0.01), limits=limits) as busy:
        sent = urllib.request.Request(busy.url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(sent, timeout=60) as events:
            assert events.readline().startswith(b"data:")
            made = busy.service.board
            until(lambda: len({status.made_count for _, status in made.recent}) > 2, "tokens")
            assert ask(busy, "/health_generate") == {"status": "ok"}
            assert busy.service.link.open_count == 1
            busy.engine.hold()
            until(lambda: probed(busy) == 503, "the probe of a stuck engine")
            busy.engine.held.set()


def probed(served: Served) -> int:
    try:
        with urllib.request.urlopen(served.url + "/health_generate", timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_load_report_has_the_fields_of_sglang(served: Served):
    """The moment as text: smg throws away a report with a number there."""
    told = ask(served, "/v1/loads?include=core,disagg,queues,memory")
    assert datetime.fromisoformat(told["timestamp"]).tzinfo is UTC
    assert told["dp_rank_count"] == 1
    [load] = told["loads"]
    assert load["num_running_reqs"] == 2
    assert load["token_usage"] == 0.5
    assert load["row_hit_rate"] == 0.7
    assert load["cache_hit_rate"] == 0.25
    assert load["memory"]["host_pages"] == {"used": 25, "capacity": 100}
    assert load["queues"]["waiting"] == 0
    [core] = ask(served, "/v1/loads?include=core")["loads"]
    assert "memory" not in core
    assert ask(served, "/loads?model=test-model")["loads"][0]["num_running_reqs"] == 2
    assert ask(served, "/load") == {"server_load": 0}
    entry = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 32768}
    assert ask(served, "/get_load") == [entry]


def test_metrics_parse_and_carry_other_names(served: Served):
    ask(served, "/v1/models")
    ask(served, "/v1/completions", {"prompt": "a", "max_tokens": 1})
    with urllib.request.urlopen(served.url + "/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert samples["ess_tokens_total",] == 90
    assert samples["ess_requests_running",] == 2
    assert samples["ess_row_misses_total", "1"] == 40
    assert samples["ess_pool_used", "host pages"] == 25
    assert samples["vllm:num_requests_running", "test-model"] == 2
    assert samples["vllm:kv_cache_usage_perc", "test-model"] == 0.5
    assert samples["vllm:cache_config_info", "64", "1024"] == 1
    assert samples["sglang:token_usage", "test-model"] == 0.5
    assert samples["sglang:num_queue_reqs", "test-model"] == 0
    assert samples["ess_graph_steps_total", "replayed"] == 30
    assert samples["ess_eager_steps_total", "memory"] == 10
    kept = [samples[name,] for name in ("ess_graphs", "ess_graph_bytes", "ess_graph_bytes_max")]
    assert kept == [5, 900, 1000]
    answered = samples["ess_answers_total", "/v1/models", "200"]
    assert answered >= 1
    assert samples["ess_first_token_seconds_count",] >= 1
    buckets = [value for key, value in samples.items() if key[0] == "ess_request_seconds_bucket"]
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples["ess_request_seconds_count",]


def test_both_paths_of_a_flush_reach_the_engine(served: Served):
    before = served.engine.flushes
    for path in ("/flush_cache", "/reset_prefix_cache"):
        assert ask(served, path, method="POST") == {"flushed": True}
    assert served.engine.flushes == before + 2


def test_a_viewer_too_many_is_told_why_and_when_to_come_again(served: Served):
    served.service.board._subscribers.update(asyncio.Event() for _ in range(SUBSCRIBERS_MAX))
    try:
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            urllib.request.urlopen(served.url + "/v1/events", timeout=60)
        assert refused.value.headers["x-ess-reason"] == "viewers"
        assert refused.value.headers["retry-after"] == "5"
        refused.value.close()
    finally:
        served.service.board._subscribers.clear()


def test_the_board_gives_every_viewer_the_newest(served: Served):
    async def watch() -> None:
        board = Board(ManualClock())
        views = [board.enter() for _ in range(SUBSCRIBERS_MAX)]
        assert board.is_full
        for count in (1, 2, 3):
            board.publish(msgspec.structs.replace(STATUS, step_count=count))
        assert all(view.is_set() for view in views)
        assert board.status.step_count == 3
        for view in views:
            board.leave(view)
        again = board.enter()
        assert not again.is_set()
        board.publish(STATUS)
        await asyncio.wait_for(again.wait(), 1)

    asyncio.run(watch())


def test_the_board_keeps_a_minute_without_its_requests():
    clock = ManualClock()
    board = Board(clock)
    line = RequestLine(1, "decoding", 2, 1, 0, 4)
    for count in range(130):
        clock.advance(1.0)
        board.publish(msgspec.structs.replace(STATUS, step_count=count, requests=(line,)))
    assert [status.step_count for _, status in board.recent] == list(range(69, 130))
    assert board.recent[-1][0] - board.recent[0][0] == RECENT_S
    assert not board.recent[-1][1].requests
    assert board.status.requests == (line,)
