"""Generates the mock's tokens: every token is a fixed function of the whole context before it, and
of the LoRA adapter.

A token that is lost, doubled or altered anywhere therefore changes all that follow. A request that
continues on another worker gets the same tokens as without a break.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from struct import Struct

from xxhash import xxh3_64, xxh3_64_intdigest

from dynamo.core.values import TokenLogprobs
from dynamo.inference.sequence import TokenIds

_pack = Struct("<I").pack


class MockTokenGenerator:
    """Generates the tokens of one sequence from xxh3-64 over all its ids so far (packed u32). The
    id of an adapter gives the seed."""

    __slots__ = ("_hash", "_vocabulary")

    def __init__(self, vocabulary: Sequence[int], context: TokenIds, adapter: str = "") -> None:
        self._vocabulary = vocabulary
        seed = xxh3_64_intdigest(adapter.encode()) if adapter else 0
        self._hash = xxh3_64(context.tobytes(), seed)

    def append_token(self, token: int) -> None:
        """Add a token to the context."""
        self._hash.update(_pack(token))

    def next_token(self) -> int:
        """Return the token after the context."""
        vocabulary = self._vocabulary
        return vocabulary[self._hash.intdigest() % len(vocabulary)]

    def next_allowed(self, bits: int) -> int:
        """Return the first id whose bit is set, from `next_token` on and then from 0 on."""
        first = self.next_token()
        allowed = bits >> first << first or bits
        return (allowed & -allowed).bit_length() - 1

    def generate_tokens(self, last: int, count: int) -> list[int]:
        """Return the next `count` tokens after `last`. `last` is not in the context yet. The last
        token that is returned is not in the context either."""
        vocabulary, context = self._vocabulary, self._hash
        tokens = []
        for _ in range(count):
            context.update(_pack(last))
            last = vocabulary[context.intdigest() % len(vocabulary)]
            tokens.append(last)
        return tokens

    def logprobs(self, top: int) -> TokenLogprobs:
        """Return logprobs of the token after the context. Its probability is between 0.5 and 1. The
        other `top` tokens share the rest, each with half of the probability of the one before."""
        vocabulary, digest = self._vocabulary, self._hash.intdigest()
        index = digest % len(vocabulary)
        share = 0.5 + (digest >> 40) / (1 << 25)
        best = [(vocabulary[index], math.log(share))]
        for rank in range(1, min(top, len(vocabulary))):
            other = vocabulary[(index + rank) % len(vocabulary)]
            best.append((other, math.log((1 - share) or 2**-26) - rank * math.log(2)))
        return TokenLogprobs(vocabulary[index], best[0][1], tuple(best[:top]))
