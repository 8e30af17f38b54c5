"""A setting, said once: a field of a dataclass, with what its name, type and default leave open.

    mtp: int = setting(1, "engine", "Tokens that a step verifies.", (1, 8))

`check` holds the values against it. For `ess serve` everything else follows too: the flag and its
help, the variable, the key in a file, the message that starts the engine process, /server_info and
the tables of docs/serving.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ess.errors import BadInput

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`bounds` are the least and the greatest number, `least` is the least size; a secret is never
    shown."""

    name: str
    type: Any
    default: Any
    section: str
    help: str
    bounds: tuple[float, float] | None
    least: str
    is_secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def choices(self) -> tuple[str, ...]:
        return _choices(self.type)

    @property
    def allowed(self) -> str:
        """The choices and the bounds, for people; empty if everything of its type is allowed."""
        span = () if self.bounds is None else ("{:.12g}..{:.12g}".format(*self.bounds),)
        least = (f"at least {self.least}",) if self.least else ()
        return ", ".join((*self.choices, *span, *least))

    def check(self, value: Any) -> None:
        if isinstance(value, str):
            is_allowed = value in self.choices or not (self.choices or self.bounds)
        else:
            is_allowed = self.bounds is None or self.bounds[0] <= value <= self.bounds[1]
        if not is_allowed:
            raise BadInput(f"{self.name} is {value!r}, must be {self.allowed}")


def setting(
    default: T,
    section: str,
    help: str,
    bounds: tuple[float, float] | None = None,
    *,
    least: str = "",
    is_secret: bool = False,
) -> T:
    """A field of a dataclass that is a setting: `settings_of` gives it back with name and type."""
    limits = {"bounds": bounds, "least": least}
    metadata = {"section": section, "help": help, "is_secret": is_secret, **limits}
    setting_field: T = dataclasses.field(default=default, metadata=metadata, repr=not is_secret)
    return setting_field


def settings_of(kind: type[Any]) -> Mapping[str, Setting]:
    """The settings by name, those of base classes first; other fields are left out."""
    types = get_type_hints(kind)
    return {
        field.name: Setting(
            name=field.name, type=types[field.name], default=field.default, **field.metadata
        )
        for field in dataclasses.fields(kind)
        if field.metadata
    }


def check(config: object) -> None:
    """Every setting is within its choices and bounds; the first that is not is named."""
    for name, known in settings_of(type(config)).items():
        known.check(getattr(config, name))


def _choices(kind: Any) -> tuple[str, ...]:
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(choice for member in get_args(kind) for choice in _choices(member))
