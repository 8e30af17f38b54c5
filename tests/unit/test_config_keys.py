"""Every key of config.json is read as transformers reads it, or refused by its own name."""

from __future__ import annotations

import re

import pytest

from ess.errors import BadInput
from ess.models.registry import read_config
from tests.support.config_keys import REFUSED, SAME, Change, changed


@pytest.mark.parametrize(("family", "key", "change"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(family: str, key: str, change: Change) -> None:
    with pytest.raises(BadInput, match=rf"\b{key}\b") as refusal:
        read_config(changed(family, change))
    assert len(re.findall("config.json", str(refusal.value))) == 1


@pytest.mark.parametrize(("family", "name"), SAME)
def test_what_is_computed_is_read(family: str, name: str) -> None:
    assert read_config(changed(family, SAME[family, name])).family == family
