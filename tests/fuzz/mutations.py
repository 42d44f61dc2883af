"""Fuzz inputs: seeds with random mutations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

EDGES = (0, 1, 7, 8, 127, 128, 255, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)


class Mutator:
    """Mutates seeds at random. `words` are byte strings that parsers treat specially."""

    def __init__(
        self, random_source: random.Random, seeds: Sequence[bytes], words: Sequence[bytes]
    ):
        self.random = random_source
        self._seeds = seeds
        self._words = words
        self._mutations: tuple[Callable[[bytearray, int], None], ...] = (
            self._flip,
            self._edge,
            self._insert_word,
            self._remove,
            self._repeat,
            self._splice,
            self._noise,
        )

    def next(self) -> bytes:
        """Return another input: one or two seeds with up to twelve mutations."""
        data = bytearray(self.random.choice(self._seeds))
        if self.random.random() < 0.3:
            data += self.random.choice(self._seeds)
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 6, 12))):
            self.random.choice(self._mutations)(data, self.random.randrange(len(data) + 1))
        return bytes(data)

    def pieces(self, data: bytes) -> list[bytes]:
        """Split an input at random, as a network does."""
        cuts = sorted(self.random.choices(range(len(data) + 1), k=self.random.choice((0, 0, 1, 5))))
        edges = [0, *cuts, len(data)]
        return [data[a:b] for a, b in pairwise(edges) if b > a]

    def _flip(self, data: bytearray, at: int) -> None:
        if at < len(data):
            data[at] ^= 1 << self.random.randrange(8)

    def _edge(self, data: bytearray, at: int) -> None:
        size = self.random.choice((1, 2, 4))
        edge = self.random.choice(EDGES) & ((1 << 8 * size) - 1)
        data[at : at + size] = edge.to_bytes(size, self.random.choice(("little", "big")))

    def _insert_word(self, data: bytearray, at: int) -> None:
        data[at:at] = self.random.choice(self._words)

    def _remove(self, data: bytearray, at: int) -> None:
        del data[at : at + self.random.choice((1, 2, 8, 64))]

    def _repeat(self, data: bytearray, at: int) -> None:
        piece = bytes(data[at : at + self.random.choice((1, 4, 16, 64))])
        data[at:at] = piece * self.random.choice((1, 2, 200))

    def _splice(self, data: bytearray, at: int) -> None:
        other = self.random.choice(self._seeds)
        start = self.random.randrange(len(other))
        data[at:at] = other[start : start + self.random.choice((4, 32, len(other)))]

    def _noise(self, data: bytearray, at: int) -> None:
        data[at:at] = self.random.randbytes(self.random.choice((1, 3, 40)))
