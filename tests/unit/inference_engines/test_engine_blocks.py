"""`EngineBlocks`: sizes, groups, salts, doubled and foreign blocks, bounds."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from dynamo.core.hashing import block_hashes, root_hash
from dynamo.core.values import BlocksCleared, BlocksRemoved, BlocksStored
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.engine_events import EventBatch, PolledEventReader, decode_batch


def ids(start: int, count: int = 32) -> list[int]:
    return [*range(start, start + count)]


def packed(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


def stored(key: Any, tokens: list[int], parent: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [key],
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": len(tokens),
        **fields,
    }


def removed(*keys: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(keys), **fields}


def read(*events: Any) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([0.0, list(events), None]))


def apply(blocks: EngineBlocks, *events: Any) -> list[Any]:
    batch = read(*events)
    assert not batch.damaged
    return blocks.apply(batch.events)


def test_block_of_32_is_two_of_16() -> None:
    blocks = EngineBlocks(16)
    hashes = tuple(block_hashes(packed(ids(0))))
    assert apply(blocks, stored(5, ids(0))) == [BlocksStored(0, hashes)]
    below = tuple(block_hashes(packed(ids(50)), parent=hashes[-1]))
    assert apply(blocks, stored(6, ids(50), parent=5)) == [BlocksStored(hashes[-1], below)]
    assert blocks.predict(packed([*ids(0), *ids(50)])) == 32  # never the last token
    assert blocks.predict(packed([*ids(0), *ids(50), 1])) == 64
    assert blocks.predict(packed([*ids(0), *ids(50, 31), 1])) == 32
    assert apply(blocks, removed(6)) == [BlocksRemoved(below[::-1])]


def test_size_that_is_no_multiple_is_reported() -> None:
    blocks = EngineBlocks(16, 24)
    assert "24 tokens, which is no multiple of the 16" in blocks.unusable
    assert apply(blocks, stored(5, ids(0, 24))) == [BlocksCleared()]
    assert (blocks.counts["unusable"], blocks.predict(packed(ids(0)))) == (1, 0)
    learnt = EngineBlocks(16)
    apply(learnt, stored(5, ids(0, 1)))
    assert "1 tokens" in learnt.unusable


def test_partial_blocks_are_skipped_and_larger_ones_reported() -> None:
    blocks = EngineBlocks(16, 32)
    apply(blocks, stored(5, ids(0)), stored(6, ids(50, 20), parent=5))
    assert (blocks.counts["partial"], len(blocks)) == (1, 1)
    apply(blocks, stored(7, ids(50, 64), parent=5))
    assert "64 tokens" in blocks.unusable
    assert len(blocks) == 0


def test_doubled_blocks_are_counted() -> None:
    blocks = EngineBlocks(16)
    assert len(apply(blocks, stored(5, ids(0)), stored(5, ids(0)))) == 1
    assert apply(blocks, removed(5)) == []
    assert len(apply(blocks, removed(5))) == 1
    assert blocks.counts["doubled"] == 1


def test_without_counting_one_removal_ends_all_copies() -> None:
    blocks = EngineBlocks(16)
    blocks.count_copies = False
    apply(blocks, stored(5, ids(0)), stored(5, ids(0)))
    assert len(apply(blocks, removed(5))) == 1


def test_equal_content_under_two_names_is_held_until_both_are_gone() -> None:
    blocks = EngineBlocks(16)
    assert len(apply(blocks, stored(5, ids(0)), stored(b"6", ids(0)))) == 1
    assert apply(blocks, removed(5)) == []
    assert len(apply(blocks, removed(b"6"))) == 1


def test_only_the_main_attention_group_counts() -> None:
    blocks = EngineBlocks(16)
    sliding = {"kv_cache_spec_kind": "sliding_window", "group_idx": 0}
    main = {"kv_cache_spec_kind": "mla_attention", "group_idx": 1}
    second = {"kv_cache_spec_kind": "full_attention", "group_idx": 2}
    apply(blocks, *(stored(5, ids(0), **group) for group in (sliding, main, second)))
    assert len(blocks) == 1
    assert apply(blocks, removed(5, group_idx=0), removed(5, group_idx=2)) == []
    assert len(apply(blocks, removed(5, group_idx=1))) == 1
    assert blocks.counts["other_group"] == 4


def test_groups_without_kinds_make_the_view_unusable() -> None:
    blocks = EngineBlocks(16)
    apply(blocks, stored(5, ids(0), group_idx=0), stored(5, ids(0), group_idx=1))
    assert "which cache group" in blocks.unusable


def test_salts_name_the_root() -> None:
    blocks = EngineBlocks(16)
    by_vllm = stored(5, ids(0), extra_keys=[["adapter-a", ["image", 3], "acme"]])
    apply(blocks, by_vllm | {"lora_name": "adapter-a"})
    apply(blocks, stored(6, ids(100), cache_salt="umbrella", lora_name="adapter-a"))
    below = stored(7, ids(200), parent=5, extra_keys=[["adapter-a"]], lora_name="adapter-a")
    (event,) = apply(blocks, below)
    top = block_hashes(packed(ids(0)), parent=root_hash("acme"))[-1]
    assert event == BlocksStored(top, tuple(block_hashes(packed(ids(200)), parent=top)))
    assert blocks.predict(packed([*ids(0), *ids(200), 1]), "acme") == 64
    assert blocks.predict(packed([*ids(100), 1]), "umbrella") == 32
    assert blocks.predict(packed([*ids(100), 1])) == 0


def test_blocks_that_depend_on_more_than_tokens_are_left_out() -> None:
    blocks = EngineBlocks(16, 32)
    apply(blocks, stored(5, ids(0), lora_name="adapter-a", extra_keys=[["adapter-a"]]))
    apply(blocks, stored(6, ids(0), lora_name="adapter-a"))
    apply(blocks, stored(7, ids(0)), stored(8, ids(50), parent=7, extra_keys=[[["image", 0]]]))
    apply(blocks, stored(9, ids(90), parent=8))
    assert len(blocks) == 1
    assert (blocks.counts["foreign"], blocks.counts["unknown_parent"]) == (3, 1)


def test_one_name_for_two_contents_is_given_up_with_its_first_removal() -> None:
    blocks = EngineBlocks(16)
    apply(blocks, stored(5, ids(0)), stored(5, ids(50)))
    assert blocks.counts["ambiguous"] == 1
    assert len(apply(blocks, removed(5))) == 1
    assert len(blocks) == 0


def test_blocks_of_lower_media_are_skipped() -> None:
    batch = read(stored(5, ids(0), medium="CPU"), removed(5, medium="CPU"))
    assert (batch.events, batch.skipped) == ([], {"other_medium": 2})


def test_hostile_publisher_cannot_grow_the_view() -> None:
    blocks = EngineBlocks(16)
    blocks.set_capacity(10)
    for key in range(100):
        apply(blocks, stored(key, ids(key, 16)))
        assert len(blocks) <= 20
    assert blocks.counts["overflow"] == 4


def test_snapshot_has_parents_first() -> None:
    blocks = EngineBlocks(16)
    apply(blocks, stored(1, ids(0)), stored(2, ids(50), parent=1), stored(3, ids(90), parent=2))
    apply(blocks, removed(1), stored(1, ids(0)))
    (event,) = blocks.snapshot()
    assert isinstance(event, BlocksStored)
    assert (event.parent, len(event.hashes)) == (0, 6)


def polled(number: int, kind: str, window: int = 8192, **data: Any) -> dict[str, Any]:
    return {"event_id": number, "window_size": window, "data": {"type": kind, **data}}


def polled_block(key: int, tokens: list[int], extra: int = 0) -> dict[str, Any]:
    pairs = [{"token_id": token, "token_extra_id": extra} for token in tokens]
    return {"block_hash": key, "tokens": pairs, "cache_level": 0, "priority": 35}


def test_polled_events() -> None:
    reader, blocks = PolledEventReader(32), EngineBlocks(16)
    chain = [polled_block(1, ids(0)), polled_block(2, ids(50)), polled_block(3, ids(90, 5))]
    events = [
        polled(0, "created", num_blocks_per_cache_level=[10, 0]),
        polled(1, "created", window=512, num_blocks_per_cache_level=[10, 0]),
        polled(2, "stored", parent_hash=None, blocks=chain),
        polled(3, "stored", window=512, parent_hash=None, blocks=chain),
        polled(4, "stored", parent_hash=2, blocks=[polled_block(4, ids(70), extra=9)]),
        polled(5, "updated", block_hash=1, cache_level={"old_value": 0, "new_value": 1}),
    ]
    batch = reader.read(events)[0]
    assert not batch.damaged
    blocks.apply(batch.events)
    assert blocks.predict(packed([*ids(0), *ids(50), *ids(70), 1])) == 64
    assert batch.skipped == {"other_group": 2, "partial": 1}
    assert blocks.counts["foreign"] == 1
    blocks.apply(reader.read([polled(6, "removed", block_hashes=[2])])[0].events)
    assert blocks.predict(packed([*ids(0), *ids(50), 1])) == 32


def test_missing_and_malformed_polled_events_damage_the_batch() -> None:
    reader = PolledEventReader(32)
    assert not reader.read([polled(0, "created")])[0].damaged
    assert reader.read([polled(2, "created")])[0].damaged
    by_rank = reader.read([polled(0, "created") | {"attention_dp_rank": 1}, "?"])
    assert [by_rank[rank].damaged for rank in (1, 0)] == [False, True]
    assert reader.read([polled(3, "stored", blocks=[{"tokens": 3}])])[0].damaged
