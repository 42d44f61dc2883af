"""What routing needs to know of a request: how long its prompt is, and the names of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dynamo.core.hashing import TOKEN_BYTES, block_hashes, root_hash
from dynamo.core.values import GenerateRequest


class Prompt(msgspec.Struct, frozen=True):
    """`tokens` in all; `hashes` of the full blocks only, chained, in order."""

    tokens: int
    hashes: Sequence[int]


PromptReader = Callable[[GenerateRequest], Prompt]


def make_prompt_reader(block_tokens: int) -> PromptReader:
    """Reads prompts as engines with blocks of `block_tokens` do: the request's salt is the root."""

    def read(request: GenerateRequest) -> Prompt:
        ids = request.token_ids
        hashes = block_hashes(ids, block_tokens, root_hash(request.salt))
        return Prompt(len(ids) // TOKEN_BYTES, hashes)

    return read


def common_prefix_blocks(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading blocks are the same. Hashes are chained, so equal at i means equal before:
    a binary search will do."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low
