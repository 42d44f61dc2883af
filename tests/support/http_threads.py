"""HTTP servers of the standard library that serve in a thread of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import HTTPServer
from typing import TypeVar

Server = TypeVar("Server", bound=HTTPServer)
POLL_S = 0.01


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serve until the block ends, then close the server."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(POLL_S,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
