"""The content of an answer, from its raw lines: the same for a stream and for a whole document."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

UNLIKE = ("prompt_tokens_details",)
"""Of the usage: how much of a prompt was cached depends on earlier requests."""


@dataclass
class Choice:
    """`scores` are the log probabilities of its tokens."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finish: str | None = None


@dataclass
class Told:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: str = ""

    def take(self, document: dict[str, Any]) -> None:
        if "error" in document:
            assert not self.error, f"two errors: {self.error}, {document}"
            self.error = document["error"]["message"]
            return
        for part in document["choices"]:
            self._grow(self.choices.setdefault(part["index"], Choice()), part)
        if (usage := document.get("usage")) is not None:
            assert self.usage is None, "usage comes twice"
            self.usage = {name: count for name, count in usage.items() if name not in UNLIKE}

    def _grow(self, choice: Choice, part: dict[str, Any]) -> None:
        assert not self.error, "an answer goes on behind its error"
        assert choice.finish is None, "an answer goes on behind its end"
        message = part.get("delta") or part.get("message") or {}
        choice.text += part.get("text") or message.get("content") or ""
        choice.ids += part.get("token_ids") or []
        choice.scores += _scores(part.get("logprobs") or {})
        choice.finish = part.get("finish_reason")


def _scores(logprobs: dict[str, Any]) -> list[float]:
    """As completions say them, or as conversations do."""
    if logprobs.get("content") is not None:
        return [entry["logprob"] for entry in logprobs["content"]]
    return logprobs.get("token_logprobs") or []


def told(raw: bytes) -> Told:
    """A document that is whole, or the events of a stream that are; comments say nothing."""
    made = Told()
    if raw.startswith(b"{"):
        made.take(json.loads(raw))
        return made
    for line in raw[: raw.rfind(b"\n") + 1].split(b"\n"):
        if line.startswith(b"data: {"):
            made.take(json.loads(line.removeprefix(b"data: ")))
    return made
