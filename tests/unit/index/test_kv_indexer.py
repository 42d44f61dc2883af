"""The library interface: a publisher, an indexer and an aggregator in a user program."""

from __future__ import annotations

import asyncio

from dynamo.core.codec import pack_ids
from dynamo.core.hashing import block_hashes
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.core.values import Load
from dynamo.inference import KVPublisher
from dynamo.inference.load_publisher import encode_load
from dynamo.runtime import DistributedRuntime
from dynamo.scheduling.router import KVIndexer, KvMetricsAggregator

PLANES = RuntimeSettings(discovery="memory:indexer", requests="memory:", events="memory:")


async def test_events_and_loads_of_user_workers() -> None:
    tokens = list(range(64))
    async with await DistributedRuntime.create(Settings(runtime=PLANES)) as runtime:
        component = runtime.namespace("dynamo").component("mine")
        async with KVIndexer(component) as indexer, KvMetricsAggregator(component) as metrics:
            publisher = await KVPublisher.open(runtime.events, "dynamo.mine", "w1", lambda: ())
            load = await runtime.events.open_source("dynamo.mine.load_metrics", "w1")
            other = await runtime.events.open_source("dynamo.mine.load_metrics", "w2")
            async with asyncio.timeout(10):
                while indexer.workers() != {"w1": "exact"}:
                    await asyncio.sleep(0)
            publisher.publish_stored(0, block_hashes(pack_ids(tokens))[:3])
            load.publish(encode_load(Load(running=2, waiting=1)))
            other.publish(encode_load(Load(running=3)))
            async with asyncio.timeout(10):
                while len(metrics.workers()) < 2 or not indexer.find_matches(tokens):
                    await asyncio.sleep(0)
            assert indexer.find_matches(tokens) == {"w1": 48}
            assert indexer.find_matches(tokens, salt="tenant") == {}
            assert metrics.total() == Load(running=5, waiting=1)
