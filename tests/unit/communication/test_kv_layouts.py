"""Conversion of KV blocks between layouts, against a plain reference; peers of other layouts."""

from __future__ import annotations

import importlib
import math
import struct
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo.communication.transfer import (
    MemoryRegion,
    RegionDescriptor,
    SlotRead,
    TransferPlane,
    open_transfer,
)
from dynamo.communication.transfer.layout import KvLayout, convert_piece, split_block
from dynamo.core.errors import TransferFailed

ORDERS = ("HND", "NHD", "universal")
DTYPES = ("float32", "float16", "bfloat16")
LAYERS, HEADS, DIM = 2, 8, 3


def convert_blocks(
    source: KvLayout, blocks: Sequence[Any], target: KvLayout, targets: Sequence[Any]
) -> None:
    """Copy the tokens of `blocks`, one part of a sequence, into `targets`, as pulls do."""
    assert not source.refusal(target)
    for number, block in enumerate(blocks):
        for index, *tokens in split_block(number, source.block_tokens, target.block_tokens):
            if index < len(targets):
                convert_piece(source, block, target, targets[index], *tokens)


def bfloat16(value: float) -> int:
    """The bits of the nearest bfloat16, by comparing both neighbours."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    low = bits >> 16
    below, above = (struct.unpack("<f", struct.pack("<I", n << 16))[0] for n in (low, low + 1))
    if abs(value - below) == abs(above - value):
        return low + (low & 1)
    return low if abs(value - below) < abs(above - value) else low + 1


def rounded(value: float, dtype: str) -> float:
    if dtype == "bfloat16":
        return struct.unpack("<f", struct.pack("<I", bfloat16(value) << 16))[0]
    return float(np.dtype(dtype).type(value))


def element(value: float, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return struct.pack("<H", bfloat16(value))
    return np.dtype(dtype).type(value).tobytes()


def encode(layout: KvLayout, tokens: Any) -> list[bytearray]:
    """The blocks of a part. `tokens`: `[token, layer, 2, head, dim]`, as many as blocks hold."""
    first = layout.part * layout.heads
    heads, size = range(first, first + layout.heads), layout.block_tokens
    blocks = []
    for start in range(0, len(tokens), size):
        inside = range(start, start + size)
        if layout.order == "HND":
            places = [
                (t, la, k, h) for la in range(LAYERS) for k in (0, 1) for h in heads for t in inside
            ]
        elif layout.order == "NHD":
            places = [
                (t, la, k, h) for la in range(LAYERS) for k in (0, 1) for t in inside for h in heads
            ]
        else:
            places = [
                (t, la, k, h) for h in heads for la in range(LAYERS) for k in (0, 1) for t in inside
            ]
        values = (float(value) for place in places for value in tokens[place])
        blocks.append(bytearray(b"".join(element(value, layout.dtype) for value in values)))
    return blocks


def layouts(dtype: st.SearchStrategy[Any]) -> st.SearchStrategy[KvLayout]:
    sizes, parts = st.sampled_from((1, 2, 4, 8)), st.sampled_from((1, 2, 4, 8))
    make = lambda size, kind, order, count: KvLayout(  # noqa: E731
        "m", size, LAYERS, HEADS, DIM, kind, order, count
    )
    return st.builds(make, sizes, dtype, st.sampled_from(ORDERS), parts)


@settings(max_examples=60, deadline=None)
@given(layouts(st.sampled_from(DTYPES)), layouts(st.sampled_from(DTYPES)), st.integers(0, 2**32))
def test_converted_blocks_are_those_of_the_reference(
    source: KvLayout, target: KvLayout, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.normal(0, 10, (8, LAYERS, 2, HEADS, DIM)).astype(np.float32)
    there = np.vectorize(lambda value: rounded(float(value), source.dtype))(tokens)
    for part in range(target.parts):
        own = msgspec.structs.replace(target, part=part)
        expected = encode(own, there)
        targets = [bytearray(own.block_bytes) for _ in expected]
        for number in range(source.parts):
            theirs = msgspec.structs.replace(source, part=number)
            convert_blocks(theirs, encode(theirs, tokens), own, targets)
        assert targets == expected


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 3e38, -0.0, 1e-40])
def test_special_values_survive(value: float) -> None:
    wide = KvLayout("m", 1, 1, 1, 1)
    narrow = msgspec.structs.replace(wide, dtype="bfloat16")
    there, back = bytearray(narrow.block_bytes), bytearray(wide.block_bytes)
    convert_blocks(wide, [struct.pack("<2f", value, value)], narrow, [there])
    convert_blocks(narrow, [there], wide, [back])
    key, _ = struct.unpack("<2f", back)
    assert (
        math.isnan(key) if math.isnan(value) else key == pytest.approx(value, rel=0.01, abs=1e-38)
    )


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "other"}, "model is other at the peer and m here"),
        ({"layers": 3}, "layers is 3"),
        ({"kv_heads": 4}, "kv_heads is 4"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"parts": 3}, "8 heads have no equal part 0 of 3"),
        ({"parts": 2, "part": 2}, "part 2 of 2"),
    ],
)
def test_other_models_are_refused(other: dict[str, Any], reason: str) -> None:
    own = KvLayout("m", 4, LAYERS, HEADS, DIM)
    theirs = msgspec.structs.replace(own, **other)
    assert reason in theirs.refusal(own)


@pytest.mark.parametrize("url", ["memory:", "shm:", "tcp:", "nixl:"])
async def test_blocks_of_another_layout_are_converted_on_arrival(url: str) -> None:
    theirs = KvLayout("m", 4, LAYERS, HEADS, DIM, "bfloat16", "NHD")
    own = KvLayout("m", 4, LAYERS, HEADS, DIM, "float32", "HND")
    tokens = np.random.default_rng(3).normal(0, 9, (24, LAYERS, 2, HEADS, DIM)).astype(np.float32)
    there = np.vectorize(lambda value: rounded(float(value), "bfloat16"))(tokens)
    async with exposed(url, theirs) as (_, source), exposed(url, own) as (plane, region):
        region.memory[:] = bytes(len(region.memory))
        for slot, block in enumerate(encode(theirs, tokens)):
            source.slot(slot)[:] = block
        peer = await plane.connect(source_descriptor(source))
        await peer.pull([SlotRead(slot, 0, 5 - slot) for slot in range(5)])
        for slot, block in enumerate(encode(own, there)[:5]):
            assert bytes(region.slot(5 - slot)) == bytes(block)
        assert bytes(region.slot(0)) == bytes(own.block_bytes)
        source.generations[2] += 1
        with pytest.raises(TransferFailed) as caught:
            await peer.pull([SlotRead(2, 0, 0)])
        assert caught.value.reason == "stale"
        with pytest.raises(TransferFailed, match="no such slots"):
            await peer.pull([SlotRead(2, 1, 6)])
        await peer.close()


@pytest.mark.parametrize("failing", ["add_remote_agent", "prep_xfer_dlist", "make_prepped_xfer"])
async def test_an_agent_forgets_a_peer_whose_connection_failed(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    agents: list[CountingAgent] = []

    def create(name: str, options: dict[str, str]) -> CountingAgent:
        agents.append(CountingAgent(create_agent(name, options)))
        return agents[-1]

    nixl_agent = importlib.import_module("dynamo.communication.transfer.nixl_agent")
    create_agent = nixl_agent._new_agent
    monkeypatch.setattr(nixl_agent, "_new_agent", create)
    theirs = KvLayout("m", 4, LAYERS, HEADS, DIM, "bfloat16", "NHD")
    own = KvLayout("m", 4, LAYERS, HEADS, DIM, "float32", "HND")
    async with exposed("nixl:", theirs) as (_, source), exposed("nixl:", own) as (plane, _):
        descriptor = source_descriptor(source)
        await (await plane.connect(descriptor)).close()
        before = [agent.held.copy() for agent in agents]
        for agent in agents:
            agent.failing = failing
        with pytest.raises(TransferFailed, match="a test"):
            await plane.connect(descriptor)
        assert [agent.held for agent in agents] == before
        for agent in agents:
            agent.failing = ""
        peer = await plane.connect(descriptor)
        assert [agent.held for agent in agents] != before
        await peer.pull([SlotRead(0, 0, 1)])
        await peer.close()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"model": "another"}, "model is another at the peer"),
        ({"parts": 2}, "parts is 2 at the peer and 1 here"),
    ],
)
async def test_peers_whose_slots_do_not_fit_are_refused(other: dict[str, Any], reason: str) -> None:
    own = KvLayout("m", 4, LAYERS, HEADS, DIM)
    theirs = msgspec.structs.replace(own, **other)
    async with exposed("shm:", theirs) as (_, source), exposed("shm:", own) as (plane, _):
        with pytest.raises(TransferFailed, match=reason) as caught:
            await plane.connect(source_descriptor(source))
        assert caught.value.reason == "refused"
        assert caught.value.hint


def test_a_descriptor_of_the_former_version_is_read() -> None:
    record = {
        "slots": 4,
        "slot_bytes": 8,
        "layout": "native-1 f32 16 ab",
        "endpoints": ["shm://x/y"],
        "incarnation": "i",
    }
    former = msgspec.convert(record, RegionDescriptor)
    present = msgspec.structs.replace(former, kv=KvLayout("m", 1, 1, 1, 1))
    assert former.refusal(present) == ""
    assert "layout" in msgspec.structs.replace(former, layout="other").refusal(present)
    assert msgspec.to_builtins(former).keys() == record.keys()


@pytest.mark.parametrize(("theirs", "ours"), [(8, 4), (4, 8), (6, 4)])
async def test_blocks_of_another_length_arrive_in_pieces(theirs: int, ours: int) -> None:
    layouts = [KvLayout("m", size, LAYERS, HEADS, DIM) for size in (theirs, ours)]
    tokens = np.random.default_rng(4).normal(0, 9, (24, LAYERS, 2, HEADS, DIM)).astype(np.float32)
    async with exposed("shm:", layouts[0]) as (_, source), exposed("shm:", layouts[1]) as own:
        plane, region = own
        for slot, block in enumerate(encode(layouts[0], tokens)):
            source.slot(slot)[:] = block
        peer = await plane.connect(source_descriptor(source))
        reads = [
            SlotRead(number, 0, index, *pieces)
            for number in range(24 // theirs)
            for index, *pieces in split_block(number, theirs, ours)
        ]
        await peer.pull(reads)
        for slot, block in enumerate(encode(layouts[1], tokens)):
            assert bytes(region.slot(slot)) == bytes(block)


_descriptors: dict[int, RegionDescriptor] = {}


def source_descriptor(region: MemoryRegion) -> RegionDescriptor:
    """The descriptor as another process reads it from the instance record."""
    return msgspec.json.decode(msgspec.json.encode(_descriptors[id(region)]), type=RegionDescriptor)


@asynccontextmanager
async def exposed(url: str, layout: KvLayout) -> AsyncIterator[tuple[TransferPlane, MemoryRegion]]:
    region = MemoryRegion.allocate(6, layout.block_bytes)
    region.kv_layout = layout
    plane = await open_transfer(url)
    text = f"{layout.model} {layout.block_tokens} {layout.dtype} {layout.parts}"
    _descriptors[id(region)] = await plane.expose(region, text)
    try:
        yield plane, region
    finally:
        await plane.close()
        region.close()


class CountingAgent:
    """A NIXL agent that counts what it holds. Its method `failing` raises an error."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self.held: Counter[str] = Counter()
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self.failing:
                nixl = importlib.import_module("dynamo.communication.transfer.nixl")
                raise nixl.NIXL_ERRORS[0]("a test")
            result = method(*args)
            kind, change = CHANGES.get(name, ("", 0))
            self.held[kind] += change
            return result

        method = getattr(self._agent, name)
        return call if callable(method) else method


CHANGES = {
    "register_memory": ("registrations", 1),
    "deregister_memory": ("registrations", -1),
    "prep_xfer_dlist": ("lists", 1),
    "release_dlist_handle": ("lists", -1),
    "add_remote_agent": ("peers", 1),
    "remove_remote_agent": ("peers", -1),
}
"""Methods of an agent -> what they add or remove."""
