"""The check of large JSON bodies before they are decoded."""

from __future__ import annotations

import asyncio
from codecs import getincrementaldecoder

from dynamo.application.gateway import Gateway
from dynamo.communication.http import Request
from dynamo.core.errors import InvalidRequest, TooLarge

MIN_BODY_BYTES = 4 << 20
MAX_BODY_BYTES = 32 << 20
BODY_BYTES_PER_TOKEN = 64
"""The default of `server.max_body_bytes` for each token of the context. Token ids take 7 bytes,
escaped text 6 bytes a character."""

SLICE_BYTES = 1 << 20
MAX_COUNT = 1 << 22
STRUCTURE_LIMITS = {b",": (1 << 16, 8), b":": (1 << 16, 1), b"[": (1 << 15, 1), b"{": (1 << 15, 1)}
"""How many of these bytes a body may have: a number, and more for each token of the context.

Text and token ids of a full context must pass. Decoding takes 0.1 us for most of these bytes."""

_Utf8Decoder = getincrementaldecoder("utf-8")


def default_body_bytes(context_tokens: int) -> int:
    """Return the limit on bodies where the longest served context has `context_tokens`."""
    return min(max(MIN_BODY_BYTES, BODY_BYTES_PER_TOKEN * context_tokens), MAX_BODY_BYTES)


class LargeBodies:
    """Checks one large body at a time, a slice in each loop iteration.

    The JSON decoder holds the loop for a time that depends on how many values a body has.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._turn = asyncio.Lock()

    async def check(self, request: Request) -> None:
        """Raise `TooLarge` for too many values, `InvalidRequest` for a body that is not UTF-8."""
        async with self._turn:
            limits = structure_limits(self._gateway.context_tokens)
            counts = dict.fromkeys(limits, 0)
            body, text = request.body, _Utf8Decoder()
            for start in range(0, len(body), SLICE_BYTES):
                end = start + SLICE_BYTES
                for byte, limit in limits.items():
                    counts[byte] += body.count(byte, start, end)
                    if counts[byte] > limit:
                        count = f'at least {counts[byte]:,} of "{byte.decode()}"'
                        raise TooLarge(
                            f"the body has {count}, limit {limit:,}",
                            hint="send fewer values; the limit follows the longest served context",
                        )
                try:
                    text.decode(body[start:end], final=end >= len(body))
                except UnicodeDecodeError as error:
                    raise InvalidRequest(f"the body is not UTF-8: {error.reason}") from None
                await asyncio.sleep(0)


def structure_limits(context_tokens: int) -> dict[bytes, int]:
    """Return how many of each structural byte a large body may have."""
    return {
        byte: min(base + per_token * context_tokens, MAX_COUNT)
        for byte, (base, per_token) in STRUCTURE_LIMITS.items()
    }
