"""The items of /v1/responses: those of a request as chat messages, and those of an answer.

The model's output becomes items, one after the other, and events that say how each grows. A whole
answer and a streamed one are made of the same items.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from ess.errors import BadInput
from ess.models.chat.messages import REFUSAL, TEXT_PARTS, json_kind
from ess.models.chat.reply import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from ess.server.dialects.tools import full_name

Item = dict[str, Any]


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> tuple[list[Item], list[str]]:
    """The items as chat messages, the instructions as a developer's, and the places where the
    request has them. Reasoning and calls join the assistant's message beside them."""
    messages: list[Item] = [{"role": "developer", "content": instructions}] if instructions else []
    places = ["instructions"] * len(messages)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}], [*places, "input"]
    if not given:
        raise BadInput("input is empty: give a text or at least one item")
    for place, item in enumerate(given):
        where = f"input[{place}]"
        _append(messages, item, where=where)
        places += [where] * (len(messages) - len(places))
    return messages, places


def _append(messages: list[Item], item: Mapping[str, Any], *, where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _say(messages, item, where=where)
        case "reasoning":
            text = _text(item.get("content") or [], where, ("reasoning_text", "text"))
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_made_call(item, where))
        case "function_call_output":
            text = _text(item.get("output"), where, TEXT_PARTS)
            _check_text(item, "call_id", where)
            result = {"role": "tool", "tool_call_id": item.get("call_id"), "content": text}
            messages.append(result)
        case kind:
            raise BadInput(
                f"{where}.type is {kind!r:.40}; message, reasoning, function_call and"
                " function_call_output are served"
            )


def _made_call(item: Mapping[str, Any], where: str) -> Item:
    """The call in a chat's form. Its fields are refused here, where it has a place of its own."""
    if not isinstance(item.get("arguments"), Mapping):
        _check_text(item, "arguments", where)
    _check_text(item, "call_id", where)
    _check_text(item, "name", where, is_needed=True)
    name = full_name(item.get("namespace"), item.get("name"))
    function = {"name": name, "arguments": item.get("arguments", "{}")}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _check_text(item: Mapping[str, Any], name: str, where: str, *, is_needed: bool = False) -> None:
    given = item.get(name)
    if not isinstance(given, str) and (is_needed or given is not None):
        raise BadInput(f"{where}.{name} is {json_kind(given)}, expected text")


def _say(messages: list[Item], item: Mapping[str, Any], *, where: str) -> None:
    """Adds an assistant's text to the reasoning before it."""
    is_answer = item.get("role") == "assistant"
    text = _text(item.get("content"), where, (*TEXT_PARTS, *((REFUSAL,) if is_answer else ())))
    last = messages[-1] if messages else {}
    is_begun = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
    if is_answer and is_begun:
        last["content"] = text
    else:
        messages.append({"role": item.get("role"), "content": text})


def _text(content: Any, where: str, kinds: Sequence[str]) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadInput(f"{where} has {json_kind(content)} where text belongs")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get(_field(str(kind))) if kind in kinds else None
        if not isinstance(text, str):
            raise BadInput(f"{where} has a part of type {kind!r:.40}; only text is served")
    return "".join(part[_field(part["type"])] for part in content)


def _field(kind: str) -> str:
    return REFUSAL if kind == REFUSAL else "text"


class Items:
    """Items of one answer as they grow; `pending` is the last item, which may still grow. Calls of
    functions in `namespaces` have two names."""

    def __init__(self, namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        self._namespaces = namespaces
        self.ended: list[Item] = []
        self._pending: Item | None = None
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []

    def take(self, event: Event, logprobs: Sequence[msgspec.Raw] = ()) -> list[Item]:
        """`logprobs` are those of the tokens of a message's text."""
        match event:
            case Content(text):
                opened = self._open("message")
                self._logprobs += logprobs
                return [*opened, self._grow(text, "output_text.delta", logprobs=logprobs)]
            case Reasoning(text):
                return [*self._open("reasoning"), self._grow(text, "reasoning_text.delta")]
            case CallBegin(_, name):
                return [*self.close(), *self._begin(self._call(name))]
            case CallArguments(_, text):
                return [self._grow(text, "function_call_arguments.delta")]
            case CallEnd():
                return self.close()
        return []

    def close(self, status: str = "completed") -> list[Item]:
        item, self._pending = self._pending, None
        if item is None:
            return []
        text = "".join(self._texts)
        item["status"] = status
        events = self._last_words(item, text)
        done = self._event("output_item.done", item=item)
        self.ended.append(item)
        return [*events, done]

    def end(self, status: str) -> list[Item]:
        """Ends the text. A call that is still open counts as cut, for any reason of the end."""
        is_cut = self._pending is not None and self._pending["type"] == "function_call"
        return self.close("incomplete" if is_cut else status)

    def _call(self, name: str) -> Item:
        namespace, own = self._namespaces.get(name, ("", name))
        return {**_call(own), "namespace": namespace} if namespace else _call(own)

    def _open(self, kind: str) -> list[Item]:
        if self._pending is not None and self._pending["type"] == kind:
            return []
        item = _message() if kind == "message" else _reasoning()
        return [*self.close(), *self._begin(item)]

    def _begin(self, item: Item) -> list[Item]:
        self._pending, self._texts, self._logprobs = item, [], []
        added = self._event("output_item.added", item=dict(item))
        if item["type"] == "function_call":
            return [added]
        return [added, self._placed("content_part.added", part=_part(item, ""))]

    def _grow(self, text: str, kind: str, **more: Any) -> Item:
        self._texts.append(text)
        return self._placed(kind, delta=text, **more)

    def _last_words(self, item: Item, text: str) -> list[Item]:
        """The events with the whole text of an item, which gets it too."""
        if item["type"] == "function_call":
            item["arguments"] = text
            return [
                self._placed(
                    "function_call_arguments.done", item, arguments=text, name=item["name"]
                )
            ]
        part = _part(item, text)
        item["content"] = [part]
        is_message = item["type"] == "message"
        kind = "output_text.done" if is_message else "reasoning_text.done"
        more = {"logprobs": msgspec.Raw(b"[%b]" % b",".join(self._logprobs))} if is_message else {}
        part |= more
        return [
            self._placed(kind, item, text=text, **more),
            self._placed("content_part.done", item, part=part),
        ]

    def _placed(self, kind: str, item: Item | None = None, **fields: Any) -> Item:
        """An event inside an item; only calls have no parts."""
        item = item or self._pending
        assert item is not None, f"{kind} without an item"
        part = {} if item["type"] == "function_call" else {"content_index": 0}
        return self._event(kind, item_id=item["id"], **part, **fields)

    def _event(self, kind: str, **fields: Any) -> Item:
        return {"type": f"response.{kind}", "output_index": len(self.ended), **fields}


def _message() -> Item:
    return {
        "type": "message",
        "id": f"msg_{secrets.token_hex(16)}",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> Item:
    return {
        "type": "reasoning",
        "id": f"rs_{secrets.token_hex(16)}",
        "status": "in_progress",
        "summary": [],
        "content": [],
    }


def _call(name: str) -> Item:
    return {
        "type": "function_call",
        "id": f"fc_{secrets.token_hex(16)}",
        "call_id": f"call_{secrets.token_hex(12)}",
        "status": "in_progress",
        "name": name,
        "arguments": "",
    }


def _part(item: Item, text: str) -> Item:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
