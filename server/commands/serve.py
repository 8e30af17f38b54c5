"""The command line of `ess serve`: a flag for every setting, made from its definition."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from cyclopts import Group, Parameter

from ess import console
from ess.config import Setting
from ess.errors import Unavailable
from ess.server.commands.start.compat_flags import FLAGS, ForeignFlags, check_foreign
from ess.server.commands.start.settings import FIELDS, SECTIONS


def explained(known: Setting) -> str:
    """Its help, then what is allowed and the default."""
    facts = [known.allowed, f"default {shown}" if (shown := shown_default(known)) else ""]
    listed = "; ".join(filter(None, facts))
    return f"{known.help} [{listed}]" if listed else known.help


def shown_default(known: Setting) -> str:
    match known.default:
        case bool():
            return "on" if known.default else ""
        case float():
            return f"{known.default:g}"
    return str(known.default)


def _flag(known: Setting) -> Any:
    """Choices are plain text here: `settings.resolve` also takes their names elsewhere."""
    kind = known.type if known.type in (bool, int, float) else str
    parameter = Parameter(
        name=(known.flag, *FLAGS.get(known.name, ())),
        negative=(f"--no-{known.flag[2:]}",) if kind is bool else (),
        help=explained(known),
        group=Group(known.section, sort_key=SECTIONS.index(known.section)),
    )
    return Annotated[kind, parameter]


if TYPE_CHECKING:
    ServeFlags = dict[str, Any]
else:
    ServeFlags = TypedDict(
        "ServeFlags",
        {name: _flag(known) for name, known in FIELDS.items() if name != "model"},
        total=False,
    )


def serve(
    model: Annotated[str | None, Parameter(name=FLAGS["model"], help=FIELDS["model"].help)] = None,
    *,
    flags: Annotated[ServeFlags | None, Parameter(name="*")] = None,
    foreign: ForeignFlags | None = None,
    config: Path | None = None,
    json: bool = False,
) -> int:
    """Serve a model over HTTP: prompts and answers in one process pair.

    Every setting can also stand in a file or in the environment, as ESS_ and its name.

    Parameters
    ----------
    config
        A TOML or JSON file of settings; the environment and flags override it.
    json
        Print what is served as one JSON document.
    """
    for sentence in check_foreign(foreign or ForeignFlags()):
        console.note(f"ess: {sentence}")
    try:
        from ess.server.commands.start.launch import serve_flags
    except ModuleNotFoundError as error:
        raise Unavailable(f"{error.name} is missing: install ess[serve]") from None
    return serve_flags({**(flags or {}), "model": model}, config=config, json=json)
