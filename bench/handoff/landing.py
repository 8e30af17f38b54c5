"""The time from a prompt's last layer to its first decode step.

Two processes of one thread each: one prefills, one decodes. Between them is TCP over a link so slow
that the rows of a prompt take half as long as the prompt. Layer by layer, the decode worker
requests the rows when the prompt begins; all at once, when it is complete. The hidden part of the
link's time is the part before the end of the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ess import console
from ess.bench.handoff.child import Child
from ess.bench.handoff.workers import UNPACED, Worker, WorkerSizes
from ess.bench.harness.report import Row, compare
from ess.bench.harness.text import token_ids
from ess.engine.requests.request import Request, Take
from ess.engine.tokens.sampling import Sampling
from ess.errors import BadInput, BadState
from ess.units import PAGE_ROWS

MODULE: Final = "ess.bench.handoff.prefill_process"
LINK_SHARE: Final = 0.5
HIDDEN_TARGET: Final = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingTimes:
    """Seconds from the prompt's last layer until its rows had landed and until its first token."""

    prompt_s: float
    landed_s: float
    first_token_s: float


def landing_rows(length: int, *, rounds: int) -> list[Row]:
    console.note(f"  {length:,} tokens, landings in turn ...")
    shape = WorkerSizes(context=length)
    prompts = _prompts(length, 2 * rounds + 1)
    with Pair(shape) as pair:
        free = pair.hand_over(prompts[0], bytes_per_s=UNPACED, at_once=False)
        # Rows and index keys of whole pages; the windows are some KB more.
        layout = pair.decode.offload.layout
        size = layout.pages_of(length - 1) * layout.host_page_bytes
        link_s = LINK_SHARE * free.prompt_s
        console.note(f"  {free.prompt_s:.1f} s of prompt, {link_s:.1f} s of link")
        arms: dict[bool, list[LandingTimes]] = {False: [], True: []}
        for at, prompt in enumerate(prompts[1:]):
            at_once = bool(at % 2)
            arms[at_once].append(pair.hand_over(prompt, bytes_per_s=size / link_s, at_once=at_once))
    return _rows(length, size, link_s, arms[False], arms[True])


def _rows(
    length: int,
    size: int,
    link_s: float,
    layerwise: Sequence[LandingTimes],
    whole: Sequence[LandingTimes],
) -> list[Row]:
    config = {
        "prompt_s": round(statistics.median(each.prompt_s for each in layerwise), 2),
        "link_s": round(link_s, 2),
        "MB": round(size / 1e6, 1),
        "mtp": 2,
    }
    hidden, at_once = ([1 - each.landed_s / link_s for each in arm] for arm in (layerwise, whole))
    value = statistics.median(hidden)
    return [
        compare(
            name=f"{length:,} tokens: prompt's end to first token, layer by layer",
            unit="ms",
            ours=[1e3 * each.first_token_s for each in layerwise],
            baseline=("all at once", [1e3 * each.first_token_s for each in whole]),
            config=config,
        ),
        Row(
            name=f"{length:,} tokens: the link's time that is hidden",
            value=value,
            unit="of 1",
            baseline="target",
            baseline_value=HIDDEN_TARGET,
            ratio=value / HIDDEN_TARGET,
            target=1.0,
            met=value >= HIDDEN_TARGET,
            config=config | {"at_once": round(statistics.median(at_once), 2)},
            samples=hidden,
        ),
    ]


def _prompts(length: int, count: int) -> list[list[int]]:
    """Parts of the text that begin differently, so that no two share a prefix."""
    ids, name = token_ids()
    stride = max(PAGE_ROWS, (len(ids) - length) // max(1, count))
    if len(ids) < length + (count - 1) * stride:
        raise BadInput(f"{name} has {len(ids):,} tokens: too few for {count} prompts of {length:,}")
    return [ids[at * stride : at * stride + length] for at in range(count)]


class Pair:
    """A decode worker here, a prefill worker in another process."""

    def __init__(self, shape: WorkerSizes) -> None:
        self._shape = shape
        self._uid = 0

    def __enter__(self) -> Pair:
        self.decode = Worker(self._shape)
        self._child = Child(MODULE, msgspec.json.encode(self._shape).decode())
        self._peer = self.decode.port.meet(bytes.fromhex(self._child.hear()["metadata"]))
        self._child.tell(meet=self.decode.port.metadata().hex())
        return self

    def __exit__(self, *error: object) -> None:
        self._child.__exit__(None, None, None)
        self.decode.close()

    def hand_over(self, prompt: list[int], *, bytes_per_s: float, at_once: bool) -> LandingTimes:
        self._uid += 1
        self._child.tell(uid=self._uid, prompt=prompt, bytes_per_s=bytes_per_s)
        made = self._made_while_pumping() if at_once else None
        request = self._taken(prompt)
        landed_s, first_s = self._landed(request)
        made = made or self._made_while_pumping()
        self._finish(request)
        return LandingTimes(
            prompt_s=made["took_s"],
            landed_s=max(0.0, landed_s - made["made_s"]),
            first_token_s=first_s - made["made_s"],
        )

    def _made_while_pumping(self) -> dict[str, Any]:
        made: dict[str, Any] = self._child.hear(meanwhile=self.decode.engine.pump)
        if made["reason"] != "sent":
            raise BadState(f"the prefill worker ended the prompt as {made['reason']!r}")
        return made

    def _taken(self, prompt: list[int]) -> Request:
        wish = Sampling(tokens_max=4, ignore_eos=True)
        return self.decode.engine.add(prompt, wish, take=Take(self._uid, self._peer))

    def _landed(self, request: Request) -> tuple[float, float]:
        engine, clock = self.decode.engine, self.decode.clock
        engine.step()
        while request.state == "landing":
            engine.pump()
        landed_s = clock.now_s()
        while not request.output:
            if engine.step().chunks:
                raise BadState("rows were missed, and the decode worker computes them itself")
        return landed_s, clock.now_s()

    def _finish(self, request: Request) -> None:
        while request.state != "finished":
            self.decode.engine.step()
        self.decode.offload.forget_prefixes()
