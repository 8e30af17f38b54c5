"""How requests come to an engine, or to the lead of a pipeline: made, numbered, led to the roster.

A request that shares the prompt of a leader waits with that leader, and comes to the roster when
the leader has ended, or where it is not forked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict, Unpack

from ess.door.checks import token_ids, whole
from ess.engine.requests.followers import Followers
from ess.engine.requests.request import Request, Take
from ess.engine.requests.roster import Roster
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput
from ess.units import shown


class RequestOptions(TypedDict, total=False):
    """The options of a request, beside its prompt and its sampling.

    Requests of a lower `priority` value are admitted and resumed first, and preempted last. With a
    `leader`, a request of the same prompt and length, the prompt is prefilled once. Requests of
    different `salt` share no cached prefix. In the handoff `give` the prompt's rows go to another
    worker, and the request ends when they are made; with `take` they come from another worker.
    `prior_output` are the first tokens of its output, which another engine has made.
    """

    priority: int
    leader: Request | None
    salt: bytes
    give: int | None
    take: Take | None
    prior_output: Sequence[int]


def check_kinds(sampling: Sampling | None, options: RequestOptions) -> None:
    """BadInput where a request's sampling, or one of its options, is of the wrong kind."""
    for name in options.keys() - RequestOptions.__annotations__.keys():
        raise BadInput(f"{name} is no option of a request")
    given = {"sampling": sampling, **options}
    for name, kind in (("sampling", Sampling), ("leader", Request), ("take", Take)):
        if not isinstance(value := given.get(name), kind | None):
            raise BadInput(f"{name} is {shown(value)}, must be a {kind.__name__} or None")
    if not isinstance(salt := given.get("salt", b""), bytes):
        raise BadInput(f"salt is a {type(salt).__name__}, must be bytes")
    whole("priority", given.get("priority", 0))
    if (give := given.get("give")) is not None:
        whole("give", give)
    if isinstance(take := given.get("take"), Take):
        whole("take.uid", take.uid)
        whole("take.peer", take.peer)


class Intake:
    """The waiting requests of one engine; `on_first` is called when a request has become the first
    that waits. Requests have an empty object in the engine's place, by which it knows its own: a
    request that the caller keeps does not keep the engine's memory."""

    def __init__(self, roster: Roster[Request], *, on_first: Callable[[], None]) -> None:
        self.followers = Followers()
        self._owner = object()
        self._roster = roster
        self._on_first = on_first
        self._made_count = 0

    def made(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None,
        **options: Unpack[RequestOptions],
    ) -> Request:
        """A request that has yet to `enter`. The later one has the higher number."""
        check_kinds(sampling, options)
        leader = options.get("leader")
        if leader is not None:
            self.require_own(leader)
        request = Request(
            number=self._made_count,
            prompt=token_ids("prompt", prompt),
            sampling=sampling or Sampling(),
            priority=options.get("priority", 0),
            leader=leader,
            salt=options.get("salt", b""),
            gives=options.get("give"),
            takes=options.get("take"),
            prior_output=tuple(token_ids("prior_output", options.get("prior_output", ()))),
            owner=self._owner,
        )
        self._made_count += 1
        return request

    def require_own(self, request: Request) -> None:
        if request.owner is not self._owner:
            raise BadInput(f"request {request.number} was added to another engine")

    def enter(self, request: Request) -> None:
        assert request.state == "waiting", f"request {request.number} is {request.state}"
        if request.refusal is None and self.followers.hold(request, request.leader):
            return
        self._roster.add(request)
        if request.refusal is None and self._roster.first_waiting() is request:
            self._on_first()

    def leave(self, request: Request) -> None:
        """The request follows no leader any more."""
        self.require_own(request)
        if self.followers.give_up(request):
            self._roster.add(request)

    def ended(self, leader: Request) -> None:
        """The first request that has waited for this leader leads the others, and enters."""
        heir = self.followers.succeed(leader)
        if heir is not None:
            self.enter(heir)
