from __future__ import annotations

import numpy as np
import pytest

from ess.pool.prefix import LatestHashes, PrefixIndex, page_hash, page_hashes, root_hash


def test_only_full_pages_have_a_hash():
    assert page_hashes(range(63)) == []
    assert len(page_hashes(range(64))) == 1
    assert len(page_hashes(range(130))) == 2


def test_a_hash_covers_everything_before_its_page():
    one, two = page_hashes([1] * 128), page_hashes([2] + [1] * 127)
    assert one[0] != two[0]
    assert one[1] != two[1], "equal tokens behind different prefixes"
    assert page_hashes([1] * 200)[:2] == one


def test_salts_never_share_pages():
    assert page_hashes([1] * 64, salt=b"a") != page_hashes([1] * 64, salt=b"b")


def test_hashing_page_by_page_is_the_same():
    tokens = list(range(128))
    first = page_hash(root_hash(b"s"), tokens[:64])
    assert page_hashes(tokens, salt=b"s") == [first, page_hash(first, tokens[64:])]


def test_a_hash_stays_what_folders_of_pages_have_recorded():
    assert page_hashes(range(64))[0].hex() == "97b24be976e65f3e05bc622b02ad1773"


def test_the_longest_known_prefix_is_found():
    index, hashes = PrefixIndex(), page_hashes(range(256))
    for page, content in ((7, hashes[0]), (9, hashes[1]), (4, hashes[3])):
        assert index.publish(page, content)
    assert index.find(hashes) == [7, 9], "a gap ends the prefix"
    assert index.find(page_hashes(range(1, 65))) == []


def test_the_first_page_of_a_text_stays():
    index, content = PrefixIndex(), page_hashes(range(64))[0]
    assert index.publish(1, content)
    assert index.publish(1, content), "publishing again changes nothing"
    assert not index.publish(2, content)
    assert 1 in index
    assert 2 not in index
    index.check()


def test_idle_pages_are_forgotten_oldest_first_unless_busy_again():
    index, hashes = PrefixIndex(), page_hashes(range(192))
    for page, content in enumerate(hashes):
        index.publish(page, content)
        index.idle(page)
    assert index.idle_count == 3
    assert index.held_count == 0
    index.busy(0)
    assert not index.is_idle(0)
    assert index.held_count == 1
    assert index.forget_oldest(1) == [1]
    assert index.find(hashes) == [0]
    assert index.forget_oldest(1) == [2]
    assert index.idle_count == 0
    index.check()


def test_pages_that_were_asked_for_in_vain_keep_their_order():
    index = PrefixIndex()
    for page, content in enumerate(page_hashes(range(192))):
        index.publish(page, content)
        index.idle(page)
    before = list(index._idle)
    assert before == [0, 1, 2]
    index.ask([0])
    assert (index.idle_count, index.held_count) == (2, 1)
    index.refuse()
    assert list(index._idle) == before
    assert index.forget_oldest(1) == [0]
    index.ask([2])
    index.grant()
    assert list(index._idle) == [1]
    index.check()


class Told(list):
    """What a listener heard."""

    def published(self, content, *, parent, text):
        self.append("published")

    def forgotten(self, contents):
        self.append(list(contents))

    def emptied(self):
        self.append("emptied")


@pytest.mark.parametrize("held", [0, 1])
def test_listeners_hear_what_went_or_that_nothing_is_left(held: int):
    index, contents = PrefixIndex(), page_hashes(range(192))
    for page, content in enumerate(contents):
        index.publish(page, content)
    for page in range(held, 3):
        index.idle(page)
    index.listeners.append(told := Told())
    index.forget_idle()
    assert told == ([contents[1:]] if held else ["emptied"])
    index.forget_idle()
    assert told[1:] == ([] if held else ["emptied"])


def test_no_salt_stands_for_a_page_of_another_prompt():
    """A first page behind such a salt would be the other prompt's second page."""
    first = np.asarray(range(64), np.int64).tobytes()
    for root in (root_hash(b""), root_hash(b"a tenant")):
        assert page_hash(root, range(64)) != root_hash(root + first)


def test_hashes_of_the_latest_text_are_those_of_every_text_and_salt():
    latest, tokens = LatestHashes(64), list(range(200))
    asked = [(200, b""), (200, b""), (128, b""), (128, b"a"), (200, b"a"), (0, b"a"), (200, b"")]
    for count, salt in asked:
        assert latest.of(tokens, count, salt=salt) == page_hashes(tokens[:count], salt=salt)
    assert latest.of(tokens, 200, salt=b"") is latest.of([*tokens], 200, salt=b"")
    tokens[3] = 7
    assert latest.of(tokens, 200, salt=b"") == page_hashes(tokens)
