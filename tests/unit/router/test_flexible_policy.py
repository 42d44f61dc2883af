"""In mode flexible, the router learns from KV events what removed blocks cost."""

from __future__ import annotations

import asyncio

import msgspec
from msgspec.structs import replace
from tests.unit.processes import Open

from dynamo.core.settings.schema_router import DisaggregationSettings
from dynamo.core.values import BlocksRemoved, BlocksStored
from dynamo.scheduling.router.factory import open_policy
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.workers.ledger import Ledger


async def test_removed_blocks_are_remembered_in_mode_flexible(open_runtime: Open) -> None:
    router = await open_runtime()
    client = await router.endpoint("dynamo.worker.generate").client()
    settings = router.settings.router
    policy = await open_policy(
        PolicyInputs(
            settings,
            client,
            router.events,
            router.clock,
            Ledger(router.clock, client),
            block_tokens=16,
        )
    )
    assert isinstance(policy, KvPolicy)
    view = policy.solver.view
    assert view.removed_blocks is None

    flexible = DisaggregationSettings(mode="flexible")
    policy.update_settings(replace(settings, disaggregation=flexible))
    removed = view.removed_blocks
    assert removed is not None
    chain = tuple(range(1, 81))
    worker = await open_runtime()
    source = await worker.events.open_source("dynamo.worker.kv_events", "w")
    source.publish(msgspec.msgpack.encode([BlocksStored(0, chain)]))
    source.publish(msgspec.msgpack.encode([BlocksRemoved(chain)]))
    while view.event_counts["removed"] < len(chain):
        await asyncio.sleep(0)
    removed.on_prompt(chain, 0.0)
    assert removed.asked_share > 0.0

    policy.update_settings(settings)
    assert view.removed_blocks is None
    await policy.close()
