"""Which block the eviction policies choose first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.inference.block import Block
from dynamo.inference.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    make_eviction_policy,
)


def make_blocks(number: int, hits: int = 0) -> list[Block]:
    blocks = [Block(block_id) for block_id in range(number)]
    for block in blocks:
        block.hits = hits
    return blocks


def release(eviction: EvictionPolicy, chain: list[Block]) -> None:
    eviction.add(chain[::-1])


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_the_oldest_chain_is_evicted_first_from_its_tail(name):
    eviction = make_eviction_policy(name)
    first, second = make_blocks(6)[:3], make_blocks(6)[3:]
    release(eviction, first)
    release(eviction, second)
    evicted = [block.id for count in (2, 4) for block in eviction.pop(count)]
    assert evicted == [2, 1, 0, 5, 4, 3]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_referenced_block_is_not_evicted(name):
    eviction = make_eviction_policy(name)
    chain = make_blocks(4)
    release(eviction, chain)
    eviction.remove(chain[0])
    chain[0].hits += 1
    assert {block.id for block in eviction.pop(3)} == {1, 2, 3}
    eviction.add(chain[:1])
    assert len(eviction) == 1
    eviction.remove(chain[0])
    assert len(eviction) == 0


def test_a_shared_block_stays_one_lifetime_longer():
    eviction = make_eviction_policy("reuse")
    blocks = [Block(block_id) for block_id in range(600)]
    eviction.add(blocks[:100])
    for block in blocks[100:200]:  # each victim is 100 blocks old: that is a lifetime
        eviction.add([block])
        eviction.pop(1)
    shared = Block(1000)
    shared.hits = 1
    eviction.add([shared])
    survived = 0
    for block in blocks[200:]:
        eviction.add([block])
        if eviction.pop(1) == [shared]:
            break
        survived += 1
    assert 190 <= survived <= 210


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match="fifo"):
        make_eviction_policy("fifo")


@given(st.sampled_from(sorted(EVICTION_POLICIES)), st.data())
def test_a_block_is_evicted_before_its_parent(name, data):
    """Chains form a tree: a sequence that uses a block uses all blocks above it."""
    eviction = make_eviction_policy(name)
    tree: dict[int, tuple[Block, int]] = {}
    evictable: set[int] = set()
    for number in range(data.draw(st.integers(5, 60))):
        if evictable and data.draw(st.booleans()):
            (victim,) = eviction.pop(1)
            evictable.discard(victim.id)
            assert not [block_id for block_id, (_, parent) in tree.items() if parent == victim.id]
            del tree[victim.id]
            continue
        parent = data.draw(st.sampled_from([-1, *tree]))
        chain = []
        block_id = parent
        while block_id != -1:
            chain.append(tree[block_id][0])
            block_id = tree[block_id][1]
        chain.reverse()
        for block in chain:
            eviction.remove(block)
            block.hits += 1
        for number_in_chain in range(data.draw(st.integers(0, 3))):
            block = Block(number * 10 + number_in_chain)
            tree[block.id] = (block, parent)
            parent = block.id
            chain.append(block)
        release(eviction, chain)
        evictable.update(block.id for block in chain)
