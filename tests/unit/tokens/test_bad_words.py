"""Bad words against the rule written down, and the work of many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ess.engine.tokens.bad_words import BadWords

IDS = st.integers(0, 3)
WORD = st.lists(IDS, min_size=1, max_size=4).map(tuple)


@given(st.lists(WORD, min_size=1, max_size=8), st.lists(IDS, max_size=8), st.lists(IDS, max_size=3))
def test_a_word_is_forbidden_at_its_last_id(words, output, drafts):
    forbidden = BadWords(words).forbidden(output, drafts)
    assert len(forbidden) == len(drafts) + 1
    for count, ids in enumerate(forbidden):
        said = [*output, *drafts[:count]]
        assert set(ids) == {
            token
            for token in range(4)
            if any(tuple([*said, token][-len(word) :]) == word for word in words)
        }


def test_a_step_looks_up_lengths_and_not_words():
    made = BadWords([(7, word, 9) for word in range(1000)] + [(5,)])
    assert made._lengths == [0, 2]
    assert made.forbidden([1, 7, 44], [2]) == [[5, 9], [5]]
