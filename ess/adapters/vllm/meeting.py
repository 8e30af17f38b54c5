"""POST /peers: a decode worker sends its sealed metadata and gets this worker's.

Nothing else is served. Metadata that is not sealed with our secret is refused unread, a body has a
size limit, a slow caller a deadline, and the number of callers at once is limited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from ess.errors import BadInput, Unavailable
from ess.transfer.messages import ADDRESS_BYTES_MAX

ROUTE: Final = "/peers"
BODY_BYTES_MAX: Final = ADDRESS_BYTES_MAX + 1024
CALLERS_MAX: Final = 64
CALL_S: Final = 5.0

Meet = Callable[[bytes], bytes]


class MeetingPlace:
    """Listens from construction until `close`; `meet` runs in the caller's own thread."""

    def __init__(self, *, host: str, port: int, meet: Meet) -> None:
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as wrong:
            raise Unavailable(f"peers cannot be met on {host} port {port}: {wrong}") from None
        self._server.meet = meet
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ess-meeting", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = CALLERS_MAX
    meet: Meet

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(CALLERS_MAX)
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that goes away or sends nonsense is ignored."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CALL_S

    def do_POST(self) -> None:
        if self.path != ROUTE:
            return self._answer(404, f"only POST {ROUTE} is served here".encode())
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > BODY_BYTES_MAX:
            return self._answer(400, f"a body of at most {BODY_BYTES_MAX} bytes is due".encode())
        try:
            self._answer(200, self.server.meet(self.rfile.read(int(length))))
        except BadInput as wrong:
            self._answer(400, str(wrong).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: every decode worker calls every two seconds."""

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
