"""Files of keys and secrets, whose text no error may show."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

from ess.errors import BadInput, unreadable
from ess.server.commands.start.written_addresses import listed


def _read_hidden(path: Path, name: str) -> str:
    """The text of a file with a secret. Errors name the file and show none of its text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise unreadable(f"{name} {path}", error) from None
    except ValueError:
        raise BadInput(f"{name} {path} is not text in UTF-8") from None


def read_secret(path: str) -> str:
    secret = _read_hidden(Path(path), "peer_secret_file").strip()
    if not secret:
        raise BadInput(f"peer_secret_file {path} has no secret in it")
    return secret


def read_keys(paths: str) -> str:
    """The keys of all files, each of which must have one."""
    return ",".join(_keys_in(Path(path)) for path in listed(paths))


def _keys_in(path: Path) -> str:
    keys = listed(",".join(_read_hidden(path, "api_key_file").splitlines()))
    if not keys:
        raise BadInput(f"api_key_file {path} has no key in it")
    check_header_text(keys, f"api_key_file {path}")
    return ",".join(keys)


def check_header_text(keys: Iterable[str], name: str) -> None:
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise BadInput(f"{name} has a character that is not visible ASCII: no header can carry it")


def check_tls(cert: str, key: str, authorities: str = "") -> None:
    """Refuses bad files: uvicorn would do so later, without the setting's name."""
    if not cert:
        return
    given = (("tls_cert", cert), ("tls_key", key), ("tls_ca", authorities))
    for name, path in given[: 3 if authorities else 2]:
        try:
            Path(path).read_bytes()
        except OSError as error:
            raise unreadable(f"{name} {path}", error) from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise BadInput("tls_key is not the key of tls_cert") from None
        raise BadInput(
            f"tls_cert {cert} and tls_key {key} are not a certificate and a"
            f" key in PEM form, the key without a password: {error.reason or error}"
        ) from None
    try:
        if authorities:
            context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise BadInput(
            f"tls_ca {authorities} has no certificates in PEM form: {error.reason or error}"
        ) from None
