"""Public measurements of real servings, as conditions that can be simulated.

`measured.csv` holds every measurement that we know, even those that our tables do not cover
(`none`, with the reason). `use` says how complete the conditions are: E nearly, P with one or two
guesses, U for a bound only. `seen` says which part of the model was chosen with the row in view: a
host gap or a host time (taken from it), the share of peak of an H20, its network and tiles (from
the row's page), that a node gathers tokens, that a rack is one link, that the tokens of prompts are
sent, how many experts few tokens touch, how the row was run, which draft passes are one graph; or
no.

`output` is how many steps a request's answer takes; for a rate, tokens a step. `sends` says that
tokens were sent to their experts within a node too.

`stack` is the framework that served, if we have its tables; else SGLang's are used.

    decode    milliseconds of a step: requests per GPU x tokens a step over tokens per second
    prompt    seconds of a pass over prompts, or until a first token
    ratio     of the two rows in `over`
    rate      tokens per second of a GPU that were reached: a bound, more must be possible

`repeats.csv` holds pairs of measurements under the same stated conditions, and in what they are
apart: another run (or rank), another version of the software, another site (or its network).
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ess.sim.operators.parallel import Parallel

FILE: Final = Path(__file__).resolve().parent / "measured.csv"
REPEATS: Final = FILE.with_name("repeats.csv")


@dataclass(frozen=True, slots=True)
class Serving:
    """One row; a number that does not apply to its kind is 0."""

    texts: Mapping[str, str]

    def __getitem__(self, column: str) -> str:
        return self.texts[column]

    def number(self, column: str) -> float:
        return float(self.texts[column] or 0)

    def count(self, column: str) -> int:
        return int(self.number(column))

    @property
    def parallel(self) -> Parallel:
        return Parallel(
            attention_tp=self.count("attention_tp"),
            attention_dp=self.count("attention_dp"),
            expert_ep=self.count("expert_ep"),
            expert_tp=self.count("expert_tp"),
            pp=self.count("pp"),
            is_sending=True if self["sends"] else None,
        )


def servings() -> tuple[Serving, ...]:
    with FILE.open(newline="") as lines:
        return tuple(Serving(texts) for texts in csv.DictReader(lines))


@dataclass(frozen=True, slots=True)
class Repeat:
    """Two figures that one prediction has to serve."""

    apart: str
    first: float
    second: float

    @property
    def least_error(self) -> float:
        """The larger error of the best prediction there can be: their harmonic mean is equally far
        from both, as errors are counted here, prediction over measurement less 1.

        >>> f"{Repeat('a site', 20.0, 45.0).least_error:.3f}"  # 27.7 for 20 and for 45
        '0.385'
        """
        return abs(self.first - self.second) / (self.first + self.second)


def repeats() -> tuple[Repeat, ...]:
    with REPEATS.open(newline="") as lines:
        return tuple(
            Repeat(row["apart"], float(row["first"]), float(row["second"]))
            for row in csv.DictReader(lines)
        )
