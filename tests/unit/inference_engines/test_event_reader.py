"""`KvEventReader` with a real publisher over ZMQ."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator

import msgspec
import pytest
from tests.support.engine_cache import STYLES, FakeEngineCache
from tests.support.kv_event_publisher import KvEventPublisher

from dynamo.core.codec import pack_ids
from dynamo.core.errors import ConfigError
from dynamo.core.values import BlocksCleared, BlocksStored, KvEvent
from dynamo.inference.engines.engine_blocks import EngineBlocks
from dynamo.inference.engines.event_reader import (
    KvEventEndpoint,
    KvEventReader,
    find_loopback_ports,
)

OTHER_IDS = list(range(500, 580))


class Engine:
    """A cache with its publisher, and the reader of it."""

    def __init__(self, style: str = "vllm_0.32", bind: bool = True, **publisher: object) -> None:
        port = find_loopback_ports(2)
        self.bind = bind
        self.address = f"tcp://127.0.0.1:{port}"
        self.replay = f"tcp://127.0.0.1:{port + 1}"
        self.options = publisher
        self.cache = FakeEngineCache(STYLES[style], block_tokens=32, num_blocks=64)
        self.events: list[KvEvent] = []
        endpoint = KvEventEndpoint(self.address, self.replay, bind=bind)
        if publisher.get("replay") == "":
            endpoint = KvEventEndpoint(self.address, bind=bind)
        self.reader = KvEventReader(EngineBlocks(16, 32), endpoint)
        self.reader.blocks.listeners.append(self.events.extend)
        self.counts = self.reader.counts
        self.start_publisher()

    def start_publisher(self) -> None:
        address = self.address if self.bind else self.address.replace("127.0.0.1", "*")
        options = {"replay": self.replay, **self.options}
        self.publisher = KvEventPublisher(address, **options)  # type: ignore[arg-type]

    def compute(self, *ids: int, salt: str = "") -> bytes:
        """Compute a prompt and return the payload of its step."""
        self.cache.compute(ids, salt)
        return self.cache.drain_payload()

    def predict(self, *ids: int, salt: str = "") -> int:
        return self.reader.blocks.predict(pack_ids(ids), salt)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    async def wait_for_prediction(self, tokens: int, ids: list[int]) -> None:
        await self.wait_for(lambda: self.predict(*ids) == tokens)


@pytest.fixture
async def make_engine() -> AsyncIterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*args: object, **options: object) -> Engine:
        engines.append(Engine(*args, **options))  # type: ignore[arg-type]
        engines[-1].reader.open()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.reader.close()
        await asyncio.to_thread(engine.publisher.stop)


def prompts(seed: int, count: int) -> Iterator[list[int]]:
    """Prompts of 1 to 6 blocks of 32 that share prefixes."""
    chance = random.Random(seed)
    for _ in range(count):
        path = [chance.randrange(3) for _ in range(chance.randrange(1, 7))]
        yield [token for number in path for token in range(number * 50, number * 50 + 32)] + [7]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("bind", [True, False])
async def test_view_follows_the_publisher(make_engine, style: str, bind: bool) -> None:
    engine = make_engine(style, bind)
    sent = list(prompts(1, 200))
    for ids in sent:
        engine.publisher.publish(engine.compute(*ids))
    await engine.wait_for(lambda: engine.counts["messages"] >= 200)
    assert engine.counts["gaps"] == engine.counts["malformed"] == 0
    for ids in sent:
        assert engine.predict(*ids) == engine.cache.cached_tokens(ids)


@pytest.mark.parametrize("with_topic", [True, False])
async def test_gap_is_filled_by_a_replay(make_engine, with_topic: bool) -> None:
    engine = make_engine(with_topic=with_topic)
    first, lost, last = ([*range(start, start + 65)] for start in (0, 100, 200))
    engine.publisher.publish(engine.compute(*first))
    engine.publisher.lose(engine.compute(*lost))
    engine.publisher.publish(engine.compute(*last))
    await engine.wait_for_prediction(64, last)
    assert [engine.predict(*ids) for ids in (first, lost)] == [64, 64]
    await engine.wait_for(lambda: engine.counts["repaired"] == 1)
    assert engine.counts["gaps"] == 1
    assert BlocksCleared() not in engine.events


async def test_gap_beyond_the_replay_clears_the_view(make_engine) -> None:
    engine = make_engine(buffer_steps=1)
    first, lost, last = ([*range(start, start + 65)] for start in (0, 100, 200))
    engine.publisher.publish(engine.compute(*first))
    engine.publisher.lose(engine.compute(*lost))
    engine.publisher.publish(engine.compute(*last))
    await engine.wait_for_prediction(64, last)
    assert [engine.predict(*ids) for ids in (first, lost)] == [0, 0]
    assert (engine.counts["gaps"], engine.counts["cleared"]) == (1, 1)
    assert BlocksCleared() in engine.events


async def test_gap_without_a_replay_clears_the_view(make_engine) -> None:
    engine = make_engine(replay="")
    first, lost, last = ([*range(start, start + 65)] for start in (0, 100, 200))
    engine.publisher.publish(engine.compute(*first))
    engine.publisher.lose(engine.compute(*lost))
    engine.publisher.publish(engine.compute(*last))
    await engine.wait_for_prediction(64, last)
    assert [engine.predict(*ids) for ids in (first, lost)] == [0, 0]


async def test_reader_that_comes_late_asks_for_a_replay(make_engine) -> None:
    engine = make_engine(bind=False)
    ids = [*range(65)]
    engine.publisher.publish(engine.compute(*ids))
    await engine.wait_for_prediction(64, ids)
    late = KvEventReader(EngineBlocks(16), KvEventEndpoint(engine.address, engine.replay))
    late.blocks.listeners.append(engine.events.extend)
    late.open()
    await engine.wait_for(lambda: late.blocks.predict(pack_ids(ids)) == 64)
    await late.close()


@pytest.mark.parametrize("messages_before", [1, 5])
async def test_restarted_publisher_empties_the_view(make_engine, messages_before: int) -> None:
    engine = make_engine()
    old, new = [*range(65)], [*range(100, 165)]
    engine.publisher.publish(engine.compute(*old))
    await engine.wait_for_prediction(64, old)
    await asyncio.to_thread(engine.publisher.stop)
    engine.start_publisher()
    engine.cache.reset()
    engine.cache.drain()
    for _ in range(messages_before):
        engine.publisher.lose(engine.compute(*OTHER_IDS))
    engine.publisher.publish(engine.compute(*new))
    await engine.wait_for_prediction(64, new)
    assert engine.predict(*old) == 0
    assert engine.predict(*OTHER_IDS) == 64


async def test_gap_over_the_event_of_a_reset_does_not_blind_the_view(make_engine) -> None:
    engine = make_engine(replay="")
    old, new, later = ([*range(start, start + 65)] for start in (0, 100, 200))
    engine.publisher.publish(engine.compute(*old))
    await engine.wait_for_prediction(64, old)
    engine.reader.blocks.reset()
    engine.cache.reset()
    engine.publisher.lose(engine.cache.drain_payload())
    for ids in (new, later):
        engine.publisher.publish(engine.compute(*ids))
        await engine.wait_for_prediction(64, ids)
    assert engine.predict(*old) == 0


async def test_rebuild_corrects_a_wrong_view(make_engine) -> None:
    engine = make_engine()
    ids, wrong = [*range(65)], [*range(300, 365)]
    engine.publisher.publish(engine.compute(*ids))
    await engine.wait_for_prediction(64, ids)
    other = FakeEngineCache(STYLES["vllm_0.32"])
    other.compute(wrong)
    engine.publisher.send_raw(b"kv", (1).to_bytes(8, "big"), other.drain_payload())
    await engine.wait_for_prediction(64, wrong)
    engine.reader.rebuild()
    await engine.wait_for_prediction(0, wrong)
    await engine.wait_for_prediction(64, ids)


async def test_malformed_messages_are_counted_and_end_nothing(make_engine) -> None:
    engine = make_engine()
    ids = [*range(65)]
    engine.publisher.send_raw(b"")
    engine.publisher.send_raw(b"kv", b"123", b"")
    engine.publisher.send_raw(b"kv", b"\xff" * 8, b"")
    engine.publisher.publish(b"\xc1 is never used in msgpack")
    engine.publisher.publish(msgspec.msgpack.encode([1.0, [["BlockStored"], 7, {"type": []}]]))
    stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1}
    engine.publisher.publish(msgspec.msgpack.encode([1.0, [stored]]))
    engine.publisher.publish(engine.compute(*ids))
    await engine.wait_for_prediction(64, ids)
    assert (engine.counts["malformed"], engine.counts["damaged"]) == (3, 3)
    skipped = engine.reader.blocks.counts
    assert (skipped["malformed"], skipped["unknown"]) == (4, 1)


async def test_damaged_message_empties_the_view(make_engine) -> None:
    engine = make_engine()
    ids = [*range(65)]
    engine.publisher.publish(engine.compute(*ids))
    await engine.wait_for_prediction(64, ids)
    engine.publisher.publish(msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]))
    await engine.wait_for_prediction(0, ids)
    assert isinstance(engine.events[0], BlocksStored)
    assert engine.events[-1] == BlocksCleared()


async def test_ranks_have_their_own_ports() -> None:
    endpoint = KvEventEndpoint("tcp://127.0.0.1:5000", "tcp://127.0.0.1:6000", bind=True)
    assert endpoint.of_rank(2).address == "tcp://127.0.0.1:5002"
    assert endpoint.of_rank(2).replay == "tcp://127.0.0.1:6002"
    assert endpoint.of_rank(0) == endpoint


async def test_address_in_use_is_an_error(make_engine) -> None:
    engine = make_engine()
    second = KvEventReader(EngineBlocks(16), KvEventEndpoint(engine.address, bind=True))
    with pytest.raises(ConfigError, match="cannot be read from tcp://127"):
        second.open()
