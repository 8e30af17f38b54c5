"""Choices of one prompt: the first of them prefills it, the others follow.

A follower waits on no roster until the prompt of its leader is there; then it is forked: full pages
are shared, the partial one is copied. If the leader ends before that, its first follower leads the
others. Who is not forked, because there is no room or the leader was too far on, enters as anybody
does and finds the leader's full pages as a cached prefix.
"""

from __future__ import annotations

from ess.engine.request import Request


class Followers:
    def __init__(self) -> None:
        self._of: dict[Request, list[Request]] = {}

    def hold(self, request: Request, leader: Request | None) -> bool:
        """Whether it waits for the prompt of the leader, or of whom that one follows."""
        while leader is not None and leader.leader is not None:
            leader = leader.leader
        if leader is None or leader.reason is not None or leader.is_prefilled:
            return False
        if (request.prompt, request.length_max) != (leader.prompt, leader.length_max):
            return False
        assert request is not leader, f"request {request.number} follows itself"
        self._of.setdefault(leader, []).append(request)
        return True

    def give_up(self, request: Request) -> bool:
        """Whether the request was waiting here."""
        for held in self._of.values():
            if request in held:
                held.remove(request)
                return True
        return False

    def release(self, leader: Request) -> list[Request]:
        return self._of.pop(leader, [])

    def succeed(self, leader: Request) -> Request | None:
        """The leader has ended too early: who enters in its place."""
        followers = self.release(leader)
        if not followers:
            return None
        heir, *others = followers
        self._of[heir] = others
        return heir
