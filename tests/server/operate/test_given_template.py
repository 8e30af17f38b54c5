"""`--chat-template` writes conversations, whichever process reads their bodies."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.process import Process
from tests.support.routers import ask

pytestmark = pytest.mark.slow
TEMPLATE = '{% for m in messages %}{{ m.content }}{% endfor %}{{ "ABCDEFGHIJ" * 50 }}'


@pytest.mark.parametrize("count", [10, 3000])
def test_the_given_template_writes_short_and_long_conversations(count: int, tmp_path: Path):
    written = tmp_path / "given.jinja"
    written.write_text(TEMPLATE)
    content = "word " * count
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    flags = ("--engine", "paced", "--max-model-len", "8192", "--chat-template", str(written))
    with Process(*flags) as process:
        process.wait_ready()
        answer = ask(f"{process.url}/v1/chat/completions", chat)
        whole = {"prompt": content + "ABCDEFGHIJ" * 50, "add_special_tokens": False}
        tokens = ask(f"{process.url}/tokenize", whole)
    assert answer.status == tokens.status == 200, (answer, tokens)
    assert answer.document["usage"]["prompt_tokens"] == tokens.document["count"]
