"""Has grammars compiled and walks along them, under a limit of memory. Run by `KeptChild`.

Lines in the grammars' own processes are not traced: only lines of the code that handles them count.
Only `walked` knows how to call the package.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ess.engine.tokens.grammar import Grammar, Grammars, Matcher
from ess.errors import BadInput, EssError, Unavailable
from ess.models.text.tokenizer import Tokenizer
from ess.server.commands.start.files.checkpoint import embedded_path
from tests.fuzz.lines import Lines, sources
from tests.fuzz.rig import EOS, VOCABULARY, described

GRAMMAR_FILES = ("engine/tokens/grammar.py", "engine/tokens/sandbox.py")
MEMORY_BYTES_MAX = 2 << 30
OUTPUT_MAX = 24


def walked(
    grammars: Grammars, asked: dict[str, Any], tell: Callable[[dict[str, Any]], None]
) -> str:
    """Follows the grammar, always along a token that is allowed; returns the output's ids."""
    grammar = Grammar(asked["kind"], asked["text"])
    grammars.want(grammar)
    while (matcher := grammars.matcher(grammar)) is None:
        grammars.wait()
    tell({"stage": "walk"})
    try:
        return str(followed(matcher, asked))
    finally:
        matcher.close()
        grammars.check()


def followed(matcher: Matcher, asked: dict[str, Any]) -> list[int]:
    output: list[int] = []
    for pick in asked["picks"][:OUTPUT_MAX]:
        masks = matcher.allowed(output, asked["drafts"])
        assert masks.shape[1] == VOCABULARY, f"a mask of {masks.shape[1]} tokens"
        assert masks[0].any(), "a mask without a token"
        allowed = np.flatnonzero(masks[0])
        token = int(allowed[pick % len(allowed)])
        if token == EOS:
            break
        output.append(token)
    return output


def answered(
    grammars: Grammars, asked: dict[str, Any], tell: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """What went wrong, if it is not one of the errors that a client may get."""
    try:
        return {"output": walked(grammars, asked, tell)}
    except EssError as error:
        if isinstance(error, BadInput | Unavailable) and str(error).strip():
            return {"refused": str(error)[:300]}
        return {"wrong": [*described(error), repr(error)[:500]]}
    except Exception as error:
        return {"wrong": [*described(error), repr(error)[:500]]}


def main() -> None:
    grammars = Grammars(Tokenizer(embedded_path()), vocabulary=VOCABULARY, ends=frozenset({EOS}))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def tell(line: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    with Lines(sources(*GRAMMAR_FILES)) as lines:
        tell({"stage": "ready"})
        for line in sys.stdin:
            lines.forget()
            answer = answered(grammars, json.loads(line), tell)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            tell({"is_last": True, "lines": sorted(lines.seen), "rss_kb": grown, **answer})


if __name__ == "__main__":
    main()
