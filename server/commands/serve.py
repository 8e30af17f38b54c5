"""The command lines of `ess serve`, `ess prefill` and `ess decode`: a flag for every setting, made
from its definition. The last two are the first with a role."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

from cyclopts import Group, Parameter
from cyclopts.help import (
    ColumnSpec,
    DefaultFormatter,
    DescriptionRenderer,
    HelpPanel,
    NameRenderer,
)

from ess import console
from ess.config import Setting
from ess.errors import BadInput, not_installed
from ess.server.commands.pd.routers import RouterName
from ess.server.commands.start.compat.compat_flags import (
    DP_ATTENTION,
    FLAGS,
    ForeignFlags,
    check_foreign,
)
from ess.server.commands.start.setting_checks import OF_DECODING
from ess.server.commands.start.settings import FIELDS, SECTIONS

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions


# What most people set: in the help it stands before the sections.
COMMON: Final = (
    *("host", "port", "api_key_file", "served_model_name", "max_model_len", "max_running"),
    *("host_bytes", "slot_bytes", "prefix_cache_dir", "mtp", "device", "threads"),
)


# No flag is broken in two: the library's own limit is 28 characters on a terminal of 80.
NAMES_WIDTH: Final = max(len(known.flag) for known in FIELDS.values())
COLUMNS: Final = (
    ColumnSpec(renderer=NameRenderer(NAMES_WIDTH), style="cyclopts.name", max_width=NAMES_WIDTH),
    ColumnSpec(renderer=DescriptionRenderer(), overflow="fold"),
)


def explained(known: Setting) -> str:
    """The help of a flag: the setting's own, then the allowed values, the default, and other names
    of the flag."""
    facts = [known.allowed, f"default {shown}" if (shown := shown_default(known)) else ""]
    facts.append(f"off: --no-{known.flag[2:]}" if known.default is True else "")
    facts.append(" ".join(("or", *FLAGS[known.name])) if known.name in FLAGS else "")
    listed = "; ".join(filter(None, facts))
    return f"{known.help} [{listed}]" if listed else known.help


def shown_default(known: Setting) -> str:
    match known.default:
        case bool():
            return "on" if known.default else ""
        case float():
            return f"{known.default:g}"
    return str(known.default)


def _one_name(console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
    """Prints a section of the help with one name for each flag: its text has the others."""
    entries = [
        entry.copy(positive_names=entry.positive_names[:1], negative_names=())
        for entry in panel.entries
    ]
    DefaultFormatter(column_specs=COLUMNS)(console, options, panel.copy(entries=entries))


def _section(known: Setting) -> Group:
    is_common = known.name in COMMON
    name, place = ("common", -1) if is_common else (known.section, SECTIONS.index(known.section))
    return Group(name.capitalize(), sort_key=place, help_formatter=_one_name)


def _flag(known: Setting, *, show: bool) -> Any:
    """A choice is plain text here: `settings.resolve` also takes the names of other engines."""
    kind = known.type if known.type in (bool, int, float) else str
    parameter = Parameter(
        name=(known.flag, *FLAGS.get(known.name, ())),
        negative=(f"--no-{known.flag[2:]}",) if kind is bool else (),
        help=explained(known),
        show=show,
        group=_section(known),
    )
    return Annotated[kind, parameter]


def _flags_but(*absent: str, refused: Collection[str] = ()) -> dict[str, Any]:
    """The key for a router's control plane has no flag, as process lists show flags. A refused flag
    is read, in order to say why, but not listed in the help."""
    absent = (*absent, "register_key")
    fields = {name: known for name, known in FIELDS.items() if name not in absent}
    return {name: _flag(known, show=name not in refused) for name, known in fields.items()}


NOT_OF_PREFILL: Final = ("model", "role", "peers", "fake_prefill", "handoff_failure")
NOT_OF_DECODE: Final = ("model", "role", "bootstrap_port")

if TYPE_CHECKING:
    ServeFlags = dict[str, Any]
    PrefillFlags = dict[str, Any]
    DecodeFlags = dict[str, Any]
else:
    ServeFlags = TypedDict("ServeFlags", _flags_but("model"), total=False)
    PrefillFlags = TypedDict(
        "PrefillFlags", _flags_but(*NOT_OF_PREFILL, refused=OF_DECODING), total=False
    )
    DecodeFlags = TypedDict("DecodeFlags", _flags_but(*NOT_OF_DECODE), total=False)

Model = Annotated[str | None, Parameter(name=FLAGS["model"], help=FIELDS["model"].help)]
Foreign = Annotated[ForeignFlags | None, Parameter(name="*")]
ConfigFile = Annotated[
    Path | None,
    Parameter(help="A TOML or JSON file of settings; the environment and flags override it."),
]
AsJson = Annotated[bool, Parameter(help="Print what is served as one JSON document, and serve.")]


def serve(
    model: Model = None,
    *,
    flags: Annotated[ServeFlags | None, Parameter(name="*")] = None,
    foreign: Foreign = None,
    config: ConfigFile = None,
    json: AsJson = False,
    pd: str | None = None,
    router: RouterName | None = None,
) -> int:
    """Serve a model over HTTP: prompts and answers in one process pair.

    Every setting can also stand in a file or in the environment, as ESS_ and its name.

    Parameters
    ----------
    pd
        Such as 1p3d: 1 worker for prompts and 3 for answers, behind a stock router.
    router
        The router to use; by default the first that is installed.
    """
    given = {**(flags or {}), "model": model}
    if pd is not None:
        return _serve_pd(pd, router, given, foreign, config=config, json=json)
    if router is not None:
        raise BadInput("router is for --pd: without --pd no router is started")
    return _serve(given, foreign, config=config, json=json)


def prefill(
    model: Model = None,
    *,
    flags: Annotated[PrefillFlags | None, Parameter(name="*")] = None,
    foreign: Foreign = None,
    config: ConfigFile = None,
    json: AsJson = False,
    tune: bool = False,
    tune_prompt: str = "8k",
    tune_rounds: int = 3,
) -> int:
    """Compute prompts for decode workers, which get the rows: `ess serve --role prefill`.

    Behind a router for prefill and decode, which sends it every request. Needs --peer-secret-file.

    Parameters
    ----------
    tune
        Serve nothing: find the fastest chunks and layers of each stage here, as flags to set.
    tune_prompt
        The length of the prompts to tune for.
    tune_rounds
        How often each of the best settings is run.
    """
    given = {**(flags or {}), "model": model, "role": "prefill"}
    if not tune:
        return _serve(given, foreign, config=config, json=json)
    given = _with_foreign(given, foreign)
    from ess.server.commands.tune import tune as tuned

    return tuned(given, config=config, prompt=tune_prompt, rounds=tune_rounds, json=json)


def decode(
    model: Model = None,
    *,
    flags: Annotated[DecodeFlags | None, Parameter(name="*")] = None,
    foreign: Foreign = None,
    config: ConfigFile = None,
    json: AsJson = False,
) -> int:
    """Answer prompts that prefill workers have made: `ess serve --role decode`.

    --peers are the prefill workers, as the router names them. Needs --peer-secret-file.
    """
    given = {**(flags or {}), "model": model, "role": "decode"}
    return _serve(given, foreign, config=config, json=json)


def _serve_pd(
    pd: str,
    router: RouterName | None,
    flags: dict[str, Any],
    foreign: Foreign,
    *,
    config: Path | None,
    json: bool,
) -> int:
    flags = _with_foreign(flags, foreign)
    flags.pop(DP_ATTENTION, None)  # there is one rank
    try:
        from ess.server.commands.pd.processes import serve_pd
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), extra="serve") from None
    return serve_pd(pd, router, flags, config=config, json=json)


def _serve(flags: dict[str, Any], foreign: Foreign, *, config: Path | None, json: bool) -> int:
    flags = _with_foreign(flags, foreign)
    try:
        from ess.server.commands.start.begin import serve_flags
    except ModuleNotFoundError as error:
        raise not_installed(str(error.name), extra="serve") from None
    return serve_flags(flags, config=config, json=json)


def _with_foreign(flags: dict[str, Any], foreign: Foreign) -> dict[str, Any]:
    """The flags as other projects' flags change them; notes those that change nothing."""
    foreign = foreign or {}
    for sentence in check_foreign(foreign):
        console.note(f"ess: {sentence}")
    return {**flags, DP_ATTENTION: True} if foreign.get(DP_ATTENTION) else flags
