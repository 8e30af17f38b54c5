"""Bytes that are no documents are refused by name wherever documents come from outside."""

from __future__ import annotations

import http.server
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ess.engine.process.messages import Packer
from ess.errors import BadInput, EssError
from ess.overlap.calibration import load
from ess.server.process.pair.registration import Router
from ess.sim.serving.arrivals import read_arrivals
from ess.trace.form import VERSION, decode_header
from tests.support.layouts import PLAIN

NOT_UTF8 = b'{"name": "x"}'.replace(b"x", b"\xff\xfe")
DEEP = b'{"name":' * 100_000
DOCUMENTS = pytest.mark.parametrize("document", [b"{", NOT_UTF8, DEEP], ids=["cut", "utf8", "deep"])


def of_calibration(folder: Path, document: bytes) -> None:
    (folder / "file").write_bytes(document)
    load(folder / "file", PLAIN)


def of_arrivals(folder: Path, document: bytes) -> None:
    (folder / "file").write_bytes(document)
    read_arrivals(folder / "file")


@DOCUMENTS
@pytest.mark.parametrize("read", [of_calibration, of_arrivals])
def test_files(read: Callable[[Path, bytes], None], document: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="file"):
        read(tmp_path, document)


@DOCUMENTS
def test_what_a_router_answers(document: bytes) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(document)))
            self.end_headers()
            self.wfile.write(document)

        def log_message(self, *said: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as served:
        answering = threading.Thread(target=served.handle_request)
        answering.start()
        with pytest.raises(EssError, match="its answer is not JSON"):
            Router(f"http://127.0.0.1:{served.server_port}", "").ask("GET", "/workers")
        answering.join()


def spoilt(document: object) -> bytes:
    return msgspec.msgpack.encode(document).replace(b"xx", b"\xff\xfe")


@pytest.mark.parametrize("packed", [b"\x81", spoilt({"layout": "xx"})], ids=["cut", "utf8"])
def test_headers_of_traces(packed: bytes) -> None:
    """Their checks fit, as an attacker would make them."""
    with pytest.raises(BadInput, match="the header is not of version"):
        decode_header(packed, check=zlib.crc32(packed, VERSION), version=VERSION)


@pytest.mark.parametrize(
    "packed", [b"\x91", spoilt(["AbortNamed", ["xx"], 0])], ids=["cut", "utf8"]
)
def test_messages(packed: bytes) -> None:
    with pytest.raises(BadInput, match="a message to the engine is malformed"):
        Packer().for_engine(packed)
