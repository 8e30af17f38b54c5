"""What both console scripts share: documents on stdout, prose on stderr, one set of exit codes."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import cyclopts
import msgspec

from ess.errors import BadInput, EssError

if TYPE_CHECKING:
    from rich.console import Console

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130

COMPLETES: Final = "What makes a shell complete commands and flags"
PIPE_WIDTH: Final = 1000
PATIENCE_S: Final = 1.5
SHOWN_EVERY_S: Final = 4.0


def _whole_number(of: Any, tokens: Sequence[cyclopts.Token]) -> int:
    """Reads a whole number as it was written: cyclopts alone would round 32.5 to 32."""
    try:
        return int(tokens[0].value)
    except ValueError:
        flag = tokens[0].keyword or ""
        raise BadInput(f"{flag} {tokens[0].value} is not a whole number") from None


WHOLE: Final = cyclopts.Parameter(converter=_whole_number)
Whole = Annotated[int, WHOLE]
MaybeWhole = Annotated[int | None, WHOLE]
Shell = Annotated[
    Literal["bash", "zsh", "fish"], cyclopts.Parameter(help="The shell that reads it.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand as a line in a table. A `home` "module:function" is imported when it is used.
    The list of commands shows it under `group`; its own help shows `more` below the summary."""

    name: str
    home: str | Callable[..., object]
    summary: str
    group: str = "Commands"
    more: str = ""


def _shown_default(value: object) -> str | None:
    """A switch that is off needs no word."""
    return None if value is None or value is False else str(value)


def make_app(name: str, *, summary: str, version: str, commands: Sequence[Command]) -> cyclopts.App:
    app = cyclopts.App(
        name=name,
        help=summary,
        version=version,
        help_format="plaintext",
        suppress_keyboard_interrupt=False,
        group_commands=cyclopts.Group("Options", sort_key=len(commands) + 1),
        default_parameter=cyclopts.Parameter(negative=(), show_default=_shown_default),
    )
    home, summary = _completion_of(app), f"{COMPLETES}: `. <({name} completion bash)`."
    commands = (*commands, Command(name="completion", home=home, summary=summary, group="Shell"))
    names = list(dict.fromkeys(command.group for command in commands))
    groups = {name: cyclopts.Group(name, sort_key=place) for place, name in enumerate(names)}
    for place, command in enumerate(commands):
        app.command(
            command.home,
            name=command.name,
            help="\n\n".join(filter(None, (command.summary, command.more))),
            group=groups[command.group],
            sort_key=place,
        )
    return app


def _completion_of(app: cyclopts.App) -> Callable[..., object]:
    def completion(shell: Shell, /) -> None:
        print(app.generate_completion(shell=shell))

    return completion


def run(app: cyclopts.App, arguments: Sequence[str] | None) -> int:
    """Runs one command line, returns its exit code; every refusal is a sentence on stderr."""
    try:
        result = app(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except cyclopts.UnknownOptionError as error:
        return _refuse(app, _unknown(error), USAGE)
    except cyclopts.UnusedCliTokensError as error:
        return _refuse(app, _too_many(error), USAGE)
    except cyclopts.CycloptsError as error:
        is_ours = isinstance(error.__cause__, BadInput)
        return _refuse(app, error.__cause__ if is_ours else error, USAGE)
    except BadInput as error:
        return _refuse(app, error, USAGE)
    except BrokenPipeError:
        drop_stdout()
        return FAILED
    except EssError as error:
        return _refuse(app, error, FAILED)
    except OSError as error:
        is_of_a_file = error.filename is not None and error.strerror is not None
        return _refuse(
            app, f"{error.filename}: {error.strerror}" if is_of_a_file else error, FAILED
        )
    except KeyboardInterrupt:
        return _refuse(app, "interrupted", INTERRUPTED)
    return result if isinstance(result, int) else OK


def _unknown(error: cyclopts.UnknownOptionError) -> str:
    """Names the option without its value, which may be secret, and suggests the nearest one."""
    given = (error.token.keyword or error.token.value).partition("=")[0]
    known = [name for argument in error.argument_collection for name in argument.names]
    close = difflib.get_close_matches(given, known, n=5, cutoff=0.75)
    close.sort(key=lambda name: sorted(name) != sorted(given))
    return f"unknown option {given}" + (f"; did you mean {close[0]}?" if close else "")


def _too_many(error: cyclopts.UnusedCliTokensError) -> str:
    """Says how many words have no place, and none of them: one may be a secret."""
    count = len(error.unused_tokens or ())
    words = "1 word has" if count == 1 else f"{count} words have"
    return f"{words} no place: a value follows its flag, several with commas, as --flag a,b"


def print_json(document: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def drop_stdout() -> None:
    """The reader of stdout is gone: discards what is still buffered and all later output."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def check_folder(option: str, path: Path | None) -> None:
    """Refuses, before any work, a file or folder to be made in a folder that does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise BadInput(f"{option} {path}: the folder {path.parent} does not exist; make it first")


def check_file(option: str, path: Path | None) -> None:
    """Refuses, before any work, a file that cannot be made: its folder does not exist, or it is a
    folder itself."""
    check_folder(option, path)
    if path is not None and path.is_dir():
        raise BadInput(f"{option} {path}: it is a folder; name a file")


def tables() -> Console:
    """A console for tables on stdout. Brackets are plain text, as in `pip install 'ess[nixl]'`; a
    pipe or a log file has no width to wrap at, nor to fill with blanks."""
    from rich.console import Console

    out = Console(highlight=False, markup=False)
    if not out.is_terminal:
        out.width = PIPE_WIDTH
        out.file = cast("IO[str]", _Trimmed(out.file))
    return out


class _Trimmed:
    """A stream that gets no blanks at the ends of lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +\n", "\n", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def note(sentence: str, *, end: str = "\n") -> None:
    """Prints prose on stderr, for the person who waits; a stderr that is closed is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(sentence, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def patience(sentence: str) -> Iterator[None]:
    """Prints the sentence if the block takes long, so that the screen is not silent for long."""
    timer = threading.Timer(PATIENCE_S, note, [sentence])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def seconds_shown(every_s: float = SHOWN_EVERY_S) -> Iterator[None]:
    """On a terminal, shows every few seconds how long the block has run; a note writes over it."""
    if not os.isatty(2):
        yield
        return
    ended, start = threading.Event(), time.monotonic()

    def show() -> None:
        while not ended.wait(every_s):
            note(f"{time.monotonic() - start:4.0f} s", end="\r")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        note(" " * 6, end="\r")


def _refuse(app: cyclopts.App, reason: object, code: int) -> int:
    note(f"{app.name[0]}: {reason}")
    return code
