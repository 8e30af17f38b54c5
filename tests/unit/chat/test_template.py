"""Templates are programs of strangers: rendered right, or ended, within their bounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from ess.errors import BadInput, Unavailable
from ess.models.chat import template as template_of
from ess.models.chat.messages import Conversation, read_messages
from ess.models.chat.replies import GLM, PLAIN
from ess.models.chat.reply import parse
from ess.models.chat.styles import ChatStyle, DeepSeekStyle, PlainStyle, TemplateStyle, style_of
from ess.models.chat.template import ChatTemplate
from ess.models.text.tokenizer import Tokenizer

# In the manner of GLM's, which is the model's own and not repeated here.
TEMPLATE = """[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>{{ '</think>' + m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>
{%- set text = value if value is string else value | tojson(ensure_ascii=False) %}
<arg_value>{{ text }}</arg_value>{% endfor %}</tool_call>{% endfor %}
{%- elif m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>
{%- else %}<|{{ m.role }}|>{{ m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ '<think>' if enable_thinking else '</think>' }}
{%- endif %}"""

TOOL = {"type": "function", "function": {"name": "tide", "description": "<Höhe>"}}


@pytest.fixture
def style() -> Iterator[TemplateStyle]:
    made = TemplateStyle(TEMPLATE, replies=GLM)
    yield made
    made.close()


def test_a_conversation(style: TemplateStyle) -> None:
    calls = [{"function": {"name": "tide", "arguments": '{"city": "Ulm", "days": [2]}'}}]
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Wie höch?"},
        {"role": "assistant", "content": "Moment.", "tool_calls": calls},
        {"role": "tool", "content": "3 m"},
    ]
    text = style.encode(Conversation(read_messages(messages, tools=[TOOL]), thinking=True))
    assert text == (
        "[gMASK]<sop><|system|>\n# Tools\n"
        '{"type": "function", "function": {"name": "tide", "description": "<Höhe>"}}\n'
        "<|system|>S<|user|>Wie höch?<|assistant|></think>Moment.<tool_call>tide"
        "<arg_key>city</arg_key><arg_value>Ulm</arg_value>"
        "<arg_key>days</arg_key><arg_value>[2]</arg_value></tool_call>"
        "<|observation|><tool_response>3 m</tool_response><|assistant|><think>"
    )
    plain = style.encode(Conversation(read_messages(messages[:2]), thinking=False))
    assert plain == "[gMASK]<sop><|system|>S<|user|>Wie höch?<|assistant|></think>"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ missing.attribute }}", "UndefinedError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ 'a' * 100000000000 }}", "needs more than 512 MiB"),
        ("{% for i in range(999999999) %}{% endfor %}", "OverflowError"),
        ("{{ 'a' * 17000000 }}", "makes 17,000,000 characters"),
        ("{{ '%1000000000000d' % 1 }}", "chat template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_bad_template_is_refused(source: str, says: str) -> None:
    template = ChatTemplate(source)
    with pytest.raises(BadInput, match=says):
        template.render({"messages": []})
    template.close()


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its processor time, for which it may wait long where others have the cores."""
    monkeypatch.setattr(template_of, "HELD_FACTOR", 200.0)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    source = "{% if slow %}" + loops + "{% else %}quick{% endif %}"
    template = ChatTemplate(source, timeout_s=1.0)
    with pytest.raises(BadInput, match="ran longer than 1 s"):
        template.render({"slow": True})
    template.close()
    patient = ChatTemplate(source, timeout_s=30.0)
    assert patient.render({"slow": False}) == "quick"
    patient.close()


def test_after_an_error_the_template_still_renders(style: TemplateStyle) -> None:
    template = ChatTemplate("{{ 1 // n }}", timeout_s=30.0)
    with pytest.raises(BadInput, match="ZeroDivisionError"):
        template.render({"n": 0})
    assert template.render({"n": 1}) == "1"
    template.close()
    assert template.render({"n": 1}) == "1"
    template.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_is_lost_is_replaced_and_nobody_notices(how: int) -> None:
    template = ChatTemplate("{{ n }}", timeout_s=0.5)
    assert template.render({"n": "one"}) == "one"
    lost = child_of(template)
    os.kill(lost.pid, how)
    long = "x" * (1 << 20)
    assert template.render({"n": long}) == long, "more than a pipe holds"
    assert lost.returncode == -signal.SIGKILL
    assert child_of(template).pid != lost.pid
    template.close()


def test_a_child_that_is_lost_twice_is_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{{ n }}", timeout_s=30.0)
    start, begun = ChatTemplate._start, []

    def start_and_kill(made: ChatTemplate) -> None:
        start(made)
        begun.append(child_of(made))
        begun[-1].kill()
        begun[-1].wait()

    monkeypatch.setattr(ChatTemplate, "_start", start_and_kill)
    with pytest.raises(Unavailable, match="lost twice"):
        template.render({"n": 1})
    assert len(begun) == 2
    monkeypatch.undo()
    assert template.render({"n": 1}) == "1"
    template.close()


def child_of(template: ChatTemplate) -> subprocess.Popen[bytes]:
    assert template._child is not None
    return template._child


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(BadInput, match="larger than"):
        ChatTemplate("x" * ((1 << 20) + 1))


def vocabulary(folder: Path, *tokens: str) -> Tokenizer:
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(list(tokens))
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_the_style_follows_the_checkpoint(tmp_path: Path) -> None:
    deepseek = vocabulary(tmp_path, "<｜User｜>", "<｜Assistant｜>")
    assert isinstance(style_of(tmp_path, deepseek), DeepSeekStyle)
    other = vocabulary(tmp_path)
    assert isinstance(style_of(tmp_path, other), PlainStyle)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    ask(style_of(tmp_path, other), "hi!")
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    ask(style_of(tmp_path, other), "hi?")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadInput, match="not UTF-8"):
        style_of(tmp_path, other)
    (tmp_path / "chat_template.jinja").unlink()
    for wrong, says in (
        (1, "chat_template is a number"),
        ([1], r"chat_template\[0\] must be an object with a name and a template"),
        ([{"name": "default", "template": None}], r"chat_template\[0\] must be an object"),
        ([], "chat_template has no templates, but none with the name 'default'"),
        ([{"name": "rag", "template": "x"}], "chat_template has 'rag', but none"),
    ):
        config.write_text(json.dumps({"chat_template": wrong}))
        with pytest.raises(BadInput, match=says):
            style_of(tmp_path, other)


def test_of_named_templates_one_is_for_tools(tmp_path: Path) -> None:
    sources = {
        "default": "{{ messages[-1].content }}!",
        "tool_use": "{{ messages[-1].content }} {{ tools[0].function.name }}?<arg_key>",
        "rag": "{{ documents[0] }}",
    }
    listed = [{"name": name, "template": source} for name, source in sources.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    style = style_of(tmp_path, vocabulary(tmp_path, "<tool_call>", "</tool_call>", "<arg_key>"))
    assert isinstance(style, TemplateStyle)
    assert not style.without_tools
    assert "never reads `tools`" in TemplateStyle(sources["default"]).without_tools
    assert style.replies is not PLAIN
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    for given, text in ((tools, "hi tide?<arg_key>"), (None, "hi!"), ([], "hi!")):
        asked = read_messages([{"role": "user", "content": "hi"}], tools=given or ())
        assert style.encode(Conversation(asked, thinking=False)) == text
    style.close()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_template_for_tools_may_be_in_a_folder_beside(tmp_path: Path, is_linked: bool) -> None:
    """As transformers writes it, and as a cache of the hub links to it."""
    snapshot = tmp_path / "snapshots" / "1"
    folder = snapshot / "additional_chat_templates"
    folder.mkdir(parents=True)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    sources = {"chat_template.jinja": "{{ messages[-1].content }}!"}
    sources |= {
        f"{folder.name}/tool_use.jinja": "{{ messages[-1].content }} {{ tools[0].function.name }}?",
        f"{folder.name}/rag.jinja": "{{ documents[0] }}",
    }
    for number, (name, source) in enumerate(sources.items()):
        path = snapshot / name
        if is_linked:
            (blobs / f"b{number}").write_text(source)
            path.symlink_to(f"{'../' * (1 + len(Path(name).parts))}blobs/b{number}")
        else:
            path.write_text(source)
    style = style_of(snapshot, vocabulary(tmp_path, "<a>"))
    assert isinstance(style, TemplateStyle)
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {}}}]
    for given, text in ((tools, "hi tide?"), ((), "hi!")):
        asked = read_messages([{"role": "user", "content": "hi"}], tools=given)
        assert style.encode(Conversation(asked, thinking=False)) == text
    style.close()


def test_a_folder_of_templates_is_no_link_and_has_no_links_elsewhere(tmp_path: Path) -> None:
    elsewhere, model = tmp_path / "elsewhere", tmp_path / "model"
    elsewhere.mkdir()
    model.mkdir()
    (elsewhere / "tool_use.jinja").write_text("x")
    (model / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    other = vocabulary(tmp_path, "<a>")
    folder = model / "additional_chat_templates"
    folder.symlink_to(elsewhere)
    with pytest.raises(BadInput, match="additional_chat_templates is not a readable folder"):
        style_of(model, other)
    folder.unlink()
    folder.mkdir()
    (folder / "tool_use.jinja").symlink_to("../../elsewhere/tool_use.jinja")
    with pytest.raises(BadInput, match="links are not followed"):
        style_of(model, other)


def ask(style: ChatStyle, text: str) -> None:
    assert isinstance(style, TemplateStyle)
    asked = read_messages([{"role": "user", "content": "hi"}])
    assert style.encode(Conversation(asked, thinking=False)) == text
    style.close()


def test_the_plain_style() -> None:
    style = PlainStyle()
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
    ]
    encoded = style.encode(Conversation(read_messages(messages), thinking=False))
    assert encoded == "system: S\nuser: hi\nassistant:"
    assert parse(style.parser(thinking=False), " yes").content == " yes"
    with pytest.raises(BadInput, match="no tools"):
        style.encode(Conversation(read_messages(messages, tools=[TOOL]), thinking=False))


def test_a_template_gets_the_marks_of_its_checkpoint(tmp_path: Path) -> None:
    """Also a template that is given beside it. Clients may give other texts, which stay texts."""
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    library.decoder = tokenizers.decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ pad_token is defined }}"
    known = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "x": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**known, "chat_template": source}))
    said = Conversation(read_messages([{"role": "user", "content": "Hi"}]), thinking=False)
    for template, want in ((None, "<s>Hi</s>False"), ("{{ eos_token }}", "</s>")):
        made = style_of(tmp_path, Tokenizer(tmp_path), template=template)
        assert isinstance(made, TemplateStyle)
        try:
            assert made.encode(said) == want
            named = Conversation(said.messages, thinking=False, names={"eos_token": "!"})
            assert made.encode(named) == want.replace("</s>", "!")
        finally:
            made.close()


def test_what_templates_of_others_use() -> None:
    """Of the language as transformers has it."""
    source = (
        "{% generation %}{{ a | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{% endgeneration %}{{ b | tojson(ensure_ascii=true) }}"
    )
    template = ChatTemplate(source)
    try:
        assert template.render({"a": {"y": 1, "x": [2]}, "b": "ä"}) == '{"x":[2],"y":1}"\\u00e4"'
    finally:
        template.close()


@pytest.mark.parametrize(
    ("source", "thinks"),
    [
        ("{{ '<think>' if enable_thinking is not defined or enable_thinking else '' }}", True),
        ("{{ '</think>' if thinking is defined and not thinking else '<think>' }}", True),
        ("{{ '<think>' if enable_thinking else '</think>' }}", False),
        ("{{ enable_thinking }}", False),
        ("{{ 'as always' }}", False),
        ("{{ raise_exception('only with tools') }}", False),
    ],
)
def test_whether_a_template_thinks_that_is_not_told(source: str, thinks: bool) -> None:
    style = TemplateStyle("{% for m in messages %}{{ m.content }}{% endfor %}" + source)
    assert [style.thinks(), style.thinks()] == [thinks, thinks]
    style.close()
