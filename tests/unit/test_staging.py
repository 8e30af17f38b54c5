"""How a fetch by the copy engine is cut: small chunks first, none larger than a place."""

from __future__ import annotations

import pytest

from ess.flashtrans.staging import chunks


@pytest.mark.parametrize(
    ("count", "most", "wanted"),
    [
        (1, 100, [1]),
        (12, 100, [12]),
        (13, 100, [12, 1]),
        (400, 100, [12, 24, 48, 96, 100, 100, 20]),
        (5, 1, [1] * 5),
    ],
)
def test_chunks_double_until_they_fill_a_place(count, most, wanted):
    assert list(chunks(count, most)) == wanted
