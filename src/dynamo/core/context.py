"""The context of one request. Cancellation is task cancellation and therefore not a field."""

from __future__ import annotations

import msgspec


class Context(msgspec.Struct, frozen=True, omit_defaults=True):
    """Identity and limits of one request, passed through every layer.

    - `attempt`: number of the attempt, from 0.
    - `timeout_s`: seconds left when this value was created, since clocks differ between hosts.
    - `trace`: W3C traceparent.
    - `avoid`: instances on which the request failed before.
    - `api_key`: the caller's key for the server behind a worker, if `server.pass_api_key` is set.
    """

    request_id: str
    attempt: int = 0
    timeout_s: float | None = None
    trace: str = ""
    metadata: dict[str, str] = {}
    avoid: tuple[str, ...] = ()
    api_key: str = ""
