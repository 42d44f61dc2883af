"""Prompts with an exact number of tokens, and request bodies."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo.operations.bench.workload import BenchTarget, RequestPlan, RequestShape

MAX_CACHED_BLOCKS = 100_000
UNIQUE_PREFIX_WORDS = 4
POOL_WORDS = 1 << 14


class PromptGenerator:
    """Generates texts from `words` that are one token each."""

    def __init__(
        self, words: Sequence[str], shape: RequestShape, seed: int, block_tokens: int
    ) -> None:
        self._words = [f" {word}" for word in words]
        self._rng = random.Random(seed)
        self._block_tokens = block_tokens
        self._pool: list[str] = []
        self._blocks: dict[int | str, Sequence[str]] = {}
        self._shape = shape
        self._shared_tokens = round(shape.input_tokens * shape.prefix_share)

    def make_prompt(self, turn: RequestPlan) -> str:
        """Return the prompt of one turn: its text, its trace blocks, or fresh words."""
        if turn.text:
            return turn.text
        if turn.hash_ids:
            return self._prompt_from_blocks(turn)
        shared: Sequence[str] = ()
        if self._shared_tokens:
            prefix = self._rng.randrange(self._shape.prefixes)
            shared = self._seeded_words(f"prefix {prefix}", self._shared_tokens)
        return "".join([*shared, *self._unique_words(max(0, turn.input_tokens - len(shared)))])

    def _unique_words(self, count: int) -> list[str]:
        """Return words that start like no other prompt: a few random ones, then a slice of a pool.
        A slice costs far less than a random choice for every word."""
        first = self._rng.choices(self._words, k=min(count, UNIQUE_PREFIX_WORDS))
        rest = count - len(first)
        while len(self._pool) < POOL_WORDS + rest:
            self._pool += self._rng.choices(self._words, k=POOL_WORDS)
        start = self._rng.randrange(POOL_WORDS)
        return first + self._pool[start : start + rest]

    def _prompt_from_blocks(self, turn: RequestPlan) -> str:
        words: list[str] = []
        for block in turn.hash_ids:
            words += self._block_words(block)
        words = words[: turn.input_tokens]
        if missing := turn.input_tokens - len(words):
            words += self._seeded_words(f"after {turn.hash_ids[-1]}", missing)
        return "".join(words)

    def _block_words(self, block: int | str) -> Sequence[str]:
        words = self._blocks.get(block)
        if words is None:
            words = self._seeded_words(f"block {block}", self._block_tokens)
            if len(self._blocks) < MAX_CACHED_BLOCKS:
                self._blocks[block] = words
        return words

    def _seeded_words(self, key: str, count: int) -> Sequence[str]:
        return random.Random(key).choices(self._words, k=count)


def request_body(
    target: BenchTarget, messages: Sequence[Mapping[str, str]], turn: RequestPlan
) -> dict[str, Any]:
    """Return the JSON body of a request whose last message is the turn's prompt."""
    body: dict[str, Any] = {"model": target.model}
    if target.completions:
        body["prompt"] = "".join(message["content"] for message in messages)
    else:
        body["messages"] = messages
    body["max_tokens"] = turn.output_tokens
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(target.extra)
