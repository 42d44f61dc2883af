"""Blocks by the names of their prefixes."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from dynamo.core.codec import pack_ids
from dynamo.core.errors import ConfigError
from dynamo.core.hashing import block_hashes
from dynamo.inference.block_pool import BlockPool
from dynamo.inference.memory import KVBlock, PrefixHash, RadixNode, RadixTree, chained_hash


def test_names_are_the_documents() -> None:
    tokens = [1, 23, 456]
    assert PrefixHash(2)(tokens) == hashlib.sha256(b"123").hexdigest()[:16]
    assert PrefixHash(prefix_bytes=4)(b"abcdefg") == hashlib.sha256(b"abcd").hexdigest()[:16]
    assert PrefixHash(3, tokenize=lambda _: tokens)("a text") == PrefixHash(3)(tokens)
    with pytest.raises(ConfigError):
        PrefixHash()("a text")
    with pytest.raises(ConfigError):
        PrefixHash(0)


def test_a_key_hides_and_separates() -> None:
    plain, mine, other = PrefixHash(), PrefixHash(key=b"mine"), PrefixHash(key=b"other")
    assert len({plain([1, 23]), mine([1, 23]), other([1, 23])}) == 3
    assert plain([1, 23]) == plain([12, 3])
    assert mine([1, 23]) != mine([12, 3])


def test_the_name_that_events_bear() -> None:
    tokens = list(range(40))
    *_, last = block_hashes(pack_ids(tokens), 16)
    assert chained_hash(16)(tokens) == f"{last:016x}" == chained_hash(16)(pack_ids(tokens))
    assert chained_hash(16, parent=7)([1]) == f"{7:016x}"
    with pytest.raises(ConfigError):
        chained_hash(16)("a text")


async def test_blocks_are_found_by_their_prefix() -> None:
    tree = RadixTree()
    shared = tuple(range(300))
    blocks = [
        KVBlock("a", shared, "w1"),
        KVBlock("b", (*shared, 1), "w2"),
        KVBlock("c", shared, "w1", None),
        KVBlock("d", (9, 9), "w1"),
    ]
    for block in blocks:
        await tree.register_block(block)
    name = tree.prefix_hash(shared)
    found = await tree.find_matching_blocks(name)
    assert found.all_blocks == blocks[:3]
    assert found.cached_blocks == blocks[:2]
    assert found.missing_blocks == [blocks[2]]
    assert found.match_quality == 1
    node = tree.block_registry["a"]
    assert (node.prefix, node.is_terminal, node.blocks) == (name, True, blocks[:3])
    one = await tree.find_matching_blocks(name, "w1")
    assert [block.id for block in one.all_blocks] == ["a", "c"]
    nothing = await tree.find_matching_blocks("0" * 16, "w1")
    assert nothing.all_blocks == []
    assert nothing.match_quality == 0


async def test_a_block_moves() -> None:
    tree = RadixTree()
    block = KVBlock(1, (1, 2), "w1")
    await tree.register_block(block)
    name = tree.prefix_hash((1, 2))
    await tree.update_block_location(KVBlock(1, (), "w2", "host"))
    assert (await tree.find_matching_blocks(name, "w1")).all_blocks == []
    (moved,) = (await tree.find_matching_blocks(name, "w2")).cached_blocks
    assert moved == replace(block, worker_id="w2", tier="host")
    await tree.update_block_location(replace(block, tier=None))
    assert (await tree.find_matching_blocks(name)).missing_blocks[0].id == 1
    with pytest.raises(KeyError):
        await tree.update_block_location(replace(block, id=2))


async def test_a_pool_says_what_is_cached() -> None:
    pool = BlockPool(4, 16)
    tokens = tuple(range(16))
    (held,) = block_hashes(pack_ids(tokens), 16)
    tree = RadixTree(
        chained_hash(16), lambda block: bool(pool.match(block_hashes(pack_ids(block.content), 16)))
    )
    await tree.register_block(KVBlock(1, tokens))
    assert not (await tree.find_matching_blocks(f"{held:016x}")).cached_blocks
    (block,) = pool.allocate(1)
    pool.register(block, None, 0, held)
    assert (await tree.find_matching_blocks(f"{held:016x}")).cached_blocks


def nodes(tree: RadixTree) -> list[RadixNode]:
    found = [tree.root]
    for node in found:
        found += node.children.values()
    return found


NAMES = st.text("ab", max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), NAMES))), NAMES)
async def test_it_is_a_map_that_knows_beginnings(steps, asked) -> None:
    tree, known = RadixTree(str), {}
    for number, name in steps:
        if name is None:
            known.pop(number, None)
            await tree.remove_block(number)
        else:
            known.pop(number, None)
            known[number] = name
            await tree.register_block(KVBlock(number, name))
    found = await tree.find_matching_blocks(asked)
    wanted = {number for number, name in known.items() if name.startswith(asked)}
    assert {block.id for block in found.all_blocks} == wanted
    prefixes = {known[number] for number in wanted}
    assert found.match_quality == (1 / len(prefixes) if prefixes else 0)
    assert tree.block_registry.keys() == known.keys()
    for node in nodes(tree):
        assert node.is_terminal == bool(node.blocks)
        assert node is tree.root or node.is_terminal or len(node.children) > 1
        assert all(
            child.prefix.startswith(node.prefix + first) for first, child in node.children.items()
        )
