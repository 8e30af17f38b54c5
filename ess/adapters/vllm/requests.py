"""In vLLM's scheduler: which requests leave for a decode worker, and how far each step is.

A request leaves when its `kv_transfer_params` have do_remote_decode, as every router for prefill
and decode sends it. Its room is the uid of the handoff: drawn here, or made from the router's
transfer_id where it starts both legs at once. Every step tells the workers, per request, the added
blocks and how many prompt tokens are computed at the end of the step. When the prompt is complete
vLLM keeps the blocks until a worker says that they are sent; the answer says where the rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ess.adapters.vllm.settings import Ranks, Settings
from ess.errors import BadInput
from ess.transfer.messages import new_uid, uid_of

SENT_STATES: Final = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")


@dataclass(frozen=True, slots=True)
class Order:
    """The first `stop` tokens of the prompt have rows when the step ends. With a `prompt` the
    request begins, or begins anew in other blocks; without it, `blocks` are added."""

    name: str
    uid: int
    stop: int
    blocks: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class StepOrders:
    """From the scheduler to all workers. `finished` prompts are complete and their blocks are kept;
    `given_up` requests have lost their blocks, for good or until they are scheduled again."""

    orders: tuple[Order, ...] = ()
    finished: tuple[str, ...] = ()
    given_up: tuple[str, ...] = ()
    preempted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reached:
    """The port where decode workers connect to a rank, and the rank's boot epoch."""

    epoch: int
    port: int


@dataclass(slots=True)
class _Leaving:
    uid: int
    salt: str
    prompt: tuple[int, ...]
    made_count: int = 0

    @property
    def token_count(self) -> int:
        return len(self.prompt)


@dataclass(slots=True)
class _News:
    finished: list[str] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)


class Requests:
    def __init__(self, settings: Settings, ranks: Ranks) -> None:
        self._settings = settings
        self._ranks = ranks
        self._leaving: dict[str, _Leaving] = {}
        self._kept: set[str] = set()
        self._reached: dict[int, Reached] = {}
        self._news = _News()

    @property
    def is_pending(self) -> bool:
        """Whether blocks are kept for rows that are being sent, or workers lack the latest news."""
        return bool(self._kept or self._news.finished or self._news.given_up)

    def reached(self, ranks: Mapping[int, Reached]) -> None:
        self._reached.update(ranks)

    def admitted(self, request: Any) -> None:
        """vLLM has found room for a request; it calls again if rows come from elsewhere."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode") is not True or request.request_id in self._leaving:
            return
        if not request.prompt_token_ids or request.num_prompt_tokens < 2:
            return
        transfer_id = params.get("transfer_id")
        self._leaving[request.request_id] = _Leaving(
            uid=new_uid() if transfer_id is None else uid_of(transfer_id),
            salt=salt_of(getattr(request, "cache_salt", None)),
            prompt=tuple(request.prompt_token_ids),
        )

    def step(self, output: Any) -> StepOrders:
        """The part of vLLM's next step that concerns requests that leave."""
        preempted = tuple(sorted((output.preempted_req_ids or set()) & self._leaving.keys()))
        for name in preempted:
            self._leaving[name].made_count = 0
        orders = [*self._new_orders(output), *self._continued_orders(output)]
        news, self._news = self._news, _News()
        return StepOrders(tuple(orders), tuple(news.finished), tuple(news.given_up), preempted)

    def finished(self, request: Any, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM is to keep the blocks, and the parameters that its answer carries."""
        name = request.request_id
        leaving = self._leaving.pop(name, None)
        if leaving is None:
            return False, None
        is_made = leaving.made_count >= leaving.token_count - 1
        if request.status.name not in SENT_STATES or not is_made:
            self._news.given_up.append(name)
            return False, None
        self._news.finished.append(name)
        self._kept.add(name)
        return True, self._params(name, leaving, blocks)

    def sent(self, names: Sequence[str]) -> None:
        """Workers have sent these: vLLM may free their blocks."""
        self._kept.difference_update(names)

    def _new_orders(self, output: Any) -> list[Order]:
        orders = []
        for fresh in output.scheduled_new_reqs:
            leaving = self._leaving.get(fresh.req_id)
            if leaving is not None:
                orders.append(
                    Order(
                        name=fresh.req_id,
                        uid=leaving.uid,
                        stop=self._stop(output, fresh.req_id, fresh.num_computed_tokens),
                        blocks=only_group(fresh.block_ids),
                        prompt=leaving.prompt,
                        salt=leaving.salt,
                    )
                )
        return orders

    def _continued_orders(self, output: Any) -> list[Order]:
        later, orders = output.scheduled_cached_reqs, []
        for place, name in enumerate(later.req_ids):
            leaving = self._leaving.get(name)
            if leaving is None:
                continue
            computed_count, groups = later.num_computed_tokens[place], later.new_block_ids[place]
            blocks = () if groups is None else only_group(groups)
            prompt = leaving.prompt if name in later.resumed_req_ids else ()
            if prompt or leaving.made_count < leaving.token_count:
                stop = self._stop(output, name, computed_count)
                orders.append(Order(name, leaving.uid, stop, blocks, prompt, leaving.salt))
        return orders

    def _stop(self, output: Any, name: str, computed_count: int) -> int:
        leaving = self._leaving[name]
        scheduled_count: int = output.num_scheduled_tokens[name]
        stop = min(computed_count + scheduled_count, leaving.token_count)
        leaving.made_count = max(leaving.made_count, stop)
        return stop

    def _params(self, name: str, leaving: _Leaving, blocks: Sequence[int]) -> dict[str, Any]:
        """The answer of vLLM's own connectors, plus the room. Numbers that a router may turn into a
        double are sent as text."""
        rank = self._ranks.source(leaving.uid)
        if rank not in self._reached:
            raise BadInput(f"rank {rank} has not said where it can be reached: update vLLM")
        reached = self._reached[rank]
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{reached.epoch:016x}",
            "remote_block_ids": list(blocks),
            "remote_request_id": name,
            "remote_host": self._settings.peers_host,
            "remote_port": reached.port,
            "tp_size": self._ranks.tensor_count,
            "ess_rooms": [f"{leaving.uid:016x}"],
        }


def only_group(groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The blocks of the only group. vLLM groups layers whose blocks differ; sparse attention has
    its rows and keys in one."""
    if len(groups) != 1:
        raise BadInput(f"vLLM keeps this model's rows in {len(groups)} groups of layers, must be 1")
    return tuple(groups[0])


def salt_of(cache_salt: str | None) -> str:
    """A request's salt as ESS servers spell it: rows under different salts are different rows."""
    return f"{len(cache_salt)} {cache_salt}" if cache_salt else ""
