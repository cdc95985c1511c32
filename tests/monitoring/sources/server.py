"""A small HTTP server whose answers a test sets: whole, cut in the middle, slow, huge, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Exporter:
    """`bodies`: path → text or bytes; `status`, `cut_at` (promise more than is sent), `slow_s` for all of them."""

    def __init__(self) -> None:
        self.bodies: dict[str, str | bytes] = {}
        self.status = 200
        self.cut_at: int | None = None
        self.slow_s = 0.0
        self.endless = False
        self.location = ""
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving() -> Iterator[Exporter]:
    exporter = Exporter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            exporter.asked.append((self.path, dict(self.headers)))
            time.sleep(exporter.slow_s)
            path = self.path.split("?")[0]
            text = exporter.bodies.get(path, "")
            body = text.encode() if isinstance(text, str) else text
            self.send_response(exporter.status if path in exporter.bodies else 404)
            if exporter.location:
                self.send_header("Location", exporter.location)
            if exporter.endless:
                self.end_headers()
                try:
                    while True:
                        self.wfile.write(b"# filler\n" * 8192)
                except OSError:
                    return
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if exporter.cut_at is None else body[: exporter.cut_at])

        def log_message(self, *args: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    exporter.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield exporter
    finally:
        server.shutdown()
        server.server_close()
