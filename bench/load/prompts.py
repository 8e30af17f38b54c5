"""What is asked of a server, and when: arrivals of one process, prompts of one kind.

Arrivals and lengths are those of `ess sim`: drawn from a seed, or read from a trace. Prompts are
token ids, which every server with `/v1/completions` takes, or texts from a file.

    text      parts of a text from different places: no two begin alike
    random    ids drawn evenly
    shared    a share of each prompt is that of its group, the rest as in `text`
    blocks    of a trace: equal names of blocks are equal ids, so prefixes are shared as recorded
    file      conversations in the form of ShareGPT, or lines of {"prompt", "output_tokens"}
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from ess.bench.harness.text import token_ids
from ess.decoding import UNDECODABLE
from ess.errors import BadInput, unreadable
from ess.models.load import EMBEDDED
from ess.models.text.tokenizer import Tokenizer
from ess.sim.serving.arrivals import MOONCAKE_BLOCK_TOKENS, OUTPUT_MAX, Arrival

Kind = Literal["text", "random", "shared"]
PROMPTS: Final = 7
BLOCKS: Final = 8
"""Streams of random numbers beside those of arrivals and drafts."""


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """`at_s` counts from the beginning of the load."""

    at_s: float
    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """`share` and `groups` are of prompts that are shared."""

    kind: Kind = "text"
    share: float = 0.5
    groups: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise BadInput(f"--share {self.share}: the share of a prompt is between 0 and 1")
        if self.groups < 1:
            raise BadInput(f"--groups {self.groups}: at least one group shares its prompts")


def asked_of(arrivals: Sequence[Arrival], prompts: Prompts) -> list[LoadRequest]:
    """A prompt for each arrival. A trace that names blocks says itself what is shared."""
    ids = np.array(token_ids()[0])
    made = _Maker(ids, prompts, len(arrivals))
    return [
        LoadRequest(arrival.at_s, made.prompt(place, arrival).tolist(), arrival.output_tokens)
        for place, arrival in enumerate(arrivals)
    ]


class _Maker:
    """Each prompt begins at a place of its own: equal places would be equal prefixes."""

    def __init__(self, ids: np.ndarray[Any, Any], prompts: Prompts, count: int) -> None:
        self._ids, self._prompts = ids, prompts
        self._draw = np.random.default_rng([prompts.seed, PROMPTS])
        places = count + prompts.groups
        if places > len(ids):
            raise BadInput(f"{places:,} prompts: the text has {len(ids):,} places to begin at")
        self._starts = self._draw.permutation(len(ids))[:places]
        self._groups = self._draw.integers(prompts.groups, size=count)

    def prompt(self, place: int, arrival: Arrival) -> np.ndarray[Any, Any]:
        count, kind = arrival.prompt_tokens, self._prompts.kind
        if arrival.prefix_blocks:
            parts = [self._block(name) for name in arrival.prefix_blocks]
            return self._filled(parts, place, count)
        if kind == "random":
            return self._draw.integers(int(self._ids.max()) + 1, size=count)
        shared = round(self._prompts.share * count) if kind == "shared" else 0
        group = self._starts[len(self._groups) + self._groups[place]]
        return self._filled([self._part(group, shared)], place, count)

    def _filled(
        self, parts: list[np.ndarray[Any, Any]], place: int, count: int
    ) -> np.ndarray[Any, Any]:
        have = sum(map(len, parts))
        rest = self._part(self._starts[place], max(0, count - have))
        return np.concatenate([*parts, rest])[:count]

    def _part(self, start: int, count: int) -> np.ndarray[Any, Any]:
        return self._ids[(start + np.arange(count)) % len(self._ids)]

    def _block(self, name: int) -> np.ndarray[Any, Any]:
        draw = np.random.default_rng([self._prompts.seed, BLOCKS, name])
        return draw.integers(int(self._ids.max()) + 1, size=MOONCAKE_BLOCK_TOKENS)


class _Turn(msgspec.Struct, frozen=True):
    value: str


class _Conversation(msgspec.Struct, frozen=True):
    conversations: list[_Turn]


class _Line(msgspec.Struct, frozen=True):
    prompt: str
    output_tokens: int | None = None


def read_prompts(path: Path, *, output_max: int, count: int) -> list[LoadRequest]:
    """The first `count` prompts of a file, all at time 0. A reply of the file is as long as its
    tokens in the embedded model's vocabulary; none is longer than `output_max`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise unreadable(f"--file {path}", error) from None
    read = _conversations if text.lstrip().startswith("[") else _lines
    made = [
        LoadRequest(0.0, prompt, max(1, min(output_max, output)))
        for prompt, output in read(path, text, output_max)
        if prompt.strip()
    ][:count]
    if not made:
        raise BadInput(f"--file {path} holds no prompt")
    return made


def _conversations(path: Path, text: str, output_max: int) -> Iterable[tuple[str, int]]:
    """First turns, and the lengths of the replies to them."""
    tokenizer = Tokenizer(EMBEDDED)
    try:
        entries = msgspec.json.decode(text, type=list[_Conversation])
    except UNDECODABLE as error:
        raise BadInput(f"--file {path}: {error}") from None
    for entry in entries:
        if len(entry.conversations) >= 2:
            prompt, reply = (turn.value for turn in entry.conversations[:2])
            yield prompt, len(tokenizer.encode(reply[: 8 * output_max]))


def _lines(path: Path, text: str, output_max: int) -> Iterable[tuple[str, int]]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except UNDECODABLE as error:
            raise BadInput(f"--file {path}, line {number}: {error}") from None
        output = output_max if entry.output_tokens is None else entry.output_tokens
        if not 1 <= output <= OUTPUT_MAX:
            raise BadInput(f"--file {path}, line {number}: an output of {output} tokens")
        yield entry.prompt, output


def arriving(asked: Sequence[LoadRequest], arrivals: Sequence[Arrival]) -> list[LoadRequest]:
    """Prompts of a file at the times of drawn arrivals."""
    return [replace(each, at_s=arrival.at_s) for each, arrival in zip(asked, arrivals, strict=True)]
