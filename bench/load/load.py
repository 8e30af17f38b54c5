"""`ess-bench load`: arriving requests against a server, with figures as its users see them.

The server may be any with `/v1/completions`; without `--url` an `ess serve` is started for it. The
same seed offers the same requests at the same times, so two servers can be compared, or one with
two settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import cyclopts

from ess import console
from ess.bench.engine.serve import started
from ess.bench.harness.measure.streaming import address_of
from ess.bench.harness.report import Row
from ess.bench.load.figures import load_rows
from ess.bench.load.offered import OfferedLoad, Target, offer
from ess.bench.load.prompts import Kind, LoadRequest, Prompts, arriving, asked_of, read_prompts
from ess.console import MaybeWhole, Whole
from ess.errors import BadInput, Unavailable
from ess.sim.serving.arrivals import Arrival, read_arrivals
from ess.sim.serving.goodput import Objective
from ess.sim.serving.traffic import Mix, at_rate, check_seed, draw
from ess.units import parse_size

AT_ONCE: Final = math.inf
LOOK_S: Final = 30.0
WARM_UP: Final = 2
OUT: Final = 64


@cyclopts.Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFlags:
    """What arrives, and when."""

    requests: Whole = 64
    "How many requests: drawn, or the first of a file or a trace."
    rate: float = AT_ONCE
    "Requests per second; inf sends all at once. Stretches a trace in time."
    burst: float = 1.0
    "1 is a Poisson process; less comes in bursts, more comes evenly (shape of gamma gaps)."
    prompt: str = "512"
    "Tokens of a drawn prompt, in the mean."
    out: Whole = OUT
    "Tokens of a drawn answer, in the mean; the most of an answer from a file."
    spread: float = 0.0
    "Deviation of the logarithm of drawn lengths: 0 makes all alike, 1 is like chat."
    kind: Kind = "text"
    "Drawn prompts: parts of a text, random ids, or shared, with prefixes in common."
    share: float = 0.5
    "With --kind shared: the share of each prompt that is its group's."
    groups: Whole = 4
    "With --kind shared: how many groups."
    file: Path | None = None
    "Prompts from a file: ShareGPT's JSON, or lines of prompt and output_tokens."
    trace: Path | None = None
    "Times, lengths and shared blocks from a trace: Mooncake JSONL or Azure CSV."
    seed: Whole = 0
    "Seed of arrivals, lengths and prompts."

    def asked(self) -> list[LoadRequest]:
        if self.file is not None and self.trace is not None:
            raise BadInput("--file and --trace: requests come from one of them")
        if self.file is not None:
            most = self._drawn().output_tokens
            asked = read_prompts(self.file, output_max=most, count=self.requests)
            return arriving(asked, self._arrivals(len(asked)))
        prompts = Prompts(kind=self.kind, share=self.share, groups=self.groups, seed=self.seed)
        return asked_of(self._arrivals(self.requests), prompts)

    def _arrivals(self, count: int) -> list[Arrival]:
        check_seed(self.seed)
        drawn = replace(self._drawn(), count=count)
        if self.trace is not None:
            recorded = read_arrivals(self.trace)[:count]
            return recorded if self.rate == AT_ONCE else at_rate(recorded, self.rate)
        made = draw(drawn, seed=self.seed)
        return [replace(each, at_s=0.0) for each in made] if self.rate == AT_ONCE else made

    def _drawn(self) -> Mix:
        return Mix(
            rate=1.0 if self.rate == AT_ONCE else self.rate,
            count=self.requests,
            prompt_tokens=parse_size(self.prompt, "--prompt"),
            output_tokens=self.out,
            spread=self.spread,
            burst=self.burst,
        )


def load_benchmark(
    *,
    url: str | None = None,
    against: str | None = None,
    model: str | None = None,
    requests: RequestFlags | None = None,
    at_most: MaybeWhole = None,
    ttft_ms: float = 2000.0,
    tpot_ms: float = 100.0,
    smoke: bool = False,
) -> list[Row]:
    """A server under arriving requests: first token, tokens, goodput.

    Parameters
    ----------
    url
        The server; its key is read from ESS_API_KEY. Without it an `ess serve` is started.
    against
        Another server, which gets the same load and the same key: rows are beside it.
    model
        The model to ask for; by default the first that the server lists.
    at_most
        The most requests under way; a further request that is due waits in the client.
    ttft_ms
        Objective: milliseconds to the first token.
    tpot_ms
        Objective: milliseconds per further token, in the mean of a request.
    """
    objective = Objective(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3)
    if at_most is not None and at_most < 1:
        raise BadInput(f"--at-most {at_most}: at least one request must be under way")
    for each in (url, against):
        if each is not None:
            address_of(each)
    flags = requests or RequestFlags()
    if smoke:
        flags = replace(flags, requests=min(6, flags.requests), prompt="96", out=8)
    asked = flags.asked()
    with _server(url) as here:
        load, name = _offered(here, model, asked, at_most)
        other = None if against is None else _offered(against, None, asked, at_most)[0]
    config = {"server": url or "ess serve", "model": name, **_shown(flags, at_most)}
    if against is not None:
        config["the_other"] = against
    return load_rows(load, objective, config=config, against=other)


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    console.note("  starting ess serve; --url names a server that already runs ...")
    with started("serve") as (_, own):
        yield own


def _offered(
    url: str, model: str | None, asked: list[LoadRequest], at_most: int | None
) -> tuple[OfferedLoad, str]:
    """The load, after two requests that are not counted: first steps of a server are slow. They
    have a prompt of their own, so nothing of the load is cached by them."""
    address = address_of(url)
    where = f"{address.scheme}://{address.netloc}{address.path}"
    key = os.environ.get("ESS_API_KEY", "").partition(",")[0].strip()
    target = Target(where, model or first_model(where, key), key)
    warm_up = [LoadRequest(0.0, "Every server says a word first.", 2)] * WARM_UP
    asyncio.run(offer(target, warm_up, at_most=1))
    console.note(f"  {len(asked)} requests for {target.model} at {where} ...")
    return asyncio.run(offer(target, asked, at_most=at_most)), target.model


def first_model(url: str, key: str) -> str:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        asked = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(asked, timeout=LOOK_S) as answer:
            return str(json.loads(answer.read())["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise Unavailable(f"{url}/v1/models answers {error.code} {error.reason}") from None
    except OSError as error:
        why = getattr(error, "reason", error)
        cause = getattr(why, "strerror", None) or why
        raise Unavailable(f"no server at {url}: {cause}") from None
    except (ValueError, LookupError, TypeError):
        raise Unavailable(f"{url}/v1/models names no model") from None


def _shown(flags: RequestFlags, at_most: int | None) -> dict[str, Any]:
    source = flags.trace or flags.file
    drawn = {"prompt": flags.prompt, "out": flags.out, "spread": flags.spread, "kind": flags.kind}
    return {
        **({"from": source.name} if source else drawn),
        "rate": flags.rate if flags.rate < AT_ONCE else "all at once",
        "burst": flags.burst,
        "at_most": at_most or "no limit",
        "seed": flags.seed,
    }
