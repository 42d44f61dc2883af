"""Blocks of other tokens with the hash of a known prompt's block: nobody else may get them."""

from __future__ import annotations

from tests.support.invariants import check_pool

from dynamo.core.codec import pack_ids
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.sequence import TokenContent

KNOWN = [500 + 37 * number for number in range(16)]
FORGED = [
    31778,
    4327,
    22274,
    12552,
    21434,
    5766,
    10419,
    8585,
    36024,
    10868,
    33246,
    14244,
    16484,
    12904,
    38123,
    3442,
]
"""Found in a minute: the sum of four independent terms is the hash of 16 tokens."""


def content_of(ids: list[int]) -> TokenContent:
    content = TokenContent(pack_ids(ids), 16)
    content.ensure_hashes(1)
    return content


def test_a_block_with_the_hash_of_other_tokens_is_not_reused() -> None:
    pool = BlockPool(4, 16)
    forged, known = content_of(FORGED), content_of(KNOWN)
    assert forged.hashes == known.hashes
    first, second = pool.allocate(2)
    pool.register_chain(forged, [first], 0, 1)
    assert pool.match(known.hashes, known.fingerprint) == []
    pool.register_chain(known, blocks := [second], 0, 1)
    assert blocks == [second]
    assert not second.cached
    assert pool.match(forged.hashes, forged.fingerprint) == [first]
    pool.release([first])
    pool.release([second])
    check_pool(pool)
    assert pool.available == 4
