"""DeepSeek-V3.2's replies: reasoning, content and DSML calls out of a stream of text.

reasoning</think>content

<｜DSML｜function_calls>
<｜DSML｜invoke name="f">
<｜DSML｜parameter name="city" string="true">Ulm</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls><｜end▁of▁sentence｜>
"""

from __future__ import annotations

import re

from ess.models.chat.dsml import (
    CALLS,
    CALLS_END,
    END,
    INVOKE,
    INVOKE_END,
    PARAMETER,
    PARAMETER_END,
    THINK_END,
)
from ess.models.chat.parsers.tagged import TaggedParser, Tags


class DeepSeekParser(TaggedParser):
    """The reply to one prompt. `thinking` as in the prompt: it ended with `<think>`. `opening` and
    `closing` are around a block of calls, also behind the blank line that the format has there."""

    def __init__(self, *, thinking: bool, opening: str = CALLS, closing: str = CALLS_END) -> None:
        tags = Tags(
            closing=closing,
            invoke=INVOKE,
            invoke_end=INVOKE_END,
            parameter=PARAMETER,
            parameter_end=PARAMETER_END,
            kind=' string="(true|false)"',
        )
        super().__init__(
            tags,
            thinking=thinking,
            think_end=THINK_END,
            ends=(END,),
            calls=("\n\n" + opening, opening),
        )

    def _is_text(self, tag: re.Match[str]) -> bool:
        return tag[2] == "true"

    def _after_calls(self) -> bool:
        """Nothing follows the block but the end."""
        if self._literal(END):
            return self._enter(self._ignored)
        return self._await(END)
