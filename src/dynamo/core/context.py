"""What accompanies one request through every layer.

Cancellation is task cancellation, not a field.
"""

from __future__ import annotations

import msgspec


class Context(msgspec.Struct, frozen=True, omit_defaults=True):
    """`timeout_s` is what is left when the value was made (clocks differ between hosts).

    `attempt` tells one try of a request from the next; `trace` is a W3C traceparent; `avoid`:
    instances that failed it before.
    """

    request_id: str
    attempt: int = 0
    timeout_s: float | None = None
    trace: str = ""
    metadata: dict[str, str] = {}
    avoid: tuple[str, ...] = ()
