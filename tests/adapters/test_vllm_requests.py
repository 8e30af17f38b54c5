"""vLLM's scheduler as we see it: its own objects, made by hand with the fields that it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ess.adapters.vllm.requests import Order, Reached, Requests, salt_of
from ess.adapters.vllm.settings import Ranks, Settings, read_settings
from ess.errors import BadInput
from ess.transfer.messages import uid_of

LEAVES = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}


def request(
    name: str = "a", count: int = 100, params: Any = LEAVES, salt: str | None = None
) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        prompt_token_ids=list(range(count)),
        num_prompt_tokens=count,
        cache_salt=salt,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


def fresh(of: Any, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(
        req_id=of.request_id,
        prompt_token_ids=of.prompt_token_ids,
        block_ids=(blocks,),
        num_computed_tokens=computed,
    )


def output(
    new: Any = (), later: Any = (), counts: Any = None, preempted: Any = None, resumed: Any = ()
) -> Any:
    """`later` has (name, blocks or None, computed tokens)."""
    return SimpleNamespace(
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _, _ in later],
            new_block_ids=[None if blocks is None else (blocks,) for _, blocks, _ in later],
            num_computed_tokens=[computed for _, _, computed in later],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=counts or {},
        preempted_req_ids=preempted,
    )


def scheduling(tensor_count: int = 1) -> Requests:
    made = Requests(Settings(peers_host="10.0.0.1"), Ranks(tensor_count=tensor_count))
    made.reached({rank: Reached(0xABC + rank, 9000 + rank) for rank in range(tensor_count)})
    return made


def test_a_prompt_in_three_chunks_is_told_as_it_grows() -> None:
    requests, asked = scheduling(), request(count=100, salt="s")
    requests.admitted(asked)
    first = requests.step(output([fresh(asked, [7, 3])], counts={"a": 40})).orders
    second = requests.step(output(later=[("a", [9], 40)], counts={"a": 40})).orders
    third = requests.step(output(later=[("a", None, 80)], counts={"a": 20})).orders
    uid = first[0].uid
    prompt = tuple(range(100))
    assert first == (Order("a", uid, 40, (7, 3), prompt, salt_of("s")),)
    assert second == (Order("a", uid, 80, (9,), salt=salt_of("s")),)
    assert third == (Order("a", uid, 100, salt=salt_of("s")),)
    assert requests.step(output(later=[("a", None, 100)], counts={"a": 1})).orders == ()


def test_what_vllm_had_cached_counts_as_made() -> None:
    requests, asked = scheduling(), request(count=100)
    requests.admitted(asked)
    orders = requests.step(output([fresh(asked, [7, 3], computed=64)], counts={"a": 36})).orders
    assert orders[0].stop == 100


def test_the_answer_says_where_the_rows_are() -> None:
    requests, asked = scheduling(), request()
    requests.admitted(asked)
    uid = requests.step(output([fresh(asked, [7, 3])], counts={"a": 100})).orders[0].uid
    keeps, params = requests.finished(asked, [7, 3])
    assert keeps
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"{0xABC:016x}",
        "remote_block_ids": [7, 3],
        "remote_request_id": "a",
        "remote_host": "10.0.0.1",
        "remote_port": 9000,
        "tp_size": 1,
        "ess_rooms": [f"{uid:016x}"],
    }
    assert requests.is_pending
    assert requests.step(output()).finished == ("a",)
    assert requests.is_pending
    requests.sent(["a"])
    assert not requests.is_pending


def test_an_abort_or_half_a_prompt_keeps_nothing() -> None:
    for status, count in (("FINISHED_ABORTED", 100), ("FINISHED_LENGTH_CAPPED", 40)):
        requests, asked = scheduling(), request(count=100)
        asked.status.name = status
        requests.admitted(asked)
        requests.step(output([fresh(asked, [7, 3])], counts={"a": count}))
        assert requests.finished(asked, [7, 3]) == (False, None)
        assert requests.step(output()).given_up == ("a",)
        assert not requests.is_pending


def test_a_preempted_request_begins_anew() -> None:
    requests, asked = scheduling(), request(count=100)
    requests.admitted(asked)
    requests.step(output([fresh(asked, [7, 3])], counts={"a": 100}))
    assert requests.step(output(preempted={"a", "stranger"})).preempted == ("a",)
    again = requests.step(output(later=[("a", [1, 2], 0)], counts={"a": 50}, resumed=["a"]))
    uid, prompt = again.orders[0].uid, tuple(range(100))
    assert again.orders == (Order("a", uid, 50, (1, 2), prompt),)
    assert requests.finished(asked, [1, 2]) == (False, None)


def test_other_requests_are_vllms_own_affair() -> None:
    requests = scheduling()
    for number, params in enumerate((None, {}, {"do_remote_decode": False})):
        asked = request(str(number), params=params)
        requests.admitted(asked)
        assert requests.step(output([fresh(asked, [1])], counts={str(number): 9})).orders == ()
        assert requests.finished(asked, [1]) == (False, None)
    short = request(count=1)
    requests.admitted(short)
    assert requests.finished(short, [1]) == (False, None)
    assert not requests.is_pending


def test_requests_leave_from_all_ranks_alike() -> None:
    requests, ports = scheduling(tensor_count=4), []
    for number in range(64):
        asked = request(str(number))
        requests.admitted(asked)
        requests.step(output([fresh(asked, [1, 2])], counts={str(number): 100}))
        _, params = requests.finished(asked, [1, 2])
        rank = int(params["ess_rooms"][0], 16) % 4
        assert params["remote_port"] == 9000 + rank
        assert params["remote_engine_id"] == f"{0xABC + rank:016x}"
        ports.append(params["remote_port"])
    assert len(set(ports)) == 4


def test_both_legs_make_one_room_of_a_routers_id() -> None:
    assert room_of("xfer-1") == room_of("xfer-1") == uid_of("xfer-1") != room_of("xfer-2")
    assert room_of(None) != room_of(None)
    for wrong in ("", "x" * 257, 5):
        with pytest.raises(BadInput, match="transfer_id"):
            room_of(wrong)


def room_of(transfer_id: object) -> int:
    requests, asked = scheduling(), request(params={**LEAVES, "transfer_id": transfer_id})
    requests.admitted(asked)
    [order] = requests.step(output([fresh(asked, [1, 2])], counts={"a": 100})).orders
    return order.uid


def test_rows_in_several_groups_are_refused() -> None:
    requests, asked = scheduling(), request()
    requests.admitted(asked)
    entry = fresh(asked, [1])
    entry.block_ids = ([1], [2])
    with pytest.raises(BadInput, match="2 groups"):
        requests.step(output([entry], counts={"a": 100}))


def test_splits_that_no_rank_could_serve_alone_are_refused() -> None:
    Ranks(tensor_count=8, engine=3).check()
    for ranks, name in (
        (Ranks(pipeline_count=2), "--pipeline-parallel-size is 2"),
        (Ranks(context_count=4), "--decode-context-parallel-size is 4"),
    ):
        with pytest.raises(BadInput, match=name):
            ranks.check()
    assert Ranks(tensor_count=8, engine=2).port(8998, 5) == 8998 + 16 + 5
    assert Ranks(tensor_count=8, engine=2).port(0, 5) == 0


def test_settings_are_checked_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"kv_connector_extra_config is .*peer_port"):
        read_settings({"peer_port": 1})
    with pytest.raises(BadInput, match="peers_port"):
        read_settings({"peers_port": 70000})
    monkeypatch.delenv("ESS_PEER_SECRET", raising=False)
    with pytest.raises(BadInput, match="no secret: set secret_file"):
        read_settings({}).seal()
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes and more\n")
    monkeypatch.setenv("ESS_PEER_SECRET", "sixteen bytes and more")
    from_file, from_variable = read_settings({"secret_file": str(secret)}).seal(), Settings().seal()
    assert from_file._secret == from_variable._secret
