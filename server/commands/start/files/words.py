"""What a server knows of its model's texts before it listens: vocabulary, chat format, end ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ess.decoding import UNDECODABLE
from ess.errors import BadInput, unreadable
from ess.models.chat.messages import Conversation, Message
from ess.models.chat.styles import ChatStyle, TemplateStyle, style_of
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start.files.checkpoint import Checkpoint
from ess.server.commands.start.settings import Settings
from ess.server.dialects.tools import OF_SERVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """`template` is the text of --chat-template, None without that flag. Ids of prompts are below
    `vocabulary`."""

    tokenizer: Tokenizer
    style: ChatStyle
    template: str | None
    vocabulary: int


def read_words(settings: Settings, checkpoint: Checkpoint) -> Words:
    """Reads the tokenizer and the chat format. BadInput for a damaged one, for a template that
    cannot be read, and for end-of-sequence ids that the engine would refuse in every request."""
    template = chat_template(settings)
    tokenizer = Tokenizer(checkpoint.path)
    style = style_of(checkpoint.path, tokenizer, template=template)
    vocabulary = min(len(tokenizer), checkpoint.config.vocab_size)
    for end in checkpoint.eos_ids:
        if not 0 <= end < vocabulary:
            raise BadInput(
                f"eos_token_id {end} of config.json or generation_config.json of {checkpoint.name}:"
                f" its vocabulary has {vocabulary} ids"
            )
    return Words(tokenizer=tokenizer, style=style, template=template, vocabulary=vocabulary)


def template_names(text: str) -> dict[str, Any]:
    """The names that the chat template gets where a request does not say them."""
    try:
        given = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
    except UNDECODABLE as error:
        raise BadInput(f"default_chat_template_kwargs is not a JSON object: {error}") from None
    if taken := sorted(OF_SERVER & given.keys()):
        raise BadInput(f"default_chat_template_kwargs has {taken[0]}: the server says that itself")
    return given


def chat_template(settings: Settings) -> str | None:
    """The template's text, once its process has tried it; None without a file."""
    if not settings.chat_template:
        return None
    path = Path(settings.chat_template)
    try:
        source = path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(f"chat_template {path}", error) from None
    except ValueError:
        raise BadInput(f"chat_template {path} is not text in UTF-8") from None
    tried = TemplateStyle(source)
    try:
        tried.encode(Conversation([Message(role="user", content="Hi")], thinking=False))
    except BadInput as error:
        why = str(error).removeprefix("the chat template: ")
        raise BadInput(f"chat_template {path}: {why}") from None
    finally:
        tried.close()
    return source
