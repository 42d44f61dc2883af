"""Fuzz target for request smuggling: RequestReader and h11 must read the same requests.

A proxy in front of the server may use either kind of parser.
"""

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
    """Feeds the bytes of several requests to both parsers."""

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

    def open_count(self) -> int:
        return 0


def read_by_us(pieces: Sequence[bytes]) -> Read:
    """Return the requests that RequestReader reads up to the first error."""
    requests: list[Request] = []
    reader = RequestReader(HttpLimits(), requests.append, lambda: None)
    try:
        for piece in pieces:
            if not reader.feed(piece):
                break
    except DynamoError:
        pass
    reader.close()
    return [(request.method, request.body) for request in requests]


def read_by_h11(data: bytes) -> Read:
    """Return the requests that h11 reads up to the first error or the end of the connection."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    requests: Read = []
    method, body = "", b""
    try:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Request):
                method, body = event.method.decode(), b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                requests.append((method, body))
                answer = h11.Response(status_code=200, headers=[("content-length", "0")])
                connection.send(answer)
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
            else:
                return requests
    except h11.ProtocolError:
        return requests
