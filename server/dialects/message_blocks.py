"""The blocks of /v1/messages: those of a request as chat messages, and those of an answer.

The model's output becomes blocks, one after the other, and events that say how each grows. A whole
answer and a streamed one are made of the same blocks.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ess.errors import BadInput
from ess.models.chat.messages import json_kind, text_of
from ess.models.chat.reply import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from ess.server.process.bounds import MESSAGES_MAX

Item = dict[str, Any]
SERVED: Final = {
    "user": "text and tool_result",
    "assistant": "text, thinking and tool_use",
    "system": "text",
}


def messages_of(given: Sequence[Mapping[str, Any]], system: object) -> tuple[list[Item], list[str]]:
    """The conversation as chat messages, and the places where it has them. A system message after
    the beginning becomes a turn of the user: few models were trained on a system's turn there, and
    chat formats have no place for it."""
    if not given:
        raise BadInput("messages is empty: give at least one message")
    text = text_of(system, where="system")
    messages: list[Item] = [{"role": "system", "content": text}] if text else []
    places = ["system"] * len(messages)
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        for turn in _read(message, where=where):
            is_begun = bool(messages) and messages[-1]["role"] != "system"
            is_late = turn["role"] == "system" and is_begun
            messages.append({**turn, "role": "user"} if is_late else turn)
            places.append(where)
        if len(messages) > MESSAGES_MAX:
            raise BadInput(f"messages has more than {MESSAGES_MAX:,} messages and results")
    pairs = [*_joined(messages, places)]
    return [message for message, _ in pairs], [where for _, where in pairs]


def _joined(messages: Sequence[Item], places: Sequence[str]) -> Iterator[tuple[Item, str]]:
    """Joins consecutive turns of the user, as Anthropic does. A joined turn has the place of
    its first."""
    pairs = zip(messages, places, strict=True)
    for role, same_role in itertools.groupby(pairs, key=lambda pair: pair[0]["role"]):
        turns = list(same_role)
        if role in ("user", "system"):
            text = "\n\n".join(turn["content"] for turn, _ in turns)
            yield {"role": role, "content": text}, turns[0][1]
        else:
            yield from turns


def goes_on(given: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is the beginning of the answer, which then is the rest of it."""
    return bool(given) and given[-1].get("role") == "assistant"


def _read(message: Mapping[str, Any], *, where: str) -> list[Item]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in SERVED:
        raise BadInput(f"{where}.role is {role!r:.40}; user, assistant and system are served")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise BadInput(f"{where}.content must be a text or a list of blocks, not empty")
    if role == "system":
        return [{"role": role, "content": text_of(content, where=f"{where}.content")}]
    if role == "assistant":
        return [_said(content, where=where)]
    return _asked(content, where=where)


def _asked(blocks: Sequence[Any], *, where: str) -> list[Item]:
    """A user's texts, those that stand together in one message, and results of calls."""
    items: list[Item] = []
    texts: list[str] | None = None
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        match _kind(block):
            case "text":
                if texts is None:
                    texts = []
                    items.append({"role": "user", "content": texts})
                texts.append(_text(block, "text", here))
            case "tool_result":
                result = text_of(block.get("content"), where=f"{here}.content")
                identity = _text(block, "tool_use_id", here)
                items.append({"role": "tool", "tool_call_id": identity, "content": result})
                texts = None
            case kind:
                raise _unserved(kind, "user", here)
    return [
        {**message, "content": "".join(message["content"])}
        if message["role"] == "user"
        else message
        for message in items
    ]


def _said(blocks: Sequence[Any], *, where: str) -> Item:
    """An assistant's blocks as one message. Thoughts that another server has sealed are left out:
    only that server can read them."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Item] = []
    for place, block in enumerate(blocks):
        here = f"{where}.content[{place}]"
        match _kind(block):
            case "text":
                texts.append(_text(block, "text", here))
            case "thinking":
                thoughts.append(_text(block, "thinking", here))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_made_call(block, here))
            case kind:
                raise _unserved(kind, "assistant", here)
    message: Item = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _made_call(block: Mapping[str, Any], where: str) -> Item:
    given = block.get("input")
    if not isinstance(given, Mapping):
        raise BadInput(f"{where}.input is {json_kind(given)}, expected an object")
    function = {"name": _text(block, "name", where), "arguments": given}
    return {"id": _text(block, "id", where), "type": "function", "function": function}


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else type(block).__name__


def _text(block: Mapping[str, Any], name: str, where: str) -> str:
    text = block.get(name)
    if not isinstance(text, str):
        raise BadInput(f"{where}.{name} is {json_kind(text)}, expected text")
    return text


def _unserved(kind: object, role: str, where: str) -> BadInput:
    return BadInput(f"{where}.type is {kind!r:.40}; of the {role} {SERVED[role]} are served")


class Blocks:
    """Blocks of one answer as they grow; `pending` is the last block, which may still grow. A call
    that was never ended is streamed, but no part of `ended`: its input is half a JSON. `thoughts`
    is all that was thought in blocks that have ended; clients see it if `shows_thoughts`."""

    def __init__(self, *, shows_thoughts: bool = True) -> None:
        self._shows_thoughts = shows_thoughts
        self.thoughts = ""
        self.ended: list[Item] = []
        self._pending: Item | None = None
        self._texts: list[str] = []
        self._index = -1

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.ended)

    def take(self, event: Event) -> list[Item]:
        match event:
            case Content(text):
                return [*self._open("text"), self._grow("text_delta", text=text)]
            case Reasoning(text):
                opened, grown = self._open("thinking"), self._grow("thinking_delta", thinking=text)
                return [*opened, grown] if self._shows_thoughts else opened
            case CallBegin(_, name):
                return [*self.close(), self._begin(_call(name))]
            case CallArguments(_, text):
                return [self._grow("input_json_delta", partial_json=text)]
            case CallEnd():
                return self._end(is_whole=True)
        return []

    def close(self) -> list[Item]:
        """Ends the pending block, if there is one; a call is whole only if its end was said."""
        block = self._pending
        return [] if block is None else self._end(is_whole=block["type"] != "tool_use")

    def _end(self, *, is_whole: bool) -> list[Item]:
        block, self._pending = self._pending, None
        assert block is not None, "the end of a block without a beginning"
        text = "".join(self._texts)
        if block["type"] == "thinking":
            self.thoughts += text
            text = text if self._shows_thoughts else ""
        if is_whole:
            self.ended.append(_filled(block, text))
        return [{"type": "content_block_stop", "index": self._index}]

    def _open(self, kind: str) -> list[Item]:
        if self._pending is not None and self._pending["type"] == kind:
            return []
        return [*self.close(), self._begin(_empty(kind))]

    def _begin(self, block: Item) -> Item:
        self._pending, self._texts = block, []
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _grow(self, kind: str, **part: str) -> Item:
        self._texts += part.values()
        delta = {"type": kind, **part}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _empty(kind: str) -> Item:
    return {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}


def _call(name: str) -> Item:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": {}}


def _filled(block: Item, text: str) -> Item:
    """A block with all that was said of it; a call's input is JSON as the model wrote it."""
    if block["type"] == "tool_use":
        return {**block, "input": msgspec.Raw(text.encode() or b"{}")}
    return {**block, block["type"]: text}
