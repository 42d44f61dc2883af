"""The mock's language: every token is a fixed function of the whole context before it.

So a token that is lost, doubled or altered anywhere shows in all that follow, and a request that
is continued elsewhere from what was emitted goes on as if nothing had happened.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from struct import Struct

from xxhash import xxh3_64

from dynamo.core.values import TokenLogprobs

_pack = Struct("<I").pack


class MockTokenGenerator:
    """Speaks for one sequence: xxh3-64 over all its ids (packed u32) so far."""

    __slots__ = ("_hash", "_vocabulary")

    def __init__(self, vocabulary: Sequence[int], context: array[int]) -> None:
        self._vocabulary = vocabulary
        self._hash = xxh3_64(context.tobytes())

    def append_token(self, token: int) -> None:
        """`token` was appended to the context."""
        self._hash.update(_pack(token))

    def next_token(self) -> int:
        """The token after the context."""
        words = self._vocabulary
        return words[self._hash.intdigest() % len(words)]

    def generate_tokens(self, last: int, count: int) -> list[int]:
        """The next `count` tokens after `last`, which is not heard yet; the last of them is not
        either."""
        words, context = self._vocabulary, self._hash
        said = []
        for _ in range(count):
            context.update(_pack(last))
            last = words[context.intdigest() % len(words)]
            said.append(last)
        return said

    def logprobs(self, top: int) -> TokenLogprobs:
        """Of the token after the context: it has a probability between .5 and 1, and the `top` best
        share what is left, each half of the one before."""
        words, digest = self._vocabulary, self._hash.intdigest()
        place = digest % len(words)
        share = 0.5 + (digest >> 40) / (1 << 25)
        best = [(words[place], math.log(share))]
        for rank in range(1, min(top, len(words))):
            other = words[(place + rank) % len(words)]
            best.append((other, math.log((1 - share) or 2**-26) - rank * math.log(2)))
        return TokenLogprobs(words[place], best[0][1], tuple(best[:top]))
