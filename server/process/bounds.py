"""Limits on everything that a client decides; `bound_table` says what happens beyond them.

If an operator can set a bound, the value here is the default. Everything is checked before the work
that it would cause; before the key, only what is read before the key. Nothing is imported here: a
text process needs these numbers and little else.
"""

from __future__ import annotations

from typing import Final

NAME_CHARS_MAX: Final = 256
PROMPTS_MAX: Final = 128
LOOP_BODY_BYTES: Final = 8 << 10
SHORT_BODY_BYTES: Final = 128 << 10
TEXT_CHARS_MAX: Final = 8 << 20
PROMPT_IDS_MAX: Final = 1 << 20
MESSAGES_MAX: Final = 4096
TOOLS_MAX: Final = 128
BAD_WORDS_MAX: Final = 512
BAD_WORD_CHARS_MAX: Final = 256
BIASES_MAX: Final = 1024
REST_BYTES_MAX: Final = 1 << 20
REST_ITEMS_MAX: Final = 32 << 10
READ_S: Final = 10.0
READ_BYTES_MAX: Final = 2 << 30
READS_MAX: Final = 64
READ_QUEUE_BYTES: Final = 128 << 20

HEAD_S: Final = 30.0
HEADERS_MAX: Final = 128
PIPELINED_MAX: Final = 16

BODY_S: Final = 30.0
BODY_RATE_MIN: Final = 64 << 10
BODIES_MAX: Final = 16
FRAMING_BYTES_MAX: Final = 16 << 10
CHUNK_LINE_BYTES: Final = 20
CHUNKS_MAX: Final = 4096
CHUNK_BYTES_MEAN: Final = 32

JOINED_BYTES_MAX: Final = 4 << 20

UNREAD_BYTES: Final = 128 << 20

JOURNAL_BYTES: Final = 256 << 20
RESUME_S: Final = 300.0

METADATA_BYTES_MAX: Final = 64 << 10

PROBE_CONNECTIONS: Final = 16
PROBE_HEAD_S: Final = 2.0
LINGER_S: Final = 5.0
