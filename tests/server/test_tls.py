"""HTTPS: certificates that change, clients that must show one, and a server that speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from ess.errors import BadInput
from ess.server.commands.start.files.hidden_files import check_tls
from ess.server.commands.start.http_config import uvicorn_config
from ess.server.commands.start.settings import resolve
from ess.server.process.lifecycle import QuietServer, refresh_files
from tests.server.harness import PacedEngine, Served, saying
from tests.support.process import READY_S, Process

NAMES = "subjectAltName=IP:127.0.0.1"


def certificate(made: Path) -> ssl.SSLContext:
    """Writes MADE.crt and MADE.key, signed by themselves; a client's context that trusts them."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates")
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    words += ["-days", "1", "-subj", "/CN=x", "-addext", NAMES]
    files = ["-keyout", f"{made}.key", "-out", f"{made}.crt"]
    subprocess.run([openssl, *words, *files], check=True, capture_output=True)
    return ssl.create_default_context(cafile=f"{made}.crt")


def shown(server: ssl.SSLContext) -> bytes:
    """The certificate that a new connection is shown."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    client = asking.wrap_bio(to_client, to_server)
    serving = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, serving, client):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = client.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def moved(begin: Path, end: Path) -> None:
    for kind in (".crt", ".key"):
        os.replace(f"{begin}{kind}", f"{end}{kind}")


def test_a_certificate_that_changes_is_shown_to_new_connections(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    used, fresh = tmp_path / "used", tmp_path / "fresh"
    certificate(used)
    given = {"tls_cert": f"{used}.crt", "tls_key": f"{used}.key"}
    with Served(PacedEngine(saying("one"))) as served:
        config = uvicorn_config(resolve(given, environment={}).settings, served.service)
    certificate(used)
    asyncio.run(refresh_files(QuietServer(config)))  # before it has started: it reads it then
    config.load()
    refresh = config.callback_notify
    assert config.ssl is not None
    assert refresh is not None
    first = shown(config.ssl)
    asyncio.run(refresh())
    assert shown(config.ssl) == first
    certificate(fresh)
    os.replace(f"{fresh}.crt", f"{used}.crt")
    asyncio.run(refresh())
    assert shown(config.ssl) == first, "its key is still another's"
    assert "is not used: tls_key is not the key of tls_cert" in capsys.readouterr().err
    os.replace(f"{fresh}.key", f"{used}.key")
    asyncio.run(refresh())
    second = shown(config.ssl)
    assert second != first
    Path(f"{used}.key").unlink()
    asyncio.run(refresh())
    assert shown(config.ssl) == second
    certificate(fresh)
    moved(fresh, used)
    asyncio.run(refresh())
    assert shown(config.ssl) not in (first, second)


def test_authorities_are_checked_first(tmp_path: Path):
    made = tmp_path / "a"
    certificate(made)
    pair = f"{made}.crt", f"{made}.key"
    check_tls(*pair, f"{made}.crt")
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(BadInput, match=f"tls_ca {junk} has no certificates in PEM form"):
        check_tls(*pair, str(junk))
    with pytest.raises(BadInput, match="tls_ca /no/file cannot be read"):
        check_tls(*pair, "/no/file")
    with pytest.raises(BadInput, match="tls_ca needs tls_cert"):
        resolve({"tls_ca": str(junk)}, environment={})


@pytest.mark.slow
def test_only_clients_with_a_certificate_are_served(tmp_path: Path):
    certificate(tmp_path / "server")
    certificate(tmp_path / "client")
    certificate(tmp_path / "stranger")
    flags = ("--ssl-certfile", f"{tmp_path}/server.crt", "--ssl-keyfile", f"{tmp_path}/server.key")
    flags += ("--ssl-ca-certs", f"{tmp_path}/client.crt", "--engine", "paced")
    with Process(*flags) as process:
        assert process.url.startswith("https://")

        def asked(name: str) -> int:
            context = ssl.create_default_context(cafile=f"{tmp_path}/server.crt")
            if name:
                context.load_cert_chain(f"{tmp_path}/{name}.crt", f"{tmp_path}/{name}.key")
            with urllib.request.urlopen(
                process.url + "/health", context=context, timeout=READY_S
            ) as answer:
                return int(answer.status)

        assert asked("client") == 200
        for name in ("", "stranger"):
            with pytest.raises((urllib.error.URLError, ssl.SSLError, ConnectionError)):
                asked(name)
        assert asked("client") == 200
