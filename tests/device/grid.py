"""DA over the device's own door: every arena, every count of drafts, both depths. Run by
`test_pretended_steps` where it has long."""

from __future__ import annotations

import itertools

import pytest

from tests.device import engines
from tests.device.steps import close

pytestmark = pytest.mark.usefixtures("alone")

VARIED = ("arena", "mtp", "depth")
CASES = tuple(itertools.product(*(engines.FACTORS[name] for name in VARIED)))


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_the_tokens_are_those_of_the_host(values):
    case = dict(zip(VARIED, values, strict=True), mode="da", graphs="many", family="v32")
    close(engines.scenario(engines.engine("cuda", **case)), engines.expected("v32"))
