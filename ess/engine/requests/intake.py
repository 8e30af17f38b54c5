"""How requests come to an engine, or to the lead of a pipeline: made, numbered, led to the roster.

A request that shares the prompt of a leader waits with that leader, and comes to the roster when
the leader has ended, or where it is not forked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

from ess.door.checks import token_ids
from ess.engine.requests.followers import Followers
from ess.engine.requests.request import Request, Take
from ess.engine.requests.roster import Roster
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput


class RequestOptions(TypedDict, total=False):
    """The options of a request, beside its prompt and its sampling.

    Requests of a lower `priority` value are admitted and resumed first, and preempted last. With a
    `leader`, a request of the same prompt and length, the prompt is prefilled once. Requests of
    different `salt` share no cached prefix. In the handoff `give` the prompt's rows go to another
    worker, and the request ends when they are made; with `take` they come from another worker.
    `said` are the first tokens of its output, which another engine has made.
    """

    priority: int
    leader: Request | None
    salt: bytes
    give: int | None
    take: Take | None
    said: Sequence[int]


class Intake:
    """The waiting requests of one `owner`; `on_first` is called when a request has become the
    first that waits."""

    def __init__(
        self, owner: object, roster: Roster[Request], *, on_first: Callable[[], None]
    ) -> None:
        self.followers = Followers()
        self._owner = owner
        self._roster = roster
        self._on_first = on_first
        self._made_count = 0

    def made(
        self,
        prompt: Sequence[int],
        sampling: Sampling | None,
        *,
        priority: int = 0,
        leader: Request | None = None,
        salt: bytes = b"",
        give: int | None = None,
        take: Take | None = None,
        said: Sequence[int] = (),
    ) -> Request:
        """A request that has yet to `enter`. The later one has the higher number."""
        if leader is not None:
            self.require_own(leader)
        request = Request(
            number=self._made_count,
            prompt=token_ids("prompt", prompt),
            sampling=sampling or Sampling(),
            priority=priority,
            leader=leader,
            salt=salt,
            gives=give,
            takes=take,
            said=tuple(said),
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
