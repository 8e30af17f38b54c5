"""The text process: reads bodies, renders and encodes them, one after the other.

The system limits its memory; its parent limits its time, and kills it. It ends when its input ends.
No torch is imported here.

    in:  a byte, the length of a name; 8 bytes, the length of a body; the name, the body
    out: 8 bytes, a length; Done or Failed, as msgpack

The first name is "Desk", the others are names of asks.
"""

from __future__ import annotations

import array
import gc
import os
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Final

import msgspec

from ess.engine.process.lifeline import leave_signals_to_parent
from ess.errors import BadInput
from ess.models.chat.styles import ChatStyle, style_of
from ess.models.text.tokenizer import Tokenizer
from ess.server.dialects import schemas
from ess.server.dialects.forms.asked import NO_FORMS, Forms
from ess.server.dialects.prompts import Prepared, PromptReader
from ess.server.process.bounds import READ_BYTES_MAX, REST_BYTES_MAX, REST_ITEMS_MAX

ASKS: Final = (
    *(schemas.CompletionAsk, schemas.ChatAsk, schemas.GenerateAsk, schemas.TokensAsk),
    *(schemas.TokenizeAsk, schemas.DetokenizeAsk, schemas.AbortAsk, schemas.PauseAsk),
    *(schemas.ResponsesAsk, schemas.InputTokensAsk),
    *(schemas.MessagesAsk, schemas.CountTokensAsk),
)


class Desk(msgspec.Struct, frozen=True, kw_only=True):
    """What the process must know before the first body; `model` is the checkpoint's folder,
    `template` the text of a template that comes before the folder's own. `template_names` are for
    the template where a request does not say them."""

    model: str
    length_max: int
    vocabulary: int
    template: str | None = None
    template_names: dict[str, Any] = {}

    def reader(self, tokenizer: Tokenizer, style: ChatStyle) -> PromptReader:
        return PromptReader(
            tokenizer,
            style,
            length_max=self.length_max,
            vocabulary=self.vocabulary,
            template_names=self.template_names,
        )


class Done(msgspec.Struct, kw_only=True, tag=True):
    """`ask` is msgpack, each of `prompts` is 32-bit integers, `document` is the answer's JSON."""

    ask: bytes = b"\x80"
    prompts: list[bytes] = []
    is_many: bool = False
    document: bytes = b""
    forms: Sequence[Forms] = (NO_FORMS,)


class Failed(msgspec.Struct, kw_only=True, tag=True):
    sentence: str
    is_refusal: bool = True


def head_of(kind: str, size: int) -> bytes:
    return len(kind).to_bytes(1, "little") + size.to_bytes(8, "little") + kind.encode()


def receive(stream: BinaryIO) -> tuple[str, bytes] | None:
    head = stream.read(9)
    if len(head) < 9:
        return None
    kind = stream.read(head[0]).decode()
    return kind, stream.read(int.from_bytes(head[1:], "little"))


def send(stream: BinaryIO, said: Done | Failed) -> None:
    packed = msgspec.msgpack.encode(said)
    stream.write(len(packed).to_bytes(8, "little") + packed)
    stream.flush()


def answered(reader: PromptReader, kind: str, raw: bytes) -> Done | Failed:
    """Answers a body; its parent reports refusals and faults, and faults are logged here too."""
    [form] = [ask for ask in ASKS if ask.__name__ == kind]
    try:
        return packed(reader.read(raw, form))
    except BadInput as error:
        return Failed(sentence=str(error))
    except MemoryError:
        limit = f"{READ_BYTES_MAX >> 30} GiB"
        return Failed(sentence=f"the body needs more than {limit} to be read and encoded")
    except Exception as error:
        traceback.print_exc()
        return Failed(sentence=f"{type(error).__name__} in a text process", is_refusal=False)


def packed(prepared: Prepared[Any]) -> Done:
    return Done(
        ask=_rest(prepared.ask),
        prompts=[array.array("i", prompt).tobytes() for prompt in prepared.prompts],
        is_many=prepared.is_many,
        document=prepared.document,
        forms=prepared.forms,
    )


def _rest(ask: msgspec.Struct) -> bytes:
    """The rest of the ask, which the parent reads on its event loop."""
    try:
        made = msgspec.msgpack.encode(ask)
        count = _count_of(msgspec.to_builtins(ask, builtin_types=(msgspec.Raw,)))
    except OverflowError:
        raise BadInput("the body has an integer of more than 64 bits") from None
    except RecursionError:
        raise BadInput("the body is nested too deeply") from None
    if len(made) > REST_BYTES_MAX or count > REST_ITEMS_MAX:
        raise BadInput(
            f"the body has, beside its prompt, {count:,} values in {len(made):,} bytes; at most"
            f" {REST_ITEMS_MAX:,} in {REST_BYTES_MAX:,} are read"
        )
    return made


def _count_of(document: Any) -> int:
    count, left = 0, [document]
    while left:
        value = left.pop()
        count += 1
        if isinstance(value, dict):
            left.extend(value.values())
        elif isinstance(value, (list, tuple)):
            left.extend(value)
    return count


def main(style_of: Callable[..., ChatStyle] = style_of) -> None:
    """Freezes the loaded objects, so that garbage collection need not walk them."""
    leave_signals_to_parent()
    _, given = resource.getrlimit(resource.RLIMIT_AS)
    most = READ_BYTES_MAX if given == resource.RLIM_INFINITY else min(given, READ_BYTES_MAX)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    first = receive(requests)
    if first is None:
        return
    desk = msgspec.json.decode(first[1], type=Desk)
    tokenizer = Tokenizer(desk.model)
    reader = desk.reader(tokenizer, style_of(desk.model, tokenizer, template=desk.template))
    gc.freeze()
    gc.disable()
    try:
        send(answers, Done())
        while (request := receive(requests)) is not None:
            said = answered(reader, *request)
            del request
            send(answers, said)
    except BrokenPipeError:
        os._exit(0)  # the server has ended; an orderly end would write once more


if __name__ == "__main__":
    main()
