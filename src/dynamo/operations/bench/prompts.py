"""Prompts of exact numbers of tokens, and what a request says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.bench.plan import Shape, Target, Turn

CACHED_BLOCKS = 100_000
OPENING = 4
POOL = 1 << 14


class Prompts:
    """Texts made of words that are one token each."""

    def __init__(self, words: Sequence[str], shape: Shape, seed: int, block_tokens: int) -> None:
        self._words = [f" {word}" for word in words]
        self._chance = random.Random(seed)
        self._block_tokens = block_tokens
        self._pool: list[str] = []
        self._blocks: dict[int | str, Sequence[str]] = {}
        self._shape = shape
        self._shared = round(shape.input_tokens * shape.prefix_share)

    def text(self, turn: Turn) -> str:
        """The prompt of one turn."""
        if turn.text:
            return turn.text
        if turn.hash_ids:
            return self._of_blocks(turn)
        shared: Sequence[str] = ()
        if self._shared:
            which = self._chance.randrange(self._shape.prefixes)
            shared = random.Random(f"prefix {which}").choices(self._words, k=self._shared)
        return "".join([*shared, *self._fresh(max(0, turn.input_tokens - len(shared)))])

    def _fresh(self, count: int) -> list[str]:
        """Words that no other prompt begins with: a few by chance, then a piece of the pool."""
        first = self._chance.choices(self._words, k=min(count, OPENING))
        rest = count - len(first)
        while len(self._pool) < POOL + rest:
            self._pool += self._chance.choices(self._words, k=POOL)
        at = self._chance.randrange(POOL)
        return first + self._pool[at : at + rest]

    def _of_blocks(self, turn: Turn) -> str:
        words: list[str] = []
        for block in turn.hash_ids:
            words += self._block(block)
        words = words[: turn.input_tokens]
        if missing := turn.input_tokens - len(words):
            words += self._fixed(f"after {turn.hash_ids[-1]}", missing)
        return "".join(words)

    def _block(self, block: int | str) -> Sequence[str]:
        found = self._blocks.get(block)
        if found is None:
            found = self._fixed(f"block {block}", self._block_tokens)
            if len(self._blocks) < CACHED_BLOCKS:
                self._blocks[block] = found
        return found

    def _fixed(self, key: str, count: int) -> Sequence[str]:
        return random.Random(key).choices(self._words, k=count)


def body_of(target: Target, messages: Sequence[Mapping[str, str]], turn: Turn) -> dict[str, Any]:
    """What a request says; the last message is the turn's."""
    body: dict[str, Any] = {"model": target.model}
    if target.completions:
        body["prompt"] = "".join(one["content"] for one in messages)
    else:
        body["messages"] = messages
    body["max_tokens"] = turn.output_tokens
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(target.extra)
