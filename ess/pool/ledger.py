"""Admission: one ledger over slots, index pages and host pages, all or nothing.

An account has a capacity, what its pool has really handed out (asked, never copied) and what has
been promised but not yet drawn. A reservation is promises in several accounts at once; drawing
turns a promise into pages. What is free is capacity - used - promised, so that neither a growing
sequence nor two sequences that share pages can ever over-commit a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ess.errors import PoolFull
from ess.units import format_bytes

Promise = Literal["all", "some"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """`name` is the word for the things it counts; refusals say with `times` how often each is
    held, and with `advice` how to get more."""

    name: str
    unit_bytes: int
    capacity: int
    times: str = ""
    advice: str = ""
    used: Callable[[], int] = field(default=lambda: 0, repr=False)


@dataclass(slots=True)
class Reservation:
    """Promises not yet drawn, by account. Only its ledger changes it."""

    promised: dict[str, int]
    is_open: bool = True


class Ledger:
    def __init__(self, accounts: Sequence[Account]) -> None:
        assert accounts, "a ledger without accounts refuses nothing"
        self._accounts = {account.name: account for account in accounts}
        assert len(self._accounts) == len(accounts), "two accounts share a name"
        self._open: list[Reservation] = []
        self._promised = dict.fromkeys(self._accounts, 0)

    def promised(self, name: str) -> int:
        return self._promised[name]

    def free(self, name: str) -> int:
        account = self._accounts[name]
        return account.capacity - account.used() - self.promised(name)

    def capacities(self) -> dict[str, int]:
        return {name: account.capacity for name, account in self._accounts.items()}

    def limit(self, capacities: Mapping[str, int]) -> None:
        """Admits from now on no more than these, which may be less than the pools hold."""
        assert not self._open, "reservations were made before the limit"
        for name, count in capacities.items():
            account = self._accounts[name]
            assert 0 < count <= account.capacity, f"{count} {name} of {account.capacity}"
            self._accounts[name] = replace(account, capacity=count)

    def reserve(self, needs: Mapping[str, int]) -> Reservation:
        """Reserves all of `needs`, or raises PoolFull naming the account that falls shortest."""
        self.require_free(needs)
        reservation = Reservation({name: needs.get(name, 0) for name in self._accounts})
        self._open.append(reservation)
        self._add(reservation.promised)
        return reservation

    def require(self, needs: Mapping[str, int]) -> None:
        """Raises a permanent PoolFull if not even empty pools could hold `needs`."""
        for name, count in needs.items():
            if count > self._accounts[name].capacity:
                raise self._refusal(self._accounts[name], count, self.free(name))

    def require_free(self, needs: Mapping[str, int]) -> None:
        """Raises PoolFull, naming the account that falls shortest, unless there is room now."""
        assert all(count >= 0 for count in needs.values()), needs
        short = [name for name, count in needs.items() if count > self.free(name)]
        if short:
            worst = min(short, key=lambda name: self.free(name) / max(needs[name], 1))
            raise self._refusal(self._accounts[worst], needs[worst], self.free(worst))

    def extend(self, reservation: Reservation, needs: Mapping[str, int]) -> None:
        assert reservation.is_open, "a released reservation cannot grow"
        self.require_free(needs)
        for name, count in needs.items():
            reservation.promised[name] += count
        self._add(needs)

    def draw(self, reservation: Reservation, name: str, count: int) -> None:
        """The pool has handed out `count` units: they are a promise no longer."""
        assert reservation.is_open, "a released reservation was drawn on"
        assert 0 <= count <= reservation.promised[name], (name, count, reservation.promised[name])
        reservation.promised[name] -= count
        self._promised[name] -= count

    def release(self, reservation: Reservation) -> None:
        assert reservation.is_open, "a reservation is released once"
        reservation.is_open = False
        self._open = [other for other in self._open if other is not reservation]
        self._add({name: -count for name, count in reservation.promised.items()})

    def _add(self, counts: Mapping[str, int]) -> None:
        """Adds to the sums of all promises, which each new page of a sequence asks for."""
        for name, count in counts.items():
            self._promised[name] += count

    def _refusal(self, account: Account, needed: int, free: int) -> PoolFull:
        permanent = needed > account.capacity
        verdict = (
            f"more than the pool's {format_bytes(account.capacity * account.unit_bytes)}"
            if permanent
            else f"{format_bytes(max(free, 0) * account.unit_bytes)} free"
        )
        shortage = sentence = (
            f"needs {needed:,} {account.name}{account.times} = "
            f"{format_bytes(needed * account.unit_bytes)}, {verdict}"
        )
        if account.advice:
            sentence += f"; {account.advice}" + ("" if permanent else ", or close a sequence")
        return PoolFull(
            limiter=account.name,
            needed=needed,
            free=max(free, 0),
            permanent=permanent,
            sentence=sentence,
            shortage=shortage,
        )

    def check(self) -> None:
        for name in self._accounts:
            listed = sum(reservation.promised[name] for reservation in self._open)
            assert self.promised(name) == listed >= 0, f"{name}: {listed} promises are listed"
            assert self.free(name) >= 0, f"{name}: over-committed by {-self.free(name)}"
        assert all(reservation.is_open for reservation in self._open), (
            "a closed reservation is listed"
        )
