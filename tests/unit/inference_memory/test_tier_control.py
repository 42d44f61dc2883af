"""The endpoint `kv` of a worker, its metrics, and the table of `dynamo kv`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.unit.inference_disaggregation.pair import make_request
from tests.unit.inference_tiers.blocks import ManualClock

from dynamo.cli.workers.kv import (
    describe_pin,
    format_bytes,
    format_tiers_json,
    format_tiers_table,
    run,
)
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, InvalidRequest, NotFound, ProtocolError
from dynamo.core.settings.schema_cache import CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.memory.tier_control import (
    KvAnswer,
    KvControl,
    KvRequest,
    PinRequest,
    declare_tier_metrics,
    decode_kv_answer,
)
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.telemetry.metrics import Registry
from dynamo.testing.fakes import CollectedReply


class Outgoing:
    """Collects the payloads of an answer."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, payload: bytes) -> bool:
        self.sent.append(payload)
        return True


@pytest.fixture
async def engine() -> AsyncIterator[BatchedEngine]:
    """A mock engine of 8 blocks with a host tier, whose first prompt has gone down to it."""
    settings = EngineSettings(kind="mock", block_size=4, num_blocks=8, speedup_ratio=1000.0)
    engine = make_mock_engine(
        settings,
        range(100, 900),
        SystemClock(),
        context_tokens=32,
        vocab_size=1000,
        layout="mock",
        cache=CacheSettings(cpu_size=1 << 30),
    )
    await engine.start()
    for first in (0, 100, 200, 0):
        request = make_request(range(first, first + 24), prefill="", max_tokens=1)
        await engine.generate(request, Context("r"), CollectedReply())
        async with asyncio.timeout(5):
            while engine.tiers.storing:
                await asyncio.sleep(0.001)
    yield engine
    await engine.stop()


async def call(control: KvControl, request: KvRequest) -> KvAnswer:
    outgoing: Any = Outgoing()
    await control.handle(msgspec.msgpack.encode(request), outgoing)
    return decode_kv_answer(b"".join(outgoing.sent))


async def test_the_state_of_each_tier_is_shown(engine: BatchedEngine) -> None:
    control = KvControl([engine], SystemClock())
    device, host = (await call(control, KvRequest())).tiers

    assert (device.tier, device.capacity_blocks, host.tier) == ("device", 8, "host")
    assert device.blocks == engine.scheduler.pool.cached
    assert host.stored >= 6
    assert host.blocks == engine.tiers.tiers[0].blocks
    assert device.evicted > 0
    assert host.load_ms > 0


async def test_a_tier_is_emptied_alone_or_with_all(engine: BatchedEngine) -> None:
    control, tiers = KvControl([engine], SystemClock()), engine.tiers
    assert tiers is not None
    count, cached = tiers.tiers[0].blocks, engine.scheduler.pool.cached
    assert (await call(control, KvRequest("host"))).cleared == count > 0
    assert (tiers.tiers[0].blocks, engine.scheduler.pool.cached) == (0, cached)
    assert (await call(control, KvRequest("all"))).cleared == cached
    assert engine.scheduler.pool.cached == 0
    with pytest.raises(NotFound, match="no tier 'disk'") as caught:
        await call(control, KvRequest("disk"))
    assert "host" in caught.value.hint
    outgoing: Any = Outgoing()
    with pytest.raises(ProtocolError):
        await control.handle(b"x", outgoing)


def pin_request(first: int, **fields: Any) -> KvRequest:
    request = make_request(range(first, first + 24), prefill="", max_tokens=1)
    return KvRequest(pin=PinRequest("host", request.token_ids, **fields))


async def test_a_pinned_prompt_stays_in_host_memory_until_its_pin_ends(
    engine: BatchedEngine,
) -> None:
    clock = ManualClock()
    host = engine.tiers.tiers[0]
    assert host.pins is not None
    host.pins._clock = clock
    control = KvControl([engine], SystemClock())
    answer = await call(control, pin_request(0, ttl_s=60.0))
    (_, status) = answer.tiers
    (pin,) = status.pins
    assert (pin.pin, pin.blocks, pin.ttl_s, status.pinned_blocks) == (answer.pin, 6, 60.0, 6)
    assert describe_pin(answer, "host").endswith("ends in 60 s")
    clock.time_s += 59
    assert (await call(control, pin_request(0))).pin == answer.pin  # now without end
    clock.time_s += 2
    assert len(host.pins) == 6
    other = (await call(control, pin_request(100))).pin
    assert len((await call(control, KvRequest())).tiers[1].pins) == 2
    assert (await call(control, KvRequest(unpin=other))).unpinned == 1
    assert (await call(control, KvRequest(unpin="all"))).unpinned == 1
    assert (await call(control, KvRequest(unpin="all"))).unpinned == 0
    with pytest.raises(NotFound, match="no pin"):
        await call(control, KvRequest(unpin=other))
    await call(control, pin_request(0, ttl_s=5.0))
    clock.time_s += 6
    assert not (await call(control, KvRequest())).tiers[1].pinned_blocks


async def test_what_the_device_holds_goes_down_with_its_pin(engine: BatchedEngine) -> None:
    host = engine.tiers.tiers[0]
    control = KvControl([engine], SystemClock())
    await call(control, KvRequest("host"))
    answer = await call(control, pin_request(0))  # the prompt that was computed last
    async with asyncio.timeout(5):
        while engine.tiers.storing:
            await asyncio.sleep(0.001)
    assert host.blocks == (await call(control, KvRequest())).tiers[1].pins[0].held == 6
    assert answer.pin


async def test_a_prompt_that_cannot_be_pinned_is_refused(engine: BatchedEngine) -> None:
    control, host = KvControl([engine], SystemClock()), engine.tiers.tiers[0]
    ids = make_request(range(3), prefill="", max_tokens=1).token_ids
    with pytest.raises(InvalidRequest, match="has 3 tokens, and a block has 4"):
        await call(control, KvRequest(pin=PinRequest("host", ids)))
    with pytest.raises(NotFound, match="tier 'shared'") as caught:
        await call(control, KvRequest(pin=PinRequest("shared", ids)))
    assert "host" in caught.value.hint
    assert host.pins is not None
    host.pins.limit = 7
    await call(control, pin_request(0))
    with pytest.raises(InvalidRequest, match="12 blocks would be pinned, of which 6"):
        await call(control, pin_request(100))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pin", "host"], "needs one prompt"),
        (["pin", "host", "a", "--prompt-file", "b"], "needs one prompt"),
        (["pin", "host", "a", "--ttl", "soon"], "--ttl soon: wanted a duration"),
        (["pin", "host", "--prompt-file", "/nowhere/x"], "/nowhere/x cannot be read"),
        (["unpin"], "`unpin` needs a target"),
    ],
)
def test_a_wrong_command_line_is_explained(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(words)


async def test_metrics_are_summed_over_the_ranks(engine: BatchedEngine) -> None:
    registry, control = Registry(), KvControl([engine, engine], SystemClock())
    declare_tier_metrics(registry, control)
    lines = dict(line.rsplit(" ", 1) for line in registry.render().splitlines() if line[:1] != "#")

    blocks = 2 * engine.tiers.tiers[0].blocks
    assert float(lines['dynamo_worker_tier_blocks{tier="host"}']) == blocks
    assert float(lines['dynamo_worker_tier_up_ratio{tier="host"}']) == 1
    assert not any("device" in line for line in lines)


async def test_the_command_prints_a_table_and_json(engine: BatchedEngine) -> None:
    answers = {"worker-1-0123456789": await call(KvControl([engine], SystemClock()), KvRequest())}
    title, device, host = format_tiers_table(answers).splitlines()

    assert title.split()[:3] == ["WORKER", "TIER", "BLOCKS"]
    assert device.split()[:2] == ["worker-1-0123456789", "device"]
    assert host.split()[1] == "host"
    ranked = {"w": await call(KvControl([engine, engine], SystemClock()), KvRequest())}
    names = [line.split()[0] for line in format_tiers_table(ranked).splitlines()[1:]]
    assert names == ["w/0", "w/0", "w/1", "w/1"]
    rows = json.loads(format_tiers_json(answers))
    assert [row["tier"] for row in rows] == ["device", "host"]
    assert rows[0]["worker"] == "worker-1-0123456789"
    sizes = [format_bytes(size) for size in (0, 999, 12_700, 3e9, 5e13)]
    assert sizes == ["0 B", "999 B", "12.7 kB", "3 GB", "50 TB"]
