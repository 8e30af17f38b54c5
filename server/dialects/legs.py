"""What PD routers add to a body: where a prompt's rows go, or where they come from.

    A, SGLang   bootstrap_host, bootstrap_port, bootstrap_room: the same in both legs, at once
    B, vLLM     kv_transfer_params: do_remote_decode in the prefill leg, whose answer has what the
                decode leg then gets, with do_remote_prefill
    B, Mooncake both legs, at once, have the same transfer_id, and the decode leg an address

A router of one kind passes on what a client has sent of the other's: a complete A counts first, as
its routers overwrite it, then B. A worker of role both ignores all of it. A prefill worker serves
only such requests: its answer has no text, and ends when the prompt is complete. A decode worker
without them computes the prompt itself. No address in a request is ever dialled: it is looked up
among the configured peers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from starlette.requests import Request

from ess.engine.process.messages import Handoff
from ess.errors import BadInput
from ess.server.dialects.schemas import EXACT_MAX, Generated, sampled_of
from ess.server.process.pair.addresses import HOST_CHARS_MAX, Address, address_of, read_address
from ess.server.process.pair.peers import Peer, engine_id
from ess.server.process.service import Service
from ess.transfer.messages import UID_BITS, UID_MAX, new_uid, uid_of
from ess.units import counted

FAKE_HOST: Final = "2.2.2.2"
EPOCH: Final = re.compile(r"[0-9a-f]{16}")
PARAMS: Final = "kv_transfer_params"
BY_TOKENS: Final = (
    *("echo", "logprobs", "top_logprobs", "prompt_logprobs"),
    *("return_logprob", "logprob_start_len", "top_logprobs_num"),
)


@dataclass(frozen=True, slots=True)
class Leg:
    """`handoffs` has one per prompt, or none; `params` go into the answer."""

    handoffs: tuple[Handoff, ...] = ()
    params: Mapping[str, Any] | None = None


def leg_of(request: Request, ask: Generated, prompt_count: int) -> Leg:
    service: Service = request.app.state.service
    if service.split.role == "both":
        return Leg()
    service.check_state()
    if service.split.role == "prefill":
        return _prefill_leg(service, request, ask, prompt_count)
    return _decode_leg(service, ask, prompt_count)


# ---- the prefill leg


def _prefill_leg(service: Service, request: Request, ask: Generated, prompt_count: int) -> Leg:
    params = _params(ask)
    if _is_bootstrapped(ask):
        rooms = _rooms(ask, prompt_count)
        answer = None
    elif params.get("do_remote_decode") is True:
        given = params.get("transfer_id")
        rooms = [
            new_uid() if given is None else uid_of(given, place) for place in range(prompt_count)
        ]
        answer = _answer_params(service, request, rooms)
    else:
        raise BadInput(
            "bootstrap_room is missing, and kv_transfer_params.do_remote_decode too: a prefill"
            " worker serves what a router for prefill and decode sends it; send this to the router"
        )
    _drop_wishes(ask)
    return Leg(tuple(Handoff(room, kind="give") for room in rooms), answer)


def _drop_wishes(ask: Generated) -> None:
    """Clears fields about the answer's tokens: they were checked, and there will be no tokens."""
    for asked in (ask, getattr(ask, "sampling_params", None)):
        for name in BY_TOKENS:
            if hasattr(asked, name):
                setattr(asked, name, None)


def _answer_params(service: Service, request: Request, rooms: Sequence[int]) -> dict[str, Any]:
    """The decode leg returns this unchanged, except that numbers may become doubles: so rooms and
    epochs are texts. The host is the name by which the router reached this worker."""
    called = service.split.called(request.headers.get("host", ""))
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id(service.epoch),
        "remote_block_ids": [],
        "remote_request_id": request.state.request_id,
        "remote_host": called.host,
        "remote_port": called.port,
        "tp_size": 1,
        "ess_rooms": [f"{room:016x}" for room in rooms],
    }


# ---- the decode leg


def _decode_leg(service: Service, ask: Generated, prompt_count: int) -> Leg:
    params = _params(ask)
    if _is_bootstrapped(ask):
        return _leg_of_sglang(service, ask, prompt_count)
    if params.get("do_remote_prefill") is True:
        return _leg_of_vllm(service, params, prompt_count)
    for name in ("bootstrap_host", "bootstrap_room"):
        if getattr(ask, name) is not None and params.get("do_remote_decode") is not True:
            raise BadInput(
                f"{name} is given alone: a handoff needs bootstrap_host and bootstrap_room"
            )
    return Leg()


def _leg_of_sglang(service: Service, ask: Generated, prompt_count: int) -> Leg:
    rooms = _rooms(ask, prompt_count)
    hosts = _per_prompt("bootstrap_host", ask, prompt_count)
    if FAKE_HOST in hosts:
        return _fake_leg(service, rooms)
    ports = _per_prompt("bootstrap_port", ask, prompt_count)
    addresses = [
        _address(host, port, "bootstrap_host", "bootstrap_port")
        for host, port in zip(hosts, ports, strict=True)
    ]
    peers = {address: _peer(service, address, "bootstrap_host") for address in addresses}
    return Leg(
        tuple(
            Handoff(room, peers[address].epoch, "take")
            for room, address in zip(rooms, addresses, strict=True)
        )
    )


def _fake_leg(service: Service, rooms: Sequence[int]) -> Leg:
    if not service.split.allows_fake:
        raise BadInput(
            f"bootstrap_host is {FAKE_HOST!r}, which asks for invented rows: this server was not"
            " started with --fake-prefill"
        )
    return Leg(tuple(Handoff(room, kind="fake") for room in rooms))


def _leg_of_vllm(service: Service, params: Mapping[str, Any], prompt_count: int) -> Leg:
    given = params.get("transfer_id")
    if given is not None:
        peer = _peer(service, _bootstrap_address(params), f"{PARAMS}.remote_bootstrap_addr")
        return _taking(peer, [uid_of(given, place) for place in range(prompt_count)])
    named = (f"{PARAMS}.remote_host", f"{PARAMS}.remote_port")
    address = _address(params.get("remote_host"), params.get("remote_port"), *named)
    peer = _peer(service, address, named[0])
    _check_epoch(service, peer, params.get("remote_engine_id"))
    return _taking(peer, _read_rooms(params.get("ess_rooms"), prompt_count))


def _taking(peer: Peer, rooms: Sequence[int]) -> Leg:
    return Leg(tuple(Handoff(room, peer.epoch, "take") for room in rooms))


def _bootstrap_address(params: Mapping[str, Any]) -> Address:
    where, given = f"{PARAMS}.remote_bootstrap_addr", params.get("remote_bootstrap_addr")
    if not isinstance(given, str):
        raise BadInput(f"{where} must be a text such as http://10.0.0.1:8998")
    return read_address(given.removeprefix("http://").removesuffix("/"), where=where)


def _peer(service: Service, address: Address, where: str) -> Peer:
    """The peer at an address. An address that --peers lacks is refused, never looked up."""
    peers = service.split.peers
    peer = None if peers is None else peers.find(address)
    if peer is None:
        raise BadInput(
            f"{where} is {str(address)!r:.300}: --peers of this server has no such worker"
        )
    if not peer.is_up:
        sentence = f"the prefill worker {address} is not up: {peer.why}"
        raise service.refused(sentence, "peer_down", 2.0)
    return peer


def _check_epoch(service: Service, peer: Peer, given: object) -> None:
    where = f"{PARAMS}.remote_engine_id"
    if not isinstance(given, str) or EPOCH.fullmatch(given) is None:
        raise BadInput(f"{where} must be the id that an ESS prefill worker has returned")
    if given != engine_id(peer.epoch):
        sentence = f"{where} is {given}, but the prefill worker there was started again since then"
        raise service.refused(sentence, "peer_restarted", 1.0)


# ---- fields


def _is_bootstrapped(ask: Generated) -> bool:
    return ask.bootstrap_host is not None and ask.bootstrap_room is not None


def _params(ask: Generated) -> Mapping[str, Any]:
    given = ask.kv_transfer_params
    if given is not None and not isinstance(given, dict):
        raise BadInput(f"{PARAMS} must be an object")
    return given or {}


def _per_prompt(name: str, ask: Generated, count: int) -> list[Any]:
    """A value for each prompt: a single value is for all prompts, a list has one for each. For a
    chat with `n` answers routers write a list of `n`; the answers share the rows of the first."""
    given = getattr(ask, name)
    if not isinstance(given, list):
        return [given] * count
    if len(given) not in (count, count * _answer_count(ask)):
        raise BadInput(f"{name} has {len(given):,} entries for {counted(count, 'prompt')}")
    return given[:count]


def _answer_count(ask: Generated) -> int:
    """How many answers each prompt gets; `n` is checked elsewhere."""
    count = getattr(next(iter(sampled_of(ask).values())), "n", 1)
    return count if isinstance(count, int) else 1


def _rooms(ask: Generated, count: int) -> list[int]:
    """The room of each prompt; a single room is the first's, and both legs count up from it."""
    if isinstance(ask.bootstrap_room, list):
        rooms = map(_room, _per_prompt("bootstrap_room", ask, count))
        return _unique([*rooms], "bootstrap_room")
    first = _room(ask.bootstrap_room)
    return [(first + place) & UID_MAX for place in range(count)]


def _room(given: object) -> int:
    room = _whole(given)
    if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room <= UID_MAX:
        raise BadInput(
            f"bootstrap_room has {given!r:.40}, not an integer of {UID_BITS} bits (with a point at"
            " most 2**53)"
        )
    return room


def _read_rooms(given: object, count: int) -> list[int]:
    where = f"{PARAMS}.ess_rooms"
    try:
        texts = msgspec.convert(given, list[str])
    except msgspec.ValidationError:
        texts = []
    if len(texts) != count or not all(EPOCH.fullmatch(text) for text in texts):
        raise BadInput(
            f"{where} must have the {count} rooms that an ESS prefill worker has returned"
        )
    rooms = [int(text, 16) for text in texts]
    if max(rooms) > UID_MAX:
        raise BadInput(f"{where} has a room of more than {UID_BITS} bits")
    return _unique(rooms, where)


def _unique(rooms: list[int], where: str) -> list[int]:
    if len(set(rooms)) < len(rooms):
        raise BadInput(f"{where} has the same room for two prompts")
    return rooms


def _address(host: object, port: object, named_host: str, named_port: str) -> Address:
    if not isinstance(host, str) or not 0 < len(host) <= HOST_CHARS_MAX:
        raise BadInput(f"{named_host} must be a text of 1 to {HOST_CHARS_MAX} characters")
    port = _whole(port)
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port <= 65535:
        raise BadInput(f"{named_port} is {port!r:.40}, not a port")
    return address_of(host, port)


def _whole(number: object) -> object:
    """An integer for a number such as 5.0, as far as floats have all of them."""
    is_whole = isinstance(number, float) and number.is_integer() and abs(number) < EXACT_MAX
    return int(cast(float, number)) if is_whole else number
