"""Two readers of HTTP, ours and h11: what both take for requests, they must take for the same ones.
Whoever stands before us may be built on either (request smuggling)."""

from __future__ import annotations

from collections.abc import Sequence

import h11
from tests.fuzz.campaign import Target
from tests.fuzz.http_targets import HttpTarget

from dynamo.communication.http.limits import HttpLimits
from dynamo.communication.http.request import Request, RequestReader
from dynamo.core.errors import DynamoError

Read = list[tuple[str, bytes]]
"""Method and body of each request."""


class FramingTarget(Target):
    """Bytes of requests, one after the other."""

    seeds = HttpTarget.seeds
    words = HttpTarget.words

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def feed(self, data: bytes, pieces: Sequence[bytes]) -> None:
        ours, theirs = read_by_us(pieces), read_by_h11(data)
        both = min(len(ours), len(theirs))
        assert ours[:both] == theirs[:both], (ours, theirs)

    async def check(self) -> None:
        data = b"".join(self.seeds[4:7])
        assert len(read_by_us([data])) == 3
        assert read_by_us([data]) == read_by_h11(data)

    def held(self) -> int:
        return 0


def read_by_us(pieces: Sequence[bytes]) -> Read:
    """Up to the first error."""
    found: list[Request] = []
    reader = RequestReader(HttpLimits(), found.append, lambda: None)
    try:
        for piece in pieces:
            if not reader.feed(piece):
                break
    except DynamoError:
        pass
    reader.close()
    return [(one.method, one.body) for one in found]


def read_by_h11(data: bytes) -> Read:
    """Up to the first error, or the end of what it would read on this connection."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: Read = []
    method, body = "", b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, body = event.method.decode(), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append((method, body))
                answer = h11.Response(status_code=200, headers=[("content-length", "0")])
                connection.send(answer)
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                return found
    except h11.ProtocolError:
        return found
