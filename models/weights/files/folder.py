"""The only place that opens a checkpoint's files.

Contract: nothing outside the folder is opened, whatever config.json or the index say. The folder
is opened once; every file is then opened by a plain name relative to that descriptor, without
following a link, so there is no path to resolve and no moment between a check and its use.

One exception: a Hugging Face cache keeps snapshots as links to `../../blobs/<name>`, one `..` more
from an inner folder. Such a link, and no other, is followed, again by descriptors, to a regular
file of that very folder.

Limit: a file that another process shortens while it is mapped kills this one (SIGBUS), as with
every memory-mapped reader. A checkpoint must not be rewritten in place while it is served.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any, Final

from ess.errors import BadInput
from ess.models.weights.files.strict_json import parse_object

JSON_BYTES_MAX: Final = 64 << 20
_BLOB_NAME: Final = re.compile(r"[0-9A-Za-z_-]{1,255}")
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a named pipe must not wait for a writer that never comes.
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def check_plain_name(name: object, *, where: str) -> str:
    """A file name that cannot leave its folder."""
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= 255:
        raise BadInput(f"{where}: {str(name)[:80]!r} is not a file name")
    if "/" in name or "\\" in name or "\0" in name or name in (".", ".."):
        raise BadInput(f"{where}: {name!r} is a path; only files of the folder itself are read")
    return name


class Folder:
    """A checkpoint folder, held open by its descriptor, or a folder `inside` one."""

    def __init__(self, path: str | os.PathLike[str], *, inside: Folder | None = None) -> None:
        self.path = Path(path)
        self._blobs: str = "../../blobs" if inside is None else f"../{inside._blobs}"
        try:
            if inside is None:
                self._fd = os.open(self.path, _FOLDER_FLAGS)
            else:
                flags = _FOLDER_FLAGS | os.O_NOFOLLOW
                self._fd = os.open(self.path.name, flags, dir_fd=inside._fd)
        except (OSError, ValueError) as error:
            raise BadInput(f"{self.path} is not a readable folder: {error}") from None

    def inner(self, name: str) -> Folder:
        """The folder of this name in this one; the caller closes it."""
        check_plain_name(name, where=str(self.path))
        return Folder(self.path / name, inside=self)

    def names(self) -> list[str]:
        return sorted(os.listdir(self._fd))

    def open(self, name: str, *, where: str) -> int:
        """A descriptor of a regular file of this folder; the caller closes it."""
        check_plain_name(name, where=where)
        try:
            fd = os.open(name, _FILE_FLAGS, dir_fd=self._fd)
        except OSError as error:
            if not self._is_link(name):
                raise BadInput(f"{where}: {name!r} cannot be opened: {error.strerror}") from None
            fd = self._open_link(name, where=where)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise BadInput(f"{where}: {name!r} is not a regular file")
        return fd

    def read(self, name: str, *, bytes_max: int = JSON_BYTES_MAX) -> bytes:
        fd = self.open(name, where=str(self.path))
        try:
            count = os.fstat(fd).st_size
            if count > bytes_max:
                raise BadInput(f"{name} has {count:,} bytes; at most {bytes_max:,} are read")
            return read_at(fd, 0, count)
        finally:
            os.close(fd)

    def read_json(self, name: str) -> dict[str, Any]:
        return parse_object(self.read(name), what=name)

    def read_json_or_empty(self, name: str) -> dict[str, Any]:
        """The object of a file that a folder may lack."""
        return self.read_json(name) if name in self.names() else {}

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _is_link(self, name: str) -> bool:
        try:
            return stat.S_ISLNK(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def _open_link(self, name: str, *, where: str) -> int:
        target = os.readlink(name, dir_fd=self._fd)
        folder, _, blob = target.rpartition("/")
        if folder != self._blobs or _BLOB_NAME.fullmatch(blob) is None:
            raise BadInput(
                f"{where}: {name!r} is a symbolic link to {target[:200]!r}; links are not followed,"
                " but for those of a Hugging Face cache"
            )
        try:
            blobs = os.open(self._blobs, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self._fd)
            try:
                return os.open(blob, _FILE_FLAGS, dir_fd=blobs)
            finally:
                os.close(blobs)
        except OSError as error:
            raise BadInput(f"{where}: {target!r} cannot be opened: {error.strerror}") from None


def read_at(fd: int, offset: int, count: int) -> bytes:
    """Exactly `count` bytes, or BadInput."""
    read = bytearray()
    while len(read) < count:
        piece = os.pread(fd, count - len(read), offset + len(read))
        if not piece:
            raise BadInput(f"the file ends after {offset + len(read):,} bytes while it is read")
        read += piece
    return bytes(read)
