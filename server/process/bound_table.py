"""Limits on everything that a client decides, in one table.

docs/serving.md has the table, and /server_info the values of a server. If an operator can set a
bound, it names the setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from ess.engine.process.kv_events import (
    BATCH_PAGES_MAX,
    KEPT_BYTES_MAX,
    KEPT_MAX,
    REPLAYS_MAX,
    UNREAD_MAX,
)
from ess.engine.tokens import grammar
from ess.engine.tokens.grammar_child import COMPILE_CPU_S, MEMORY_BYTES_MAX, STEP_CPU_S
from ess.engine.tokens.sampling import ALLOWED_IDS_MAX
from ess.server.http.connection.reader_watch import LOOK_S
from ess.server.process.bounds import (
    BAD_WORD_CHARS_MAX,
    BAD_WORDS_MAX,
    BIASES_MAX,
    BODIES_MAX,
    BODY_RATE_MIN,
    BODY_S,
    CHUNK_BYTES_MEAN,
    CHUNKS_MAX,
    FRAMING_BYTES_MAX,
    HEAD_S,
    HEADERS_MAX,
    JOINED_BYTES_MAX,
    JOURNAL_BYTES,
    LINGER_S,
    MESSAGES_MAX,
    METADATA_BYTES_MAX,
    NAME_CHARS_MAX,
    PIPELINED_MAX,
    PROBE_CONNECTIONS,
    PROBE_HEAD_S,
    PROMPT_IDS_MAX,
    PROMPTS_MAX,
    READ_BYTES_MAX,
    READ_QUEUE_BYTES,
    READ_S,
    READS_MAX,
    REST_BYTES_MAX,
    REST_ITEMS_MAX,
    RESUME_S,
    TEXT_CHARS_MAX,
    TOOLS_MAX,
)
from ess.transfer import members
from ess.transfer.messages import MEMBERS_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`beyond` says what happens beyond it; `setting` is empty if it cannot be set."""

    what: str
    most: str
    beyond: str
    setting: str = ""

    def set_to(self, value: Any) -> Bound:
        """The bound with a setting's value: a count, seconds, or a size as written."""
        if isinstance(value, int):
            return replace(self, most=f"{value:,}")
        return replace(self, most=f"{value:g} s" if isinstance(value, float) else str(value))


BOUNDS: Final = (
    Bound(what="prompts and answers in one request", most=f"{PROMPTS_MAX}", beyond="400"),
    Bound(
        what="the characters of all texts of a request",
        most=f"{TEXT_CHARS_MAX:,}, and no text longer than the longest request could be",
        beyond="400 before anything is encoded",
    ),
    Bound(what="the tokens of all prompts of a request", most=f"{PROMPT_IDS_MAX:,}", beyond="400"),
    Bound(
        what="messages; tools; entries of logit_bias, of stop_token_ids",
        most=f"{MESSAGES_MAX:,}; {TOOLS_MAX:,}; {BIASES_MAX:,} each",
        beyond="400",
    ),
    Bound(
        what="a body without its prompt: tools, schemas, parameters",
        most=f"{REST_BYTES_MAX >> 20} MiB, {REST_ITEMS_MAX:,} values",
        beyond="400",
    ),
    Bound(
        what="reading and encoding a body",
        most=f"{READ_S:g} s and {READ_BYTES_MAX >> 30} GiB in a text process",
        beyond="400; the process is ended",
    ),
    Bound(
        what="bodies that wait for a text process",
        most=f"{READS_MAX}, of {READ_QUEUE_BYTES >> 20} MiB together",
        beyond="503 with Retry-After",
    ),
    Bound(
        what="an id: rid, request_id, session_id, their headers",
        most=f"{NAME_CHARS_MAX} visible ASCII characters",
        beyond="400; a header that is none is ignored",
    ),
    Bound(
        what="connections",
        most="1,024",
        beyond=f"503; {PROBE_CONNECTIONS} more are taken for probes, /metrics and /peers, "
        f"and have {PROBE_HEAD_S:g} s to ask",
        setting="--max-connections",
    ),
    Bound(
        what="a request's line and headers", most="32KiB", beyond="431", setting="--header-bytes"
    ),
    Bound(what="headers of a request", most=f"{HEADERS_MAX}", beyond="431"),
    Bound(
        what="time for a request's line and headers",
        most=f"{HEAD_S:g} s",
        beyond="the connection is closed",
    ),
    Bound(
        what="requests that wait behind another on a connection",
        most=f"{PIPELINED_MAX}",
        beyond="the connection is closed",
    ),
    Bound(what="a body", most="32MiB", beyond="413", setting="--body-bytes"),
    Bound(
        what="bodies that are being received, together",
        most=f"{BODIES_MAX} of the longest",
        beyond="503",
    ),
    Bound(
        what="time for a body",
        most=f"{BODY_S:g} s, and 1 s per {BODY_RATE_MIN >> 10} KiB that have come",
        beyond="408",
    ),
    Bound(
        what="chunk extensions and trailers of a body",
        most=f"{FRAMING_BYTES_MAX >> 10} KiB",
        beyond="400",
    ),
    Bound(
        what="chunks of a body",
        most=f"{CHUNKS_MAX:,}, and 1 more per {CHUNK_BYTES_MEAN} bytes that have come",
        beyond="400",
    ),
    Bound(
        what="time without a request on a connection",
        most="75 s",
        beyond="the connection is closed",
        setting="--idle-s",
    ),
    Bound(
        what="time in which a client takes nothing of its answer",
        most="60 s",
        beyond="the connection is closed",
        setting="--stall-s",
    ),
    Bound(
        what="pieces of answers that wait for slow clients, of all in a process of the server",
        most="128MiB",
        beyond="the answer of which most waits ends with an error, `slow_reader`",
        setting="--unread-bytes",
    ),
    Bound(
        what="answers in sockets of slow clients, of all in a process, as long as several wait",
        most="128MiB",
        beyond=f"after {LOOK_S:g} s connections are closed, those first for which most waits",
        setting="--unread-bytes",
    ),
    Bound(
        what="time in which the rest of a refused request is still taken",
        most=f"{LINGER_S:g} s",
        beyond="the connection is closed",
    ),
    Bound(what="a grammar: its text", most=f"{grammar.GRAMMAR_BYTES_MAX >> 10} KiB", beyond="400"),
    Bound(
        what="a grammar: processor time to compile it",
        most=f"{COMPILE_CPU_S:g} s",
        beyond="400, and again at once: the last refusals are remembered",
    ),
    Bound(
        what="a grammar: memory",
        most=f"{MEMORY_BYTES_MAX >> 20} MiB",
        beyond="400, and again at once",
    ),
    Bound(
        what="a grammar: processor time for one token",
        most=f"{STEP_CPU_S:g} s",
        beyond="400, or an error in the stream",
    ),
    Bound(
        what="grammars that are compiled at once, and in use",
        most=f"{grammar.COMPILING_MAX}, {grammar.ROOMS_MAX}",
        beyond="the request waits",
    ),
    Bound(what="cache_salt, extra_key", most=f"{NAME_CHARS_MAX} characters", beyond="400"),
    Bound(
        what="bad_words",
        most=f"{BAD_WORDS_MAX} words of {BAD_WORD_CHARS_MAX} characters",
        beyond="400",
    ),
    Bound(
        what="what a prefill worker answers at /peers, of all its stages",
        most=f"{members.METADATA_BYTES_MAX >> 10} KiB, {MEMBERS_MAX} stages",
        beyond="it is not met, and /server_info says why",
    ),
    Bound(
        what="what another worker says of itself at /peers",
        most=f"{METADATA_BYTES_MAX >> 10} KiB, sealed; {BODIES_MAX} of these at once",
        beyond="413; without the seal 403; 503",
    ),
    Bound(what="allowed_token_ids", most=f"{ALLOWED_IDS_MAX:,}", beyond="400"),
    Bound(
        what="a body that names the response it follows, with all items before it",
        most=f"{JOINED_BYTES_MAX >> 20} MiB; a longer body's response is not kept",
        beyond="400",
    ),
    Bound(
        what="prompts and tokens of requests that go on behind a lost engine (--recover resume)",
        most=f"{JOURNAL_BYTES >> 20} MiB, and {RESUME_S:g} s until the next engine is ready",
        beyond="they end with an error, as all do with --recover fail",
    ),
    Bound(
        what="KV events that a subscriber has not taken",
        most=f"{UNREAD_MAX:,} batches of {BATCH_PAGES_MAX} pages",
        beyond="it misses batches, which their numbers show",
    ),
    Bound(
        what="KV events kept to be sent again; to how many at once",
        most=f"{KEPT_MAX:,} batches, {KEPT_BYTES_MAX >> 20} MiB; {REPLAYS_MAX}",
        beyond="the oldest is dropped",
    ),
)


def in_force(settings: Mapping[str, Any]) -> list[dict[str, str]]:
    """All bounds, with the values of these settings where they have one."""
    listed = []
    for bound in BOUNDS:
        name = bound.setting.removeprefix("--").replace("-", "_")
        listed.append(asdict(bound.set_to(settings[name]) if name in settings else bound))
    return listed
