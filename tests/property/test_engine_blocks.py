"""The view of a foreign engine's blocks against the engine's own cache."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.engine_cache import STYLES, UNSALTED_STYLES, FakeEngineCache, Style

from dynamo.core.codec import pack_ids
from dynamo.core.hashing import block_hashes, root_hash
from dynamo.core.values import BlocksRemoved, BlocksStored, KvEvent
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.engine_events import decode_batch

SALTS = ("", "tenant-a", "tenant-b")
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6)
steps = st.one_of(
    st.tuples(st.just("compute"), prompts, st.sampled_from(SALTS), st.integers(1, 3)),
    st.tuples(st.just("evict"), st.integers(1, 8)),
    st.tuples(st.just("reset")),
)


def prompt_ids(path: list[int], block_tokens: int) -> list[int]:
    """Return a prompt of whole blocks and one and a half more: paths with a common start share it."""
    ids = [token for number in path for token in range(number * 100, number * 100 + block_tokens)]
    return [*ids, *range(block_tokens // 2)]


def held_hashes(cache: FakeEngineCache, block_tokens: int) -> set[int]:
    """Return our hashes of what the engine holds."""
    return {
        block
        for salt, ids in cache.contents.values()
        for block in block_hashes(pack_ids(ids), block_tokens, root_hash(salt))[
            -cache.block_tokens // block_tokens :
        ]
    }


class Follower:
    """A router that applies the events. Removed blocks must be known to it."""

    def __init__(self) -> None:
        self.held: set[int] = set()

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlocksStored):
                self.held.update(event.hashes)
            elif isinstance(event, BlocksRemoved):
                assert self.held.issuperset(event.hashes)
                self.held.difference_update(event.hashes)
            else:
                self.held.clear()


def check_steps(style: Style, script: list[tuple], salts: bool, block_tokens: int) -> None:
    cache = FakeEngineCache(style, block_tokens=32, num_blocks=12)
    view, follower = EngineBlocks(block_tokens, 32), Follower()
    for step in script:
        if step[0] == "compute":
            _, path, salt, copies = step
            ids, salt = prompt_ids(path, 32), salt if salts else ""
            predicted = view.predict(pack_ids(ids), salt)
            assert cache.compute(ids, salt, copies) == predicted
        elif step[0] == "evict":
            cache.evict(step[1])
        else:
            cache.reset()
        batch = decode_batch(cache.drain_payload())
        assert not batch.damaged
        assert not batch.skipped
        follower.apply(view.apply(batch.events))
        assert follower.held == held_hashes(cache, block_tokens)
    copy = Follower()
    copy.apply(view.snapshot())
    assert copy.held == follower.held


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None)
@given(script=st.lists(steps, max_size=12), block_tokens=st.sampled_from((8, 16, 32)))
def test_view_equals_the_cache(style: str, script: list[tuple], block_tokens: int) -> None:
    check_steps(STYLES[style], script, True, block_tokens)


@settings(max_examples=60, deadline=None)
@given(script=st.lists(steps, max_size=12))
def test_view_equals_the_cache_of_engines_without_salts(script: list[tuple]) -> None:
    check_steps(UNSALTED_STYLES["sglang_0.4"], script, False, 16)


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(
    script=st.lists(steps, max_size=12),
    lost=st.sets(st.integers(0, 11), min_size=1),
)
def test_view_with_gaps_and_clears_never_knows_too_much(
    style: str, script: list[tuple], lost: set[int]
) -> None:
    """Messages in `lost` are missing. The view is emptied before the next one."""
    cache = FakeEngineCache(STYLES[style], block_tokens=32, num_blocks=12)
    view, follower = EngineBlocks(16, 32), Follower()
    for number, step in enumerate(script):
        if step[0] == "compute":
            cache.compute(prompt_ids(step[1], 32), step[2], step[3])
        elif step[0] == "evict":
            cache.evict(step[1])
        else:
            cache.reset()
        payload = cache.drain_payload()
        if number in lost:
            follower.apply(view.clear())
        else:
            follower.apply(view.apply(decode_batch(payload).events))
        assert follower.held <= held_hashes(cache, 16)
