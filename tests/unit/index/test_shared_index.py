"""Publishers, a shared indexer and routers on memory planes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.index.conftest import chain
from tests.unit.processes import Open
from tests.unit.router.fake_cluster import ENGINE

from dynamo.communication.requests import ResponseWriter
from dynamo.core.context import Context
from dynamo.core.settings import Settings
from dynamo.core.settings.schema import RuntimeSettings
from dynamo.core.settings.schema_router import DisaggregationSettings, IndexSettings, RouterSettings
from dynamo.core.values import BlocksStored
from dynamo.inference.kv_publisher import KVPublisher
from dynamo.models.card import BlockIdentity
from dynamo.runtime import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.runtime.distributed import DistributedRuntime
from dynamo.scheduling.index import CacheView
from dynamo.scheduling.index.removed_blocks import RemovedBlocks
from dynamo.services.cache_views import follow_kv_events, open_cache_view
from dynamo.services.indexer import IndexerService

PLANES = RuntimeSettings(
    discovery="memory:index", requests="memory:", events="memory:", namespace="ns"
)
SETTINGS = replace(Settings(runtime=PLANES), index=IndexSettings(shared=True))


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    async with await DistributedRuntime.create(SETTINGS) as opened:
        yield opened


async def until_exact(view: CacheView, *workers: str) -> None:
    async with asyncio.timeout(10):
        while any(view.get_mode(worker) != "exact" for worker in workers):
            await asyncio.sleep(0.01)


async def test_routers_share_one_indexer(runtime: DistributedRuntime) -> None:
    blocks = chain(1, 8)
    first = await KVPublisher.open(runtime.events, "ns.worker", "a", lambda: ())
    rank = await KVPublisher.open(runtime.events, "ns.worker", "b", lambda: (), rank=1)
    async with await DistributedRuntime.create(SETTINGS) as indexing:
        await IndexerService().attach(indexing)
        views = [await open_cache_view(runtime, 16, "ns.worker") for _ in range(2)]
        for view in views:
            assert view.remote_match is not None
            await until_exact(view, "a", "b/1")
        first.publish_stored(0, blocks)
        rank.publish_stored(0, blocks)
        rank.publish_removed(blocks[:4:-1])
        await asyncio.sleep(0)
        for view in views:
            await view.fetch_remote_match(blocks)
            assert view.find_overlaps(blocks) == {"a": 8, "b/1": 5}
            assert view.device_index.block_count == 0
    assert first.totals == {"stored": 8, "events": 1, "dumps": 1}


async def test_an_indexer_reports_removals_that_cost_prompts() -> None:
    disaggregation = DisaggregationSettings(mode="flexible")
    settings = replace(SETTINGS, router=RouterSettings(disaggregation=disaggregation))
    blocks = chain(1, 80)
    async with (
        await DistributedRuntime.create(settings) as router,
        await DistributedRuntime.create(settings) as indexing,
    ):
        worker = await KVPublisher.open(router.events, "ns.worker", "a", lambda: ())
        await IndexerService().attach(indexing)
        view = await open_cache_view(router, 16, "ns.worker")
        view.removed_blocks = removed = RemovedBlocks()
        await until_exact(view, "a")
        worker.publish_stored(0, blocks)
        worker.publish_removed(blocks[::-1])
        await asyncio.sleep(0)
        await view.fetch_remote_match(blocks)
        measured = removed.asked_share
        removed.on_prompt(blocks, 0.0)

        assert measured > 0.0
        assert removed.asked_share == measured


async def test_an_indexer_serves_tiers_too(runtime: DistributedRuntime) -> None:
    blocks = chain(1, 8)
    worker = await KVPublisher.open(runtime.events, "ns.worker", "a", lambda: ())
    async with await DistributedRuntime.create(SETTINGS) as indexing:
        await IndexerService().attach(indexing)
        view = await open_cache_view(runtime, 16, "ns.worker")
        await until_exact(view, "a")
        worker.publish_stored(0, blocks[:3])
        worker.publish_stored(blocks[2], blocks[3:6], "host")
        worker.publish_stored(blocks[4], blocks[5:], "shared")
        await asyncio.sleep(0)
        await view.fetch_remote_match(blocks)
        assert view.has_lower_tiers
        assert view.find_runs(blocks, {"a": 3}) == {"a": [("host", 3), ("shared", 2)]}
        view.on_request_routed("a", blocks[:7])
        assert view.find_runs(blocks, view.find_overlaps(blocks)) == {"a": [("shared", 1)]}


async def announced(open_runtime: Open, *, publishes: bool = True, **engine: object) -> str:
    """Serve a worker with these engine properties and return its id."""
    runtime = await open_runtime()
    if publishes:
        await KVPublisher.open(runtime.events, "dynamo.worker", runtime.instance_id, lambda: ())
    about = {"engine": ENGINE | engine}
    await runtime.endpoint("dynamo.worker.generate").serve(nothing, capabilities=about)
    return runtime.instance_id


async def nothing(payload: bytes, outgoing: ResponseWriter) -> None:
    del payload, outgoing


async def test_an_indexer_reports_the_mode_of_every_worker(open_runtime: Open) -> None:
    keeps = await announced(open_runtime)
    keeps_none = await announced(open_runtime, prefix_caching=False)
    silent = await announced(open_runtime, publishes=False)
    await IndexerService().attach(await open_runtime())
    client = await (await open_runtime()).endpoint("dynamo.indexer.modes").client()
    reported: dict[str, str] = {}
    async with asyncio.timeout(10):
        await client.wait_for_instances()
        while reported.get(keeps) != "exact":
            reported = await modes(client)
    assert reported == {keeps: "exact", keeps_none: "no prefix cache", silent: "approximate"}


async def modes(client: Client) -> dict[str, str]:
    answer = bytearray()

    def take(part: bytes) -> bool:
        answer.extend(part)
        return True

    await client.call(client.pick("round_robin"), b"", Context("modes"), take)
    return msgspec.msgpack.decode(answer, type=dict[str, str])


async def test_without_an_indexer_predictions_are_used(runtime: DistributedRuntime) -> None:
    blocks = chain(1, 8)
    view = await open_cache_view(runtime, 16, "ns.worker")
    await view.fetch_remote_match(blocks)
    assert view.find_overlaps(blocks) == {}
    view.on_request_routed("a", blocks)
    view.on_prefill_ended("a", blocks)
    assert view.get_mode("a") == "approximate"
    assert view.find_overlaps(blocks) == {"a": 8}


async def test_a_large_dump_is_applied_in_short_turns(runtime: DistributedRuntime) -> None:
    chains = [tuple(chain(number, 500)) for number in range(200)]
    held = [BlocksStored(0, blocks) for blocks in chains]
    publisher = await KVPublisher.open(runtime.events, "ns.worker", "a", lambda: held)
    view = CacheView(runtime.clock)
    await view.subscribe(runtime.events, "ns.worker.kv_events")
    turns = 0
    async with asyncio.timeout(10):
        while not view.event_counts["dump"]:
            await asyncio.sleep(0)
        publisher.publish_removed(chains[0][::-1])
        while view.device_index.block_count < 199 * 500 or view.event_counts["removed"] < 500:
            turns += 1
            await asyncio.sleep(0)
    assert turns > 2
    assert view.find_overlaps(chains[0]) == {}
    assert view.find_overlaps(chains[199]) == {"a": 500}
    view.close()


async def test_events_are_published_on_separate_subjects(runtime: DistributedRuntime) -> None:
    subjects: list[str] = []
    received = asyncio.Event()

    def on_event(event: object) -> None:
        subjects.append(event.subject)  # type: ignore[attr-defined]
        received.set()

    await runtime.events.subscribe("ns.worker.kv_removed", on_event)
    publisher = await KVPublisher.open(
        runtime.events, "ns.worker", "a", lambda: (), separate_subjects=True
    )
    publisher.publish_stored(0, chain(1, 2))
    publisher.publish_removed(chain(1, 2))
    await received.wait()
    await publisher.close()
    assert subjects[0] == "ns.worker.kv_removed"


@pytest.mark.parametrize(
    ("card", "difference"),
    [
        ({}, ""),
        ({"tokenizer": "t", "block_tokens": 16, "hashing": "h"}, ""),
        ({"block_tokens": 32}, "block tokens 32 instead of 16"),
        (
            {"tokenizer": "u", "hashing": "i"},
            "tokenizer 'u' instead of 't', hashing 'i' instead of",
        ),
    ],
)
def test_differences_are_described(card: dict[str, object], difference: str) -> None:
    ours = BlockIdentity("t", 16, "h")
    described = ours.describe_differences(BlockIdentity(**card))  # type: ignore[arg-type]
    assert described.startswith(difference)
    assert bool(described) == bool(difference)


def test_an_incompatible_worker_is_refused_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from dynamo.models.card import ModelCard
    from dynamo.models.file_cache import FileRef
    from dynamo.services.catalogue import CardCompatibility

    compatibility = CardCompatibility(
        ModelCard(("m",), 99, 9, FileRef("tokenizer.json", "t", 1, ""))
    )

    def instance(**blocks: object) -> Instance:
        return Instance("i", "a", "ns", "worker", "generate", {"model": "m", "blocks": blocks})

    assert compatibility.accepts(instance(tokenizer="t", block_tokens=16))
    assert not caplog.records
    assert not compatibility.accepts(instance(tokenizer="t", block_tokens=32))
    assert not compatibility.accepts(instance(tokenizer=7))
    assert caplog.text.count("worker refused") == 2
    assert not compatibility.accepts(replace(instance(), capabilities={"model": "other"}))


async def test_events_of_another_model_are_not_followed(runtime: DistributedRuntime) -> None:
    views = {model: CacheView(runtime.clock) for model in ("org/qwen", "org/qwen-small", "")}
    for model, view in views.items():
        await follow_kv_events(runtime, view, "ns.worker", model)
    for model in ("org/qwen-small", "org/qwen"):
        publisher = await KVPublisher.open(
            runtime.events, "ns.worker", f"worker of {model}", lambda: (), model=model
        )
        publisher.publish_stored(0, chain(1, 8))
    await until_exact(views[""], "worker of org/qwen", "worker of org/qwen-small")
    await until_exact(views["org/qwen"], "worker of org/qwen")
    await until_exact(views["org/qwen-small"], "worker of org/qwen-small")

    assert list(views["org/qwen"].get_modes()) == ["worker of org/qwen"]
    assert list(views["org/qwen-small"].get_modes()) == ["worker of org/qwen-small"]


async def test_an_indexer_knows_the_caches_of_each_model_apart(
    runtime: DistributedRuntime, tmp_path: Path
) -> None:
    blocks = chain(1, 8)
    index = replace(SETTINGS.index, file=str(tmp_path / "index.bin"))
    publishers = {}
    for model in ("org/qwen", "small", ""):
        publisher = await KVPublisher.open(
            runtime.events, "ns.worker", f"of {model}", lambda: (), model=model
        )
        publishers[model] = publisher
    async with await DistributedRuntime.create(replace(SETTINGS, index=index)) as indexing:
        await IndexerService().attach(indexing)
        views = {
            model: await open_cache_view(runtime, 16, "ns.worker", model)
            for model in ("org/qwen", "small", "")
        }
        for model, view in views.items():
            await until_exact(view, f"of {model}")
        for count, publisher in enumerate(publishers.values(), 3):
            publisher.publish_stored(0, blocks[:count])
        await asyncio.sleep(0)

        async def overlaps(model: str) -> dict[str, int]:
            await views[model].fetch_remote_match(blocks)
            return views[model].find_overlaps(blocks)

        former = {"of ": 5}
        assert await overlaps("org/qwen") == {"of org/qwen": 3} | former
        assert await overlaps("small") == {"of small": 4} | former
        assert await overlaps("") == {"of org/qwen": 3, "of small": 4} | former
        assert views["small"].get_modes() == {"of small": "exact", "of ": "exact"}
    for publisher in publishers.values():
        await publisher.close()

    async with await DistributedRuntime.create(replace(SETTINGS, index=index)) as indexing:
        service = IndexerService()
        await service.attach(indexing)  # the saved index has the workers of all models
        async with asyncio.timeout(10):
            while await overlaps("small") != {"of org/qwen": 3, "of small": 4} | former:
                await asyncio.sleep(0.01)
        again = await KVPublisher.open(
            runtime.events, "ns.worker", "of small", lambda: (), model="small"
        )
        async with asyncio.timeout(10):
            while (await overlaps("small")).get("of small"):
                await asyncio.sleep(0.01)  # until its present state replaces the restored one
        await again.close()
