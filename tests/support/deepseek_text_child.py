"""A text process that writes conversations in DeepSeek's format, whatever model it reads."""

from __future__ import annotations

from ess.models.chat.styles import DeepSeekStyle
from ess.server.process import text_child

if __name__ == "__main__":
    text_child.main(lambda *_, **__: DeepSeekStyle())
