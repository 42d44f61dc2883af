"""The length and the block hashes of a prompt, as routing needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from dynamo.core.hashing import TOKEN_BYTES, block_hashes, root_hash
from dynamo.core.values import GenerateRequest


class Prompt(msgspec.Struct, frozen=True):
    """A prompt of `tokens` tokens. `hashes` are the chained hashes of its full blocks, in order."""

    tokens: int
    hashes: Sequence[int]


PromptReader = Callable[[GenerateRequest], Prompt]


def make_prompt_reader(block_tokens: int) -> PromptReader:
    """Return a reader that hashes blocks as engines do, with the request's salt as the root.

    The choices of one prompt are hashed once.
    """

    def read(request: GenerateRequest) -> Prompt:
        group = request.group
        if group is not None and not group.covers(request):
            group = None
        if group is not None and group.routing_prompt is not None:
            known: Prompt = group.routing_prompt
            return known
        ids = request.token_ids
        hashes = block_hashes(ids, block_tokens, root_hash(request.salt))
        prompt = Prompt(len(ids) // TOKEN_BYTES, hashes)
        if group is not None:
            group.routing_prompt = prompt
        return prompt

    return read


def common_prefix_blocks(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of equal leading blocks, by binary search: chained hashes that are equal
    at an index are equal at all indices before it."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high) // 2
        if first[middle] == second[middle]:
            low = middle + 1
        else:
            high = middle
    return low
