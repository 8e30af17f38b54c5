"""The text that the embedded model is made of: permissively licensed Debian documentation.

`python -m ess.models.tiny.trainer.texts.corpus --into FOLDER` downloads the packages below (or
reads already unpacked ones), turns them into plain text and writes train.txt, held_out.txt and
corpus.json.

Held-out is decided per package, here, before any training: no project has text on both sides.
Paragraphs are kept once per side, and training drops every paragraph and every long line that
also occurs on the held-out side, so a held-out number never measures memory of the same sentence.
"""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from ess.errors import BadInput, Unavailable

Role = Literal["train", "held-out"]

DOCUMENT_END: Final = "\x00"
PARAGRAPH_LENGTH_MIN: Final = 40
LINE_LENGTH_MIN: Final = 60
DOCUMENT_BYTES_MAX: Final = 4 << 20
HELD_OUT_EVERY: Final = 20
NOT_PAGES: Final = frozenset(
    {"genindex.html", "genindex-all.html", "search.html", "py-modindex.html"}
)


@dataclass(frozen=True, slots=True)
class Package:
    """One Debian package: its text's licence, its side, and where its pages lie."""

    name: str
    licence: str
    role: Role
    under: tuple[str, ...] = ("usr/share",)


_RUST = "usr/share/doc/rust-doc/html"
RUST_BOOKS: Final = tuple(
    f"{_RUST}/{book}"
    for book in (
        "book",
        "reference",
        "rust-by-example",
        "nomicon",
        "edition-guide",
        "embedded-book",
    )
)
APACHE_ENGLISH: Final = "usr/share/doc/apache2-doc/manual/en"

PACKAGES: Final = (
    Package("python3.11-doc", "PSF-2.0", "train"),
    Package("python-django-doc", "BSD-3-Clause", "train"),
    Package("postgresql-doc-15", "PostgreSQL", "train"),
    Package("sqlite3-doc", "public domain", "train"),
    Package("rust-doc", "MIT or Apache-2.0", "train", under=RUST_BOOKS),
    Package("llvm-14-doc", "Apache-2.0 with LLVM exception", "train"),
    Package("python-sqlalchemy-doc", "MIT", "train"),
    Package("apache2-doc", "Apache-2.0", "train", under=(APACHE_ENGLISH,)),
    Package("cmake-doc", "BSD-3-Clause", "train"),
    Package("nodejs-doc", "MIT", "train"),
    Package("nova-doc", "Apache-2.0", "train"),
    Package("swift-doc", "Apache-2.0", "train"),
    Package("sphinx-doc", "BSD-2-Clause", "train"),
    Package("python-flask-doc", "BSD-3-Clause", "train"),
    Package("python-werkzeug-doc", "BSD-3-Clause", "train"),
    Package("python-jinja2-doc", "BSD-3-Clause", "train"),
    Package("python-aiohttp-doc", "Apache-2.0", "train"),
    Package("python-cryptography-doc", "BSD-3-Clause or Apache-2.0", "train"),
    Package("glance-doc", "Apache-2.0", "train"),
    Package("cinder-doc", "Apache-2.0", "train"),
    Package("heat-doc", "Apache-2.0", "train"),
    Package("keystone-doc", "Apache-2.0", "train"),
    Package("python-click-doc", "BSD-3-Clause", "train"),
    Package("python-scrapy-doc", "BSD-3-Clause", "train"),
    Package("python-gevent-doc", "MIT", "train"),
    Package("python-kombu-doc", "BSD-3-Clause", "train"),
    Package("python-bottle-doc", "MIT", "train"),
    Package("python-peewee-doc", "MIT", "train"),
    Package("python-pil-doc", "HPND", "train"),
    Package("python-djangorestframework-doc", "BSD-3-Clause", "train"),
    Package("python-cherrypy3-doc", "BSD-3-Clause", "train"),
    Package("python-webob-doc", "MIT", "train"),
    Package("python-wtforms-doc", "BSD-3-Clause", "train"),
    Package("python-mako-doc", "MIT", "train"),
    Package("python-markdown-doc", "BSD-3-Clause", "train"),
    Package("python-babel-doc", "BSD-3-Clause", "train"),
    Package("python-requests-doc", "Apache-2.0", "train"),
    Package("python-setuptools-doc", "MIT", "train"),
    Package("python-attr-doc", "MIT", "train"),
    Package("python-mongoengine-doc", "MIT", "train"),
    Package("python-coverage-doc", "Apache-2.0", "train"),
    Package("python-eventlet-doc", "MIT", "train"),
    Package("python-structlog-doc", "MIT or Apache-2.0", "train"),
    Package("python-cffi-doc", "MIT", "train"),
    Package("alembic", "MIT", "train"),
    Package("python-ipython-doc", "BSD-3-Clause", "train"),
    Package("python-notebook-doc", "BSD-3-Clause", "train"),
    Package("python-jupyter-client-doc", "BSD-3-Clause", "train"),
    Package("python-pytest-doc", "MIT", "held-out"),
    Package("python-tornado-doc", "Apache-2.0", "held-out"),
    Package("cython-doc", "Apache-2.0", "held-out"),
    Package("python-pymongo-doc", "Apache-2.0", "held-out"),
    Package("varnish-doc", "BSD-2-Clause", "held-out"),
)


class _Stripper(html.parser.HTMLParser):
    """Text of a page: block elements break lines, <pre> keeps its spaces, furniture is left out.

    Furniture is some elements by name, and whatever says by role or class that it is navigation;
    `_skipped` is the open elements below one of them, so that its end is found again.
    """

    SKIPPED = frozenset({"script", "style", "head", "nav", "footer", "header", "button", "svg"})
    ROLES = frozenset({"navigation", "search", "contentinfo", "note"})
    CLASSES = frozenset({"sphinxsidebar", "related", "footer", "headerlink", "linenos", "lineno"})
    VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "col", "wbr", "area", "source"})
    BLOCKS = frozenset(
        {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "pre"}
        | {"section", "article", "blockquote", "hr", "main"}
    )
    LINES = frozenset({"br", "li", "dt", "dd", "tr"})

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped: list[str] = []
        self._pre_depth = 0

    def _is_furniture(self, tag: str, attrs: list[tuple[str, str | None]]) -> bool:
        held = {name: value or "" for name, value in attrs}
        classes = self.CLASSES.intersection(held.get("class", "").split())
        return tag in self.SKIPPED or held.get("role") in self.ROLES or bool(classes)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if (self._skipped or self._is_furniture(tag, attrs)) and tag not in self.VOID:
            self._skipped.append(tag)
            return
        self._pre_depth += tag == "pre"
        if tag in self.BLOCKS:
            self.parts.append("\n\n")
        elif tag in self.LINES:
            self.parts.append("\n* " if tag == "li" else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self._skipped:
            if tag in self._skipped:
                while self._skipped.pop() != tag:
                    pass
            return
        self._pre_depth = max(0, self._pre_depth - (tag == "pre"))
        if tag in self.BLOCKS:
            self.parts.append("\n\n")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_data(self, text: str) -> None:
        if not self._skipped:
            self.parts.append(text if self._pre_depth else re.sub(r"\s+", " ", text))


def strip_html(page: str) -> str:
    stripper = _Stripper()
    stripper.feed(page)
    stripper.close()
    return "".join(stripper.parts)


def tidy(text: str) -> str:
    """One document without padding: trailing spaces, column fill, ruled lines, empty lines."""
    text = text.replace(DOCUMENT_END, "").replace("\r\n", "\n").replace("\u00b6", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"(?m)^\*\s+(?=\S)", "* ", text)
    text = re.sub(r"(?m)^ (?=\S)", "", text)
    text = re.sub(r"(?<=\S)[ \t]{3,}", "  ", text)
    text = re.sub(r"(?m)^[ \t]{24,}", " " * 24, text)
    text = re.sub(r"([-=~^*_.#+])\1{7,}", r"\1" * 8, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _read(path: Path) -> str:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return raw[:DOCUMENT_BYTES_MAX].decode("utf-8", errors="replace")


def _wanted(path: Path) -> bool:
    """Pages that people wrote: no listings of source code, no indexes."""
    name = path.name.removesuffix(".gz")
    listing = any(part in ("_modules", "_static", "_sources") for part in path.parts)
    return name.endswith((".html", ".htm")) and name not in NOT_PAGES and not listing


def documents(root: Path, package: Package) -> Iterator[str]:
    """The texts of one unpacked package in path order, so that a corpus is reproducible."""
    paths = {path for part in package.under for path in (root / part).rglob("*")}
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink() and _wanted(path):
            yield tidy(strip_html(_read(path)))


def text_documents(root: Path) -> Iterator[str]:
    """Any folder of .txt and .md files, for a model of one's own."""
    for path in sorted(root.rglob("*")):
        if path.is_file() and path.suffix in (".txt", ".md", ".rst"):
            yield tidy(_read(path))


def _key(text: str) -> bytes:
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=8).digest()


@dataclass(slots=True)
class Deduplicator:
    """Keeps a paragraph the first time; drops every paragraph that the forbidden side already
    has."""

    forbidden: frozenset[bytes] = frozenset()
    seen: set[bytes] = field(default_factory=set)

    def keep(self, document: str) -> str:
        kept = [part for part in document.split("\n\n") if self._is_new(part)]
        return "\n\n".join(kept).strip()

    def _is_new(self, paragraph: str) -> bool:
        if len(paragraph) < PARAGRAPH_LENGTH_MIN:
            return True
        long = (line for line in paragraph.split("\n") if len(line) >= LINE_LENGTH_MIN)
        keys = [_key(paragraph), *map(_key, long)]
        fresh = keys[0] not in self.seen and self.forbidden.isdisjoint(keys)
        self.seen.update(keys)
        return fresh


def fetch(package: Package, folder: Path) -> Path:
    """The unpacked package; downloaded by apt-get when it is not there yet."""
    root = folder / "unpacked" / package.name
    if root.exists():
        return root
    try:
        subprocess.run(["apt-get", "download", "-qq", package.name], cwd=folder, check=True)
        archive = next(folder.glob(f"{package.name}_*.deb"))
        subprocess.run(["dpkg-deb", "-x", archive.name, str(root)], cwd=folder, check=True)
    except (OSError, subprocess.CalledProcessError, StopIteration) as error:
        raise Unavailable(f"package {package.name} cannot be fetched: {error}") from error
    return root


def _write_side(
    role: Role, folder: Path, into: Path, forbidden: frozenset[bytes]
) -> tuple[list[dict[str, object]], frozenset[bytes]]:
    sieve = Deduplicator(forbidden=forbidden)
    report: list[dict[str, object]] = []
    with (into / f"{role.replace('-', '_')}.txt").open("w", encoding="utf-8") as out:
        for package in (package for package in PACKAGES if package.role == role):
            texts = [sieve.keep(text) for text in documents(fetch(package, folder), package)]
            texts = [text for text in texts if len(text) >= PARAGRAPH_LENGTH_MIN]
            if not texts:
                raise BadInput(f"package {package.name} holds no pages")
            out.writelines(text + DOCUMENT_END for text in texts)
            size = sum(len(text.encode()) for text in texts)
            report.append(
                {"package": package.name, "licence": package.licence, "role": role}
                | {"documents": len(texts), "bytes": size}
            )
    return report, frozenset(sieve.seen)


def build(*, into: Path, folder: Path) -> list[dict[str, object]]:
    """Both sides from the packages. Held-out first: it decides what training may not see."""
    into.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    held_out, seen = _write_side("held-out", folder, into, frozenset())
    train, _ = _write_side("train", folder, into, seen)
    report = train + held_out
    (into / "corpus.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def build_from_text(*, text: Path, into: Path) -> None:
    """A folder of one's own texts: every twentieth document is held out."""
    into.mkdir(parents=True, exist_ok=True)
    texts = list(text_documents(text))
    if len(texts) < 2:
        raise BadInput(f"{text} holds {len(texts)} text files, need at least 2")
    held_out = Deduplicator()
    kept = [held_out.keep(part) for part in texts[::HELD_OUT_EVERY]]
    rest = Deduplicator(forbidden=frozenset(held_out.seen))
    others = [rest.keep(part) for at, part in enumerate(texts) if at % HELD_OUT_EVERY]
    (into / "held_out.txt").write_text("".join(part + DOCUMENT_END for part in kept))
    (into / "train.txt").write_text("".join(part + DOCUMENT_END for part in others))


def main(*, into: Path, text: Path | None = None, downloads: Path | None = None) -> None:
    """Write train.txt and held_out.txt.

    Parameters
    ----------
    into: where the two files go.
    text: a folder of .txt, .md or .rst files to use in place of the packages.
    downloads: where packages are downloaded and unpacked; default: `into`/packages.
    """
    if text is not None:
        build_from_text(text=text, into=into)
        return
    for row in build(into=into, folder=(downloads or into / "packages").resolve()):
        print(f"{row['role']!s:9} {row['package']!s:26} {row['bytes']:>12,} bytes")


if __name__ == "__main__":
    import cyclopts

    cyclopts.run(main)
