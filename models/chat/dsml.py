"""DeepSeek-V3.2's marks and its tool markup, DSML, written: tools and calls to text.

The strings here are the format itself. The model was trained on exactly this text, blank lines
included; a changed word changes its answers. They are published with the model under the MIT
licence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from ess.models.chat.messages import ToolCall, arguments_of, write_json

BEGIN: Final = "<｜begin▁of▁sentence｜>"
END: Final = "<｜end▁of▁sentence｜>"
USER: Final = "<｜User｜>"
ASSISTANT: Final = "<｜Assistant｜>"
THINK: Final = "<think>"
THINK_END: Final = "</think>"

CALLS: Final = "<｜DSML｜function_calls>"
CALLS_END: Final = "</｜DSML｜function_calls>"
CALLS_V4: Final = "<｜DSML｜tool_calls>"
CALLS_V4_END: Final = "</｜DSML｜tool_calls>"
INVOKE: Final = "<｜DSML｜invoke"
INVOKE_END: Final = "</｜DSML｜invoke>"
PARAMETER: Final = "<｜DSML｜parameter"
PARAMETER_END: Final = "</｜DSML｜parameter>"

_TOOLS: Final = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "{CALLS}" block like the following as part of your reply \
to the user:
{CALLS}
{INVOKE} name="$FUNCTION_NAME">
{PARAMETER} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE{PARAMETER_END}
...
{INVOKE_END}
{INVOKE} name="$FUNCTION_NAME2">
...
{INVOKE_END}
{CALLS_END}

String and scalar parameters should be specified as is without any escaping or quotes, while \
lists and objects should use JSON format. The "string" attribute should be set to "true" for \
string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider \
outputting a thinking block. Here is an example:

{CALLS}
...
{CALLS_END}

<function_results>
...
</function_results>

{THINK}...thinking about results{THINK_END}

Here are the functions available in JSONSchema format:
<functions>
"""
_RESPONSE: Final = (
    "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


def write_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    return _TOOLS + "\n".join(write_json(tool) for tool in tools) + "\n</functions>\n"


def write_response_format(schema: Mapping[str, Any]) -> str:
    return _RESPONSE + write_json(schema)


def write_calls(
    calls: Iterable[ToolCall], *, opening: str = CALLS, closing: str = CALLS_END
) -> str:
    return "\n".join([opening, *(_write_call(call) for call in calls), closing])


def _write_call(call: ToolCall) -> str:
    """A string goes as it is, without quotes or escapes; everything else as JSON."""
    parameters = [
        f'{PARAMETER} name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else write_json(value)}{PARAMETER_END}"
        for name, value in arguments_of(call).items()
    ]
    return f'{INVOKE} name="{call.name}">\n' + "\n".join(parameters) + f"\n{INVOKE_END}"
