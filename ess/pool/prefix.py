"""Which page holds which text: the prefix cache as a map from content hash to page.

A page's hash covers its 64 tokens and, through its parent's hash, everything before it, so equal
hashes mean equal prefixes and a page can be shared without looking at its neighbours. Idle pages
are forgotten least recently used first; a closing sequence idles its pages deepest first, because
a page without its parents can never be found again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from ess.units import PAGE_ROWS

HASH_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    """The hash that first pages use as their parent's. Different salts never share pages.

    The hash of a salt is personalised. A page's hash is one of bytes as well: without that, a salt
    that equals the hashed bytes of some page would act as its hash, and pages behind that page
    would match as first pages.
    """
    person = b"salt" if salt else b""
    return hashlib.blake2b(salt, digest_size=HASH_BYTES, person=person).digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    return _hashed(parent, memoryview(array("q", tokens)))


def _hashed(parent: bytes, text: memoryview) -> bytes:
    """`text` has each token in 64 bits."""
    assert len(text) % PAGE_ROWS == 0 < len(text), len(text)
    digest = hashlib.blake2b(parent, digest_size=HASH_BYTES)
    digest.update(text)
    return digest.digest()


def page_hashes(
    tokens: Sequence[int], *, salt: bytes = b"", page_tokens: int = PAGE_ROWS
) -> list[bytes]:
    """The hash of each full page, over all tokens up to its end."""
    hashes, text = list[bytes](), memoryview(array("q", tokens))
    parent = root_hash(salt)
    for start in range(0, len(text) - page_tokens + 1, page_tokens):
        parent = _hashed(parent, text[start : start + page_tokens])
        hashes.append(parent)
    assert len(hashes) == len(tokens) // page_tokens, f"{len(hashes)} pages of {len(tokens)} tokens"
    return hashes


class LatestHashes:
    """Keeps the hashes of the text that was opened or counted last. A refused sequence is opened
    again with the same text, and so is a text whose pages on the disk were counted."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._salt, self._text, self._hashes = b"", list[int](), list[bytes]()

    def of(self, tokens: list[int], count: int, *, salt: bytes) -> list[bytes]:
        """Hashes of the full pages of the first `count` tokens; the caller must not change the
        list."""
        text = tokens[:count]
        if salt != self._salt or text != self._text:
            self._hashes = page_hashes(text, salt=salt, page_tokens=self._page_tokens)
            self._salt, self._text = salt, text
        return self._hashes


class PrefixListener(Protocol):
    """Called for every change of the index, in order."""

    def published(self, content: bytes, *, parent: bytes, text: Sequence[int]) -> None: ...

    def forgotten(self, contents: Sequence[bytes]) -> None: ...

    def emptied(self) -> None: ...


class PrefixIndex:
    """`listeners` hear of every change; with listeners a publisher passes the page's text too."""

    def __init__(self) -> None:
        self.listeners: list[PrefixListener] = []
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._asked: list[int] = []

    @property
    def idle_count(self) -> int:
        return len(self._idle) - len(self._asked)

    @property
    def held_count(self) -> int:
        """Published pages that some sequence reads."""
        return len(self._hash_of) - self.idle_count

    def __contains__(self, page: int) -> bool:
        return page in self._hash_of

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Pages of the longest prefix that is published."""
        pages = []
        for item in hashes:
            page = self._page_of.get(item)
            if page is None:
                break
            pages.append(page)
        assert len(set(pages)) == len(pages), "a page stands twice in one prefix"
        return pages

    def content_of(self, page: int) -> bytes | None:
        """The hash of the page's text, if it is published."""
        return self._hash_of.get(page)

    def publish(
        self, page: int, content: bytes, *, parent: bytes = b"", text: Sequence[int] = ()
    ) -> bool:
        """Returns False when another page has this text already; that page stays."""
        assert page not in self._idle, "an idle page is complete and was published before"
        if self._page_of.get(content, page) != page:
            return False
        assert self._hash_of.get(page, content) == content, "a page cannot change its text"
        if page in self._hash_of:
            return True
        self._page_of[content] = page
        self._hash_of[page] = content
        is_text = len(text) % PAGE_ROWS == 0 < len(text)
        assert is_text or not self.listeners, f"{len(text)} tokens were published"
        for listener in self.listeners:
            listener.published(content, parent=parent, text=text)
        return True

    def idle(self, page: int) -> None:
        assert page in self._hash_of, "only published pages are kept when idle"
        assert page not in self._idle, "a page idles once"
        self._idle[page] = None

    def busy(self, page: int) -> None:
        self._idle.pop(page, None)

    def ask(self, pages: Iterable[int]) -> None:
        """A sequence that may still be refused would read these pages. Idle ones among them keep
        their places in the order, but count as idle no more, until `grant` or `refuse`."""
        assert not self._asked, "pages are asked for one sequence after the other"
        self._asked = [page for page in pages if page in self._idle]

    def grant(self) -> None:
        """The pages that were asked for are busy."""
        for page in self._asked:
            del self._idle[page]
        self._asked = []

    def refuse(self) -> None:
        self._asked = []

    def is_idle(self, page: int) -> bool:
        return page in self._idle

    def forget_oldest(self, count: int) -> list[int]:
        """Unpublishes the longest unused idle pages and returns them, the longest unused first."""
        forgotten = [self._forget() for _ in range(count)]
        for listener in self.listeners:
            listener.forgotten([content for _, content in forgotten])
        return [page for page, _ in forgotten]

    def forget_idle(self) -> list[int]:
        """Unpublishes all idle pages and returns them, the longest unused first."""
        forgotten = [self._forget() for _ in range(self.idle_count)]
        for listener in self.listeners:
            if not self._hash_of:
                listener.emptied()
            elif forgotten:
                listener.forgotten([content for _, content in forgotten])
        return [page for page, _ in forgotten]

    def _forget(self) -> tuple[int, bytes]:
        assert self._idle, "no page is idle, so none can be forgotten"
        assert not self._asked, "pages that were asked for are neither granted nor refused"
        page, _ = self._idle.popitem(last=False)
        content = self._hash_of.pop(page)
        assert self._page_of[content] == page, f"the text of page {page} leads to another page"
        del self._page_of[content]
        return page, content

    def check(self) -> None:
        assert len(self._page_of) == len(self._hash_of), "two texts share a page, or two pages one"
        for content, page in self._page_of.items():
            assert self._hash_of[page] == content, f"page {page} and its hash disagree"
        assert all(page in self._hash_of for page in self._idle), "an idle page has no hash"
        assert not self._asked, "pages that were asked for are neither granted nor refused"
