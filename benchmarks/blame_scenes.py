"""Scenes of benchmarks/blame.py: functions that inject one cause of slow requests, or two at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from blame_client import BLOCKS, PAUSE_S, SLOTS, Client
from tests.support.servers import NatsProcess, S3Process, ServerProcess


async def long_prompt(client: Client) -> None:
    """A long prompt at each worker, and short ones behind it."""
    ahead = client.start_long()
    await asyncio.sleep(PAUSE_S)
    await client.burst("v", 3 * client.size.workers)
    await asyncio.gather(*ahead)


async def overload(client: Client) -> None:
    """Many requests at once."""
    await client.burst("v", 5 * SLOTS * client.size.workers)


async def frozen(client: Client) -> None:
    """A worker stands still, with requests in flight."""
    await _signal_worker(client, signal.SIGSTOP)


async def killed(client: Client) -> None:
    """A worker is killed, with requests in flight, and the others are full."""
    await _signal_worker(client, signal.SIGKILL)


async def _signal_worker(client: Client, number: signal.Signals, load: int = SLOTS) -> None:
    size = client.size
    burst = asyncio.create_task(client.burst("v", load * size.workers))
    await asyncio.sleep(2 * PAUSE_S)
    await client.signal_one("worker", number)
    await burst
    await client.wait_for_workers()


async def stalled(client: Client) -> None:
    """The frontend stands still for less time than the supervisor allows."""
    burst = asyncio.create_task(client.burst("v", 20))
    await _stall(client)
    await burst


async def _stall(client: Client) -> None:
    await asyncio.sleep(PAUSE_S)
    frontend = await client.signal_one("frontend", signal.SIGSTOP)
    await asyncio.sleep(0.8)
    os.kill(frontend, signal.SIGCONT)
    await asyncio.sleep(1.0)


async def evicted(client: Client) -> None:
    """Prompts come again after others have taken their blocks."""
    prompts = await client.cache()
    await client.fill_caches()
    for prompt in prompts:
        await client.send("v", prompt)


async def salted(client: Client) -> None:
    """Cached prompts come again with another salt."""
    for prompt in await client.cache(2):
        await client.send("v", prompt, cache_salt=f"salt {client.rng.random()}")


async def slow_client(client: Client) -> None:
    """Clients do not read for a while. The answers are long, so that buffers fill."""
    await client.burst("v", 6, read_after_s=3.5, stream=True)


async def plane_away(client: Client) -> None:
    """The server of the request plane stands still, with answers on their way."""
    service = _service_of(client)
    burst = asyncio.create_task(client.burst("v", 10))
    await asyncio.sleep(PAUSE_S)
    await asyncio.to_thread(service.signal, signal.SIGSTOP)
    late = asyncio.create_task(client.burst("v", 10))
    await asyncio.sleep(2.5)
    await asyncio.to_thread(service.signal, signal.SIGCONT)
    await asyncio.gather(burst, late)
    await asyncio.sleep(7.0)  # calls go directly for 5 s


async def stale_index(client: Client) -> None:
    """Prompts come again after others took their blocks, of which no event tells the router."""
    service = _service_of(client)
    prompts = await client.cache()
    await asyncio.sleep(0.5)
    await asyncio.to_thread(service.signal, signal.SIGSTOP)
    await client.fill_caches()
    for prompt in prompts:
        await client.send("v", prompt)
    await asyncio.to_thread(service.signal, signal.SIGCONT)
    await asyncio.sleep(1.0)


async def slow_tier(client: Client) -> None:
    """The object store stands still while blocks of prompts are loaded from it."""
    await _load_slowly(client)


async def _load_slowly(client: Client, others: int = 0) -> None:
    service = _service_of(client)
    prompts = await client.cache(2)  # blocks that are used again are worth a place in the store
    await client.fill_caches()
    await asyncio.sleep(2.0)  # blocks go to the store in the background
    for prompt in prompts:
        await asyncio.to_thread(service.signal, signal.SIGSTOP)
        burst = asyncio.create_task(client.burst("x", others))
        await asyncio.sleep(PAUSE_S)
        again = asyncio.create_task(client.send("v", prompt))
        await asyncio.sleep(1.8 if others else 0.8)
        await asyncio.to_thread(service.signal, signal.SIGCONT)
        await asyncio.gather(burst, again)


async def slow_transfer(client: Client) -> None:
    """Pulls between workers take longer for a while."""
    client.delay.write_text("0.6")
    for _ in range(4):
        await client.burst("v", 4)
    client.delay.unlink()


async def salted_behind(client: Client) -> None:
    """Cached prompts come with another salt, behind a long prompt at each worker."""
    for prompt in await client.cache(2):
        ahead = client.start_long()
        await asyncio.sleep(PAUSE_S)
        await client.send("v", prompt, cache_salt=f"salt {client.rng.random()}")
        await asyncio.gather(*ahead)


async def evicted_behind(client: Client) -> None:
    """Evicted prompts come again, behind a long prompt at each worker."""
    prompts = await client.cache()
    await client.fill_caches()
    for prompt in prompts:
        ahead = client.start_long()
        await asyncio.sleep(PAUSE_S)
        await client.send("v", prompt)
        await asyncio.gather(*ahead)


async def killed_overloaded(client: Client) -> None:
    """A worker is killed while twice as many requests are there as have a place."""
    await _signal_worker(client, signal.SIGKILL, 2 * SLOTS)


async def frozen_behind(client: Client) -> None:
    """A worker stands still, and short requests wait there behind a long prompt."""
    ahead = client.start_long()
    await asyncio.sleep(PAUSE_S)
    burst = asyncio.create_task(client.burst("v", 6 * client.size.workers))
    await asyncio.sleep(PAUSE_S)
    await client.signal_one("worker", signal.SIGSTOP)
    await asyncio.gather(burst, *ahead)
    await client.wait_for_workers()


async def slow_tier_overloaded(client: Client) -> None:
    """The object store stands still, and many requests come at once."""
    await _load_slowly(client, 2 * SLOTS * client.size.workers)


async def stalled_slow_client(client: Client) -> None:
    """The frontend stands still, and then clients do not read for a while."""
    burst = asyncio.create_task(client.burst("v", 6, read_after_s=4.5, stream=True))
    await _stall(client)
    await burst


async def plane_away_killed(client: Client) -> None:
    """The server of the request plane stands still, then a worker is killed."""
    service = _service_of(client)
    size = client.size
    burst = asyncio.create_task(client.burst("v", 4 * size.workers))
    await asyncio.sleep(PAUSE_S)
    await asyncio.to_thread(service.signal, signal.SIGSTOP)
    await asyncio.sleep(1.6)
    await client.signal_one("worker", signal.SIGKILL)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(service.signal, signal.SIGCONT)
    await burst
    await client.wait_for_workers()
    await asyncio.sleep(7.0)


def _service_of(client: Client) -> ServerProcess:
    assert client.service is not None
    return client.service


class Scenario(NamedTuple):
    """How causes are injected, their names, flags of the deployment, and the server that it needs.
    The verdict must name one cause first, and two among the first two. `needs_moves`: both causes
    hit only requests that moved so often to another worker; of others, the first cause must be one of both. `needs_blocks`: requests that waited
    for no KV blocks do not count: their prompts were not in the tier. `answers`: those of requests that may be hit are so many
    times as long."""

    inject: Callable[[Client], Awaitable[None]]
    causes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    service: Callable[[], ServerProcess] | None = None
    timing: tuple[float, float] | None = None
    answers: int = 1
    needs_moves: int = 0
    needs_blocks: bool = False


FULL = ("--num-blocks", str(BLOCKS))
FEW = ("--max-num-seqs", str(SLOTS))
TCP_REQUESTS = ("--request-plane", "tcp://127.0.0.1:0")
"""With NATS for events alone."""
TIER = (*FULL, "--kv-remote-url", "s3://kv-blocks/blame")
DISAGGREGATED = (
    *("--prefill-workers", "1", "--disagg", "always", "--transfer-plane", "tcp://127.0.0.1:0"),
)
SLOW_PROMPTS = (0.5, 5.0)
"""A prompt is loaded from the store, since computing it takes longer."""

SCENARIOS = {
    "frozen": Scenario(frozen, ("frozen worker",), FEW, answers=3),
    "killed": Scenario(killed, ("lost worker",), FEW, answers=3),
    "long_prompt": Scenario(long_prompt, ("long prompt ahead",)),
    "overload": Scenario(overload, ("overload",), FEW),
    "evicted": Scenario(evicted, ("eviction",), FULL),
    "salted": Scenario(salted, ("wrong salt",)),
    "stale_index": Scenario(stale_index, ("stale index",), (*FULL, *TCP_REQUESTS), NatsProcess),
    "slow_transfer": Scenario(slow_transfer, ("slow transfer",), DISAGGREGATED),
    "slow_tier": Scenario(
        slow_tier, ("slow tier",), TIER, S3Process, SLOW_PROMPTS, needs_blocks=True
    ),
    "slow_client": Scenario(slow_client, ("slow client",), timing=(0.1, 0.2), answers=170),
    "stalled": Scenario(stalled, ("stalled loop",)),
    "plane_away": Scenario(plane_away, ("plane away",), (), NatsProcess),
    "salted_behind": Scenario(salted_behind, ("long prompt ahead", "wrong salt")),
    "evicted_behind": Scenario(evicted_behind, ("long prompt ahead", "eviction"), FULL),
    "killed_overloaded": Scenario(
        killed_overloaded, ("lost worker", "overload"), FEW, answers=3, needs_moves=1
    ),
    "frozen_behind": Scenario(frozen_behind, ("frozen worker", "long prompt ahead"), needs_moves=1),
    "slow_tier_overloaded": Scenario(
        slow_tier_overloaded,
        ("slow tier", "overload"),
        (*TIER, *FEW),
        S3Process,
        SLOW_PROMPTS,
        needs_blocks=True,
    ),
    "stalled_slow_client": Scenario(
        stalled_slow_client, ("stalled loop", "slow client"), timing=(0.1, 0.2), answers=170
    ),
    "plane_away_killed": Scenario(
        plane_away_killed,
        ("plane away", "lost worker"),
        (),
        NatsProcess,
        answers=8,
        needs_moves=2,
    ),
}
