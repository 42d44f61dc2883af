"""Finding KV blocks by the names of their prefixes."""

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
from dynamo.inference.sequence import TokenContent


def test_prefix_names_follow_the_specification() -> None:
    tokens = [1, 23, 456]
    assert PrefixHash(2)(tokens) == hashlib.sha256(b"123").hexdigest()[:16]
    assert PrefixHash(prefix_bytes=4)(b"abcdefg") == hashlib.sha256(b"abcd").hexdigest()[:16]
    assert PrefixHash(3, tokenize=lambda _: tokens)("a text") == PrefixHash(3)(tokens)
    with pytest.raises(ConfigError):
        PrefixHash()("a text")
    with pytest.raises(ConfigError):
        PrefixHash(0)


def test_a_key_changes_names_and_separates_tokens() -> None:
    plain, mine, other = PrefixHash(), PrefixHash(key=b"mine"), PrefixHash(key=b"other")
    assert len({plain([1, 23]), mine([1, 23]), other([1, 23])}) == 3
    assert plain([1, 23]) == plain([12, 3])
    assert mine([1, 23]) != mine([12, 3])


def test_chained_hash_gives_the_name_in_kv_events() -> None:
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
    match = await tree.find_matching_blocks(name)
    assert match.all_blocks == blocks[:3]
    assert match.cached_blocks == blocks[:2]
    assert match.missing_blocks == [blocks[2]]
    assert match.match_quality == 1
    node = tree.block_registry["a"]
    assert (node.prefix, node.is_terminal, node.blocks) == (name, True, blocks[:3])
    of_worker = await tree.find_matching_blocks(name, "w1")
    assert [block.id for block in of_worker.all_blocks] == ["a", "c"]
    nothing = await tree.find_matching_blocks("0" * 16, "w1")
    assert nothing.all_blocks == []
    assert nothing.match_quality == 0


async def test_the_location_of_a_block_is_updated() -> None:
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


async def test_a_pool_can_decide_which_blocks_are_cached() -> None:
    pool = BlockPool(4, 16)
    tokens = tuple(range(16))
    (block_hash,) = block_hashes(pack_ids(tokens), 16)
    tree = RadixTree(
        chained_hash(16), lambda block: bool(pool.match(block_hashes(pack_ids(block.content), 16)))
    )
    await tree.register_block(KVBlock(1, tokens))
    assert not (await tree.find_matching_blocks(f"{block_hash:016x}")).cached_blocks
    pool.register_chain(TokenContent(pack_ids(tokens), 16), pool.allocate(1), 0, 1)
    assert (await tree.find_matching_blocks(f"{block_hash:016x}")).cached_blocks


def all_nodes(tree: RadixTree) -> list[RadixNode]:
    nodes = [tree.root]
    for node in nodes:
        nodes += node.children.values()
    return nodes


NAMES = st.text("ab", max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.one_of(st.none(), NAMES))), NAMES)
async def test_the_tree_finds_exactly_the_names_with_a_prefix(steps, prefix) -> None:
    tree, names = RadixTree(str), {}
    for number, name in steps:
        if name is None:
            names.pop(number, None)
            await tree.remove_block(number)
        else:
            names.pop(number, None)
            names[number] = name
            await tree.register_block(KVBlock(number, name))
    match = await tree.find_matching_blocks(prefix)
    expected = {number for number, name in names.items() if name.startswith(prefix)}
    assert {block.id for block in match.all_blocks} == expected
    prefixes = {names[number] for number in expected}
    assert match.match_quality == (1 / len(prefixes) if prefixes else 0)
    assert tree.block_registry.keys() == names.keys()
    for node in all_nodes(tree):
        assert node.is_terminal == bool(node.blocks)
        assert node is tree.root or node.is_terminal or len(node.children) > 1
        assert all(
            child.prefix.startswith(node.prefix + first) for first, child in node.children.items()
        )
