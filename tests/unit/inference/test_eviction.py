"""Which block is given up first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.errors import ConfigError
from dynamo.inference.block import Block
from dynamo.inference.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    LeastRecentlyUsed,
    make_eviction_policy,
)


def blocks(number: int, hits: int = 0) -> list[Block]:
    made = [Block(at) for at in range(number)]
    for block in made:
        block.hits = hits
    return made


def give_back(eviction: EvictionPolicy, chain: list[Block]) -> None:
    for block in reversed(chain):
        eviction.add(block)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_of_equals_the_oldest_goes_first_and_of_one_chain_the_tail(name):
    eviction = make_eviction_policy(name)
    one, other = blocks(6)[:3], blocks(6)[3:]
    give_back(eviction, one)
    give_back(eviction, other)
    gone = [eviction.pop().id for _ in range(len(eviction))]
    assert gone == [2, 1, 0, 5, 4, 3]


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_block_in_use_again_is_no_victim(name):
    eviction = make_eviction_policy(name)
    chain = blocks(4)
    give_back(eviction, chain)
    eviction.remove(chain[0])
    chain[0].hits += 1
    assert {eviction.pop().id for _ in range(3)} == {1, 2, 3}
    eviction.add(chain[0])
    assert len(eviction) == 1
    eviction.remove(chain[0])
    assert len(eviction) == 0


def test_what_several_wanted_stays_one_lifetime_longer():
    eviction = make_eviction_policy("reuse")
    held = [Block(at) for at in range(600)]
    for block in held[:100]:
        eviction.add(block)
    for block in held[100:200]:  # each victim is 100 blocks old: that is a lifetime
        eviction.add(block)
        eviction.pop()
    shared = Block(1000)
    shared.hits = 1
    eviction.add(shared)
    after = 0
    for block in held[200:]:
        eviction.add(block)
        if eviction.pop() is shared:
            break
        after += 1
    assert 190 <= after <= 210


def test_an_unknown_name_is_refused():
    assert isinstance(make_eviction_policy("lru"), LeastRecentlyUsed)
    with pytest.raises(ConfigError, match="fifo"):
        make_eviction_policy("fifo")


@given(st.sampled_from(sorted(EVICTION_POLICIES)), st.data())
def test_a_block_leaves_before_the_one_that_it_hangs_under(name, data):
    """Chains over a tree: whoever uses a block uses all above it."""
    eviction = make_eviction_policy(name)
    tree: dict[int, tuple[Block, int]] = {}
    idle: set[int] = set()
    for number in range(data.draw(st.integers(5, 60))):
        if idle and data.draw(st.booleans()):
            gone = eviction.pop()
            idle.discard(gone.id)
            assert not [at for at, (_, above) in tree.items() if above == gone.id]
            del tree[gone.id]
            continue
        above = data.draw(st.sampled_from([-1, *tree]))
        chain = []
        at = above
        while at != -1:
            chain.append(tree[at][0])
            at = tree[at][1]
        chain.reverse()
        for block in chain:
            eviction.remove(block)
            block.hits += 1
        for fresh in range(data.draw(st.integers(0, 3))):
            block = Block(number * 10 + fresh)
            tree[block.id] = (block, above)
            above = block.id
            chain.append(block)
        give_back(eviction, chain)
        idle.update(block.id for block in chain)
