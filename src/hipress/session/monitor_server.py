"""Serves the snapshots of one host over HTTP, read-only, if HIPRESS_MONITOR names a port.

One thread answers one request at a time, so a stranger can keep the view waiting and not the
training. It listens on the network card of the job only.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer

from hipress import settings, snapshots
from hipress.environment import job_address
from hipress.errors import UsageError
from hipress.version import __version__

_log = logging.getLogger("hipress")

TIMEOUT_S = 2.0
"""How long a request may take, from its first byte to the last of the answer."""
MAX_BYTES = 2**13
"""Most bytes of a request."""
_lock = threading.RLock()  # the garbage collector may call `_stop` in a thread that holds it
_jobs: set[str] = set()
"""The models of this process, which share one server."""
_server: _Server | None = None


def serve(job: str, *, is_first: bool, one_host: bool) -> Callable[[], None]:
    """Starts to serve the snapshots of a job on this host; the result stops that.

    Args:
        job: Id of the job.
        is_first: Whether this is the first rank of its host; others serve nothing.
        one_host: Whether the whole job is on this host.
    """
    global _server
    port = settings.monitor_port()
    if port is None or not is_first:
        return lambda: None
    server = None
    try:
        address = job_address(one_host=one_host)
        with _lock:  # only for a moment: the garbage collector may wait for it, in any thread
            _jobs.add(job)
            if _server is None:
                server = _server = _Server((address, port), _Handler)
    except OSError as error:
        _jobs.discard(job)
        _log.warning(
            "nothing is served at port %d, which HIPRESS_MONITOR names (%s).",
            port, error.strerror or error,
        )  # fmt: skip
        return lambda: None
    if server is not None:
        threading.Thread(target=server.run, name="hipress-monitor", daemon=True).start()
        _log.info("hipress top %s:%d shows the ranks of this host.", address, port)
    return lambda: _stop(job)


def _stop(job: str) -> None:
    """Never waits for the server: it may be called in the thread of the server."""
    global _server
    with _lock:
        if job not in _jobs:
            return
        _jobs.discard(job)
        if not _jobs and _server is not None:
            _server.stop()
            _server = None


def _forget() -> None:
    """Leaves the server to the process that has its thread, and the port with it."""
    global _lock, _server
    _lock = threading.RLock()
    _jobs.clear()
    if _server is not None:
        _server.server_close()
        _server = None


os.register_at_fork(after_in_child=_forget)


class _Server(TCPServer):
    """Not http.server's own, which asks the network for the name of its address."""

    allow_reuse_address = True
    timeout = 0.5
    _stopped = False

    def run(self) -> None:
        """Answers requests until the server is stopped."""
        with self:
            while not self._stopped:
                self.handle_request()

    def stop(self) -> None:
        """Refuses connections from now on; the thread closes the socket, which it may be using."""
        self._stopped = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """Prints nothing: the output belongs to the training."""
        _log.debug("a request to the monitor has failed: %r.", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    """Answers `GET /`."""

    timeout = TIMEOUT_S
    server_version = f"hipress/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        """Reads the request, and keeps the answer until `finish`, so that one deadline holds."""
        self._deadline = time.monotonic() + self.timeout
        self.connection = self.request
        self._answer = io.BytesIO()
        self.rfile, self.wfile = io.BytesIO(self._head()), self._answer

    def _head(self) -> bytes:
        head = b""
        while b"\r\n\r\n" not in head:
            self._limit_time()
            piece = self.connection.recv(MAX_BYTES)
            head += piece
            if not piece or len(head) > MAX_BYTES:
                raise ConnectionError("the request has no end")
        return head

    def finish(self) -> None:
        """Sends the answer."""
        self._limit_time()
        self.connection.sendall(self._answer.getvalue())

    def _limit_time(self) -> None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request takes too long")
        self.connection.settimeout(left_s)

    def do_GET(self) -> None:
        """Sends the snapshots of this host as JSON."""
        if self.path != "/":
            self.send_error(404)
            return
        body = self._snapshots()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _snapshots(self) -> bytes:
        host = socket.gethostname()
        try:
            found = snapshots.read(snapshots.folder())
        except UsageError:
            found = []
        mine = [one.model_dump() for one in found if one.job in _jobs and one.host == host]
        return json.dumps({"hipress": __version__, "snapshots": mine}).encode()

    def log_message(self, *_: object) -> None:
        """Says nothing: the output belongs to the training."""
