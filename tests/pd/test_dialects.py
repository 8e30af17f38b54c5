"""What a router's fields become: the handoffs that the engine is told of, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from msgspec import structs

from ess.engine.process.fake_engine import identity_of
from ess.engine.process.messages import Add, Handoff, Met, Piece, Progress, ToEngine
from ess.engine.process.wire import SocketWire
from ess.server.process.link import EngineLink
from ess.server.process.pair.addresses import read_peers
from ess.server.process.pair.peers import Peers, Split
from ess.server.process.service import Limits
from ess.transfer.members import joined
from ess.transfer.messages import Seal
from tests.server import harness
from tests.server.harness import PacedEngine, Served, counting
from tests.support.routers import Answer, ask

until = partial(harness.until, within_s=180.0)
SECRET = "sixteen bytes are enough for it"
PROMPT = {"prompt": "abc", "max_tokens": 3}
HELLO = [{"role": "user", "content": "a"}]
GIVES = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
ENDS = ("data: [DONE]\n\n", 'data: {"type":"message_stop"}\n\n')
LIMITS = Limits(running_max=16, waiting_max=64, length_max=4096, keep_alive_s=0.05)


def engine(**given: object) -> PacedEngine:
    return PacedEngine(counting(3), identity=identity_of(SECRET), **given)


def prefill(**given: object) -> Served:
    split = Split(role="prefill", port=1, seal=Seal(SECRET.encode()))
    return Served(engine(), split_of=lambda link: split, **given)


@contextmanager
def decode(peers: str, made: PacedEngine | None = None, **given: object) -> Iterator[Served]:
    def split_of(link: EngineLink) -> Split:
        met = Peers(read_peers(peers), link, link.engine._clock)
        return Split(role="decode", peers=met, seal=Seal(SECRET.encode()), **given)

    with Served(made or engine(), split_of=split_of, limits=LIMITS) as served:
        yield served


@contextmanager
def pair(**given: object) -> Iterator[tuple[Served, Served]]:
    with prefill() as left, decode(f"127.0.0.1:{left.port}", **given) as right:
        peers = right.service.split.peers
        until(lambda: not peers.missing, "the meeting")
        yield left, right


def post(served: Served, body: dict, path: str = "/v1/completions") -> Answer:
    return ask(served.url + path, body)


def rooms_at(left: Served, room: object) -> dict[str, object]:
    many = isinstance(room, list)
    host, port = "127.0.0.1", left.port
    return {
        "bootstrap_host": [host] * len(room) if many else host,
        "bootstrap_port": [port] * len(room) if many else port,
        "bootstrap_room": room,
    }


def handed(served: Served) -> list[Handoff | None]:
    """What the engine was told since the last time."""
    told = [add.handoff for add in served.engine.adds]
    served.engine.adds.clear()
    return told


@pytest.mark.parametrize(
    ("prompt", "room", "rooms"),
    [
        ("abc", 7, [7]),
        (["abc"], [7.0], [7]),
        (["abc", "def"], [7, 2**63 - 1], [7, 2**63 - 1]),
        (["abc", "def"], 2**63 - 1, [2**63 - 1, 0]),
        ([[1, 2], [3]], 5.0, [5, 6]),
    ],
)
def test_both_legs_know_a_prompt_by_its_room(prompt: object, room: object, rooms: list[int]):
    with pair() as (left, right):
        for served in (left, right):
            body = {**PROMPT, "prompt": prompt, **rooms_at(left, room)}
            assert post(served, body).status == 200
        assert handed(left) == [Handoff(each, kind="give") for each in rooms]
        epoch = left.service.epoch
        assert handed(right) == [Handoff(each, epoch, "take") for each in rooms]


def test_choices_keep_one_room_and_only_their_first_has_it():
    with pair() as (left, right):
        body = {**PROMPT, "n": 3, "logprobs": 2, "echo": True, **rooms_at(left, 9)}
        document = post(left, body).document
        assert [(c["text"], c["finish_reason"]) for c in document["choices"]] == [("", "length")]
        assert document["usage"]["prompt_tokens"] == 1
        [add] = left.engine.adds
        assert (add.sampling.tokens_max, add.sampling.prompt_logprobs) == (1, None)
        assert len(post(right, body).document["choices"]) == 3
        assert handed(right) == [Handoff(9, left.service.epoch, "take"), None, None]


def test_a_chat_request_with_a_room_for_each_choice_keeps_the_first():
    """So sglang-router and smg write them, hosts and ports too."""
    with pair() as (left, right):
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "n": 3}
        body = {**chat, **rooms_at(left, [9, 8, 7])}
        for served in (left, right):
            assert post(served, body, "/v1/chat/completions").status == 200
        assert handed(left) == [Handoff(9, kind="give")]
        assert handed(right) == [Handoff(9, left.service.epoch, "take"), None, None]
        wrong = {**chat, **rooms_at(left, [9, 8])}
        assert post(right, wrong, "/v1/chat/completions").status == 400


def test_prompts_with_sampling_params_of_their_own_are_handed_over():
    """With a room for each prompt, or for each answer."""
    entries = [{"n": 2, "max_new_tokens": 0}, {"n": 2, "max_new_tokens": 3}]
    for rooms in ([4, 5], [4, 5, 6, 7]):
        with pair() as (left, right):
            body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": entries}
            made, answers = (
                post(served, {**body, **rooms_at(left, rooms)}, "/generate").document
                for served in (left, right)
            )
            assert handed(left) == [Handoff(room, kind="give") for room in (4, 5)]
            assert [len(answer["output_ids"]) for answer in made] == [0, 0]
            epoch = left.service.epoch
            took = [Handoff(4, epoch, "take"), None, Handoff(5, epoch, "take"), None]
            assert handed(right) == took
            assert [len(answer["output_ids"]) for answer in answers] == [0, 0, 3, 3]


def test_workers_of_a_pair_are_taken_for_those_of_sglang():
    """Otherwise smg sends no handoffs: it reads a model's `owned_by` to learn which dialect a
    worker speaks."""
    with pair() as (left, right):
        for served in (left, right):
            [model] = ask(f"{served.url}/v1/models").document["data"]
            assert model["owned_by"] == "sglang"


def test_the_first_leg_of_vllm_names_what_the_second_takes():
    with pair() as (left, right):
        two = {**PROMPT, "prompt": ["abc", "def"]}
        params = post(left, {**two, **GIVES}).document["kv_transfer_params"]
        given = handed(left)
        assert [each.kind for each in given] == ["give", "give"]
        assert params["remote_engine_id"] == f"{left.service.epoch:016x}"
        assert post(right, {**two, "kv_transfer_params": params}).status == 200
        epoch = left.service.epoch
        assert handed(right) == [Handoff(each.uid, epoch, "take") for each in given]


def test_a_transfer_id_names_the_same_rooms_in_both_legs():
    with pair() as (left, right):
        two = {**PROMPT, "prompt": ["abc", "def"]}
        first = {**GIVES["kv_transfer_params"], "transfer_id": "xfer-1"}
        second = {
            "do_remote_prefill": True,
            "transfer_id": "xfer-1",
            "remote_bootstrap_addr": left.url,
            "remote_engine_id": "of another boot",
        }
        assert post(left, {**two, "kv_transfer_params": first}).status == 200
        assert post(right, {**two, "kv_transfer_params": second}).status == 200
        uids = [each.uid for each in handed(left)]
        assert len(set(uids)) == 2
        assert [each.uid for each in handed(right)] == uids


# What llm-d's sidecar (llm-d-router, August 2026, nixlv2) writes over the client's body.
SIDECAR = {
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
    **GIVES["kv_transfer_params"],
}
ONE = {"max_tokens": 1, "min_tokens": 1}
PRIMED = {
    "/v1/chat/completions": ({"messages": HELLO}, {**ONE, "max_completion_tokens": 1}),
    "/v1/completions": ({"prompt": "a"}, {**ONE, "max_completion_tokens": 1}),
    "/v1/messages": ({"messages": HELLO}, {**ONE, "max_completion_tokens": 1}),
    "/v1/responses": ({"input": "a"}, {"max_output_tokens": 1}),
    "/inference/v1/generate": ({"token_ids": [5, 6]}, {"sampling_params": ONE}),
}


def test_the_legs_of_llm_d_s_sidecar_are_served():
    with pair() as (left, right):
        for path, (body, limits) in PRIMED.items():
            primed = {**body, **limits, "stream": False, "kv_transfer_params": SIDECAR}
            first = post(left, primed, path)
            assert first.status == 200, (path, first.text)
            params = first.document["kv_transfer_params"]
            asked = {**body, "max_tokens": 3} if path == "/v1/messages" else body
            second = post(right, {**asked, "kv_transfer_params": params}, path)
            assert second.status == 200, (path, second.text)
            assert [each.kind for each in handed(left)] == ["give"]
            assert [each.kind for each in handed(right)] == ["take"]


def test_every_route_that_generates_hands_over():
    routes = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 3},
        "/generate": {"text": "a", "return_logprob": True, "logprob_start_len": 0},
        "/inference/v1/generate": {"token_ids": [5, 6]},
    }
    with pair() as (left, right):
        for path, body in routes.items():
            for streams in (False, True):
                for served, kind in ((left, "give"), (right, "take")):
                    asked = {**body, "stream": streams, **rooms_at(left, 3)}
                    answer = post(served, asked, path)
                    assert answer.status == 200, answer.text
                    assert [each.kind for each in handed(served)] == [kind], path
                    assert answer.text.endswith(ENDS) == streams
            params = post(left, {**body, **GIVES}, path).document["kv_transfer_params"]
            assert params["do_remote_prefill"]
            assert [each.kind for each in handed(left)] == ["give"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bootstrap_room": 2**63}, "bootstrap_room has 9223372036854775808"),
        ({"bootstrap_room": -1}, "bootstrap_room has -1"),
        ({"bootstrap_room": True}, "bootstrap_room has True"),
        ({"bootstrap_room": "7"}, "bootstrap_room has '7'"),
        ({"bootstrap_room": [1, 2]}, "bootstrap_room has 2 entries for 1 prompt"),
        ({"prompt": ["a", "b"], "bootstrap_room": [4, 4]}, "the same room for two prompts"),
        ({"bootstrap_room": 7.5}, "bootstrap_room has 7.5"),
        ({"bootstrap_room": 2.0**60}, "bootstrap_room has 1.15"),
        ({"bootstrap_room": 10**40}, "bootstrap_room has 1000000"),
    ],
)
def test_a_wrong_room_is_the_client_s_mistake_in_both_legs(fields: dict, says: str):
    with pair() as (left, right):
        for served in (left, right):
            answer = post(served, {**PROMPT, **rooms_at(left, 1), **fields})
            assert (answer.status, says in answer.text) == (400, True), answer.text
        assert handed(left) == handed(right) == []


def test_params_of_another_engine_are_refused_by_name():
    with pair() as (left, right):
        good = post(left, {**PROMPT, **GIVES}).document["kv_transfer_params"]
        for change, says in (
            ({"remote_engine_id": "eng-P"}, "remote_engine_id must be the id"),
            ({"ess_rooms": None}, "ess_rooms must have the 1 rooms"),
            ({"ess_rooms": ["f" * 16]}, "a room of more than 63 bits"),
            ({"ess_rooms": good["ess_rooms"] * 2}, "ess_rooms must have the 1 rooms"),
            ({"remote_host": 5}, "remote_host must be a text"),
            ({"remote_port": 5.5}, "remote_port is 5.5, not a port"),
            ({"remote_port": 5}, "--peers of this server has no such worker"),
            ({"transfer_id": ""}, "no such worker"),
        ):
            answer = post(right, {**PROMPT, "kv_transfer_params": {**good, **change}})
            assert answer.status == 400, answer.text
            assert says in answer.text or "must be" in answer.text
        assert post(right, {**PROMPT, "kv_transfer_params": [1]}).status == 400
        assert handed(right) == []


def test_plain_requests_are_for_the_decode_worker():
    with pair() as (left, right):
        assert post(left, PROMPT).status == 400
        assert post(right, PROMPT).status == 200
        assert post(right, {**PROMPT, **GIVES}).status == 200
        assert post(right, {**PROMPT, "bootstrap_room": 5}).status == 400
        assert handed(left) == []
        assert handed(right) == [None, None]
        assert ask(left.url + "/health_generate").status == 200


def test_invented_rows_are_for_servers_that_allow_them():
    fake = {**PROMPT, "bootstrap_host": "2.2.2.2", "bootstrap_port": None, "bootstrap_room": 0}
    with decode("") as served:
        assert "--fake-prefill" in post(served, fake).text
        assert handed(served) == []
    with decode("", allows_fake=True) as served:
        assert post(served, fake).status == 200
        assert handed(served) == [Handoff(0, kind="fake")]


def test_a_worker_of_no_pair_ignores_it_all():
    body = {**PROMPT, "bootstrap_room": "x", "bootstrap_host": {}, "kv_transfer_params": 5}
    with Served(engine()) as served:
        assert post(served, body).status == 200
        assert handed(served) == [None]
        for path in ("/route", "/query"):
            assert ask(served.url + path).status == 404
        assert ask(served.url + "/peers", {}).status == 404


class Refusing(PacedEngine):
    """Its rows do not come: at once, or after the first token."""

    late = False

    def obey(self, message: ToEngine, wire: SocketWire) -> None:
        if not isinstance(message, Add):
            super().obey(message, wire)
            return
        sentence = "the rows did not come"
        refused = Piece(message.number, reason="refused", sentence=sentence, is_ours=True)
        if self.late:
            wire.give(Progress((Piece(message.number, (70,)),)))
        wire.give(Progress((refused,)))


@pytest.mark.parametrize("streams", [False, True])
def test_rows_that_do_not_come_are_a_503_or_an_event(streams: bool):
    made = Refusing(counting(3), identity=identity_of(SECRET))
    with prefill() as left, decode(f"127.0.0.1:{left.port}", made) as right:
        until(lambda: not right.service.split.peers.missing, "the meeting")
        body = {**PROMPT, **rooms_at(left, 3), "stream": streams}
        answer = post(right, body)
        assert (answer.status, "the rows did not come" in answer.text) == (503, True)
        made.late = True
        answer = post(right, body)
        assert (answer.status, "the rows did not come" in answer.text) == (
            200 if streams else 503,
            True,
        )
        assert answer.text.endswith("data: [DONE]\n\n") == streams


def test_overload_is_503_in_both_roles():
    tight = Limits(running_max=1, waiting_max=0, length_max=4096)
    with prefill(limits=tight) as left:
        left.engine.hold()
        first = {**PROMPT, "prompt": ["a", "b"], **GIVES}
        answer = post(left, first)
        assert (answer.status, answer.headers["x-ess-reason"]) == (503, "queue_full")


def test_probes_say_the_role():
    with pair() as (left, right):
        told = [ask(served.url + "/server_info").document for served in (left, right)]
        assert [each["disaggregation_mode"] for each in told] == ["prefill", "decode"]
        assert told[0]["disaggregation_bootstrap_port"] == 1
        [peer] = told[1]["peers"]
        assert (peer["is_up"], peer["engine_id"]) == (True, f"{left.service.epoch:016x}")
        for served, role in ((left, "prefill"), (right, "decode")):
            path = "/v1/loads?include=core,disagg,queues,memory"
            [load] = ask(served.url + path).document["loads"]
            assert load["disagg_mode"] == role
            assert ask(served.url + "/get_server_info").status == 200
        topology = ask(left.url + "/route?prefill_dp_rank=-1&target_tp_rank=0").document
        assert (topology["page_size"], topology["pp_size"]) == (64, 1)
        assert ask(left.url + "/route?target_tp_rank=1").status == 404
        assert ask(left.url + "/query").document["0"]["engine_id"] == f"{left.service.epoch:016x}"


class Staged(PacedEngine):
    """A prefill engine of several stages, as others meet it."""

    def __init__(self, count: int) -> None:
        stages = [identity_of(SECRET) for _ in range(count)]
        super().__init__(counting(3), identity=stages[0])
        layers = [range(number, number + 1) for number in range(count)]
        hellos = [stage.hello() for stage in stages]
        self.metadata = joined(stages[0].seal, list(zip(hellos, layers, strict=True)))
        self.lead = stages[0].epoch

    def _meet(self, address: str, metadata: bytes, front: int) -> Met:
        met = super()._meet(address, metadata, front)
        return structs.replace(met, metadata=self.metadata)


def test_a_prefill_worker_of_several_stages_is_met_as_one():
    made = Staged(3)
    split = Split(role="prefill", port=1, seal=Seal(SECRET.encode()))
    with (
        Served(made, split_of=lambda link: split) as left,
        decode(f"127.0.0.1:{left.port}") as right,
    ):
        until(lambda: not right.service.split.peers.missing, "the meeting")
        [peer] = right.service.split.peers.lines()
        assert peer["engine_id"] == f"{made.lead:016x}"
        for rank in ("-1", "0", "2"):
            topology = ask(f"{left.url}/route?target_pp_rank={rank}").document
            assert (topology["pp_size"], topology["attn_tp_size"]) == (3, 1)
            assert topology["engine_id"] == f"{made.lead:016x}"
        for wrong in ("target_pp_rank=3", "target_tp_rank=1", "target_pp_rank=-2"):
            assert ask(f"{left.url}/route?{wrong}").status == 404
        told = ask(left.url + "/query").document["0"]
        assert told["engine_id"] == f"{made.lead:016x}"
        assert list(told["worker_addr"]["0"]) == ["0", "1", "2"]
