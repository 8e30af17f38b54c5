"""Answers to one prompt (`n`): the first request prefills the prompt, the others follow.

A follower waits on no roster until the prompt of its leader is there; then it is forked: full pages
are shared, the partial one is copied. If the leader ends before that, its first follower leads the
others. A request that asks for the chances of its prompt computes the prompt itself and follows no
leader. A follower that is not forked, because there is no room or because the leader's prompt was
already there, enters as any other request does, and finds the leader's full pages as a cached
prefix.
"""

from __future__ import annotations

from ess.engine.requests.request import Request


class Followers:
    def __init__(self) -> None:
        self._of: dict[Request, list[Request]] = {}

    def hold(self, request: Request, leader: Request | None) -> bool:
        """Whether the request waits here, for the prompt of the leader or of the leader's own
        leader."""
        leader = leader and leader.first_leader
        if leader is None or leader.reason is not None or leader.has_prompt:
            return False
        if (request.prompt, request.length_max) != (leader.prompt, leader.length_max):
            return False
        if request.salt != leader.salt or request.prior_output or leader.prior_output:
            return False
        if request.sampling.prompt_logprobs is not None:
            return False
        assert request is not leader, f"request {request.number} follows itself"
        assert request not in self._of, f"request {request.number} leads others, and cannot follow"
        assert request.state == "waiting", f"request {request.number} is {request.state} already"
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
        """The requests that have waited for this leader; from now on none of them waits here."""
        return self._of.pop(leader, [])

    def succeed(self, leader: Request) -> Request | None:
        """The leader has ended before its prompt was there: its first follower leads the others,
        and enters. None if the leader had no follower."""
        assert leader.reason is not None, f"request {leader.number} has not ended"
        followers = self.release(leader)
        if not followers:
            return None
        heir, *others = followers
        assert heir not in self._of, f"request {heir.number} leads and follows"
        self._of[heir] = others
        return heir

    def waiting(self) -> list[Request]:
        return [request for followers in self._of.values() for request in followers]

    def check(self) -> None:
        followers = self.waiting()
        assert len(set(followers)) == len(followers), "a request waits for two leaders"
        assert not self._of.keys() & set(followers), "a follower leads others"
        for leader, held in self._of.items():
            assert leader.reason is None, f"leader {leader.number} has ended and holds followers"
            assert not leader.has_prompt, f"leader {leader.number} has its prompt: none may wait"
            for request in held:
                name = f"follower {request.number} of {leader.number}"
                assert request.state == "waiting", f"{name} is {request.state}"
                assert request.prompt == leader.prompt, f"{name} has another prompt"
                assert request.length_max == leader.length_max, f"{name} has another length"
