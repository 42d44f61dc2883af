"""Scenes of benchmarks/blame.py: functions that inject one cause of slow requests, or two at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from blame_client import PAUSE_S, Client
from tests.support.servers import NatsProcess, S3Process, ServerProcess


async def long_prompt(client: Client) -> None:
    """A long prompt at each worker, and short ones behind it."""
    ahead = client.start_long()
    await asyncio.sleep(PAUSE_S)
    await client.burst("v", 6 * client.size.workers)
    await asyncio.gather(*ahead)


async def overload(client: Client) -> None:
    """Many requests at once."""
    await client.burst("v", (1 if client.calm else 3 * client.size.slots) * client.size.workers)


async def frozen(client: Client) -> None:
    """A worker stands still, with requests in flight."""
    await _signal_worker(client, signal.SIGSTOP)


async def killed(client: Client) -> None:
    """A worker is killed, with requests in flight, and the others are full."""
    await _signal_worker(client, signal.SIGKILL)


async def _signal_worker(client: Client, number: signal.Signals, loads: float = 1) -> None:
    burst = asyncio.create_task(
        client.burst("v", int(loads * client.size.slots * client.size.workers))
    )
    await asyncio.sleep(2 * PAUSE_S)
    await client.signal_one("worker", number)
    await burst
    await client.wait_for_workers()


async def stalled(client: Client) -> None:
    """The frontend stands still for less time than the supervisor allows."""
    burst = asyncio.create_task(client.burst("v", 40))
    await _stall(client)
    await burst


async def _stall(client: Client, after_s: float = PAUSE_S) -> None:
    await asyncio.sleep(after_s)
    frontend = await client.signal_one("frontend", signal.SIGSTOP)
    await asyncio.sleep(0.8)
    os.kill(frontend, signal.SIGCONT)
    await asyncio.sleep(1.0)


async def evicted(client: Client) -> None:
    """Prompts come again after others have taken their blocks."""
    for prompt in await client.next_prompts(12):
        await client.send("v", prompt, tokens=FEW_TOKENS)


async def salted(client: Client) -> None:
    """Cached prompts come again with other salts."""
    prompts = client.prompts(0.3)[:2]
    await client.send_all(prompts, tokens=1)
    for prompt in prompts * 6:
        await client.send("v", prompt, tokens=FEW_TOKENS, **_salt(client))


def _salt(client: Client) -> dict[str, Any]:
    return {} if client.calm else {"cache_salt": f"salt {client.rng.random()}"}


async def slow_client(client: Client) -> None:
    """Clients do not read for a while. The answers are long, so that buffers fill."""
    await client.burst("v", 16, read_after_s=0.0 if client.calm else 3.5, stream=True)


async def plane_away(client: Client) -> None:
    """The server of the request plane stands still, with answers on their way."""
    burst = asyncio.create_task(client.burst("v", 20))
    await asyncio.sleep(PAUSE_S)
    await client.signal_service(signal.SIGSTOP)
    late = asyncio.create_task(client.burst("v", 20))
    await asyncio.sleep(0.0 if client.calm else 2.5)
    await client.signal_service(signal.SIGCONT)
    await asyncio.gather(burst, late)
    await asyncio.sleep(0.0 if client.calm else 7.0)  # calls go directly for 5 s


async def stale_index(client: Client) -> None:
    """Prompts come again after others took their blocks, of which no event tells the router."""
    prompts = client.prompts(0.3 if client.calm else 0.7)
    await client.send_all(prompts, tokens=1)
    await asyncio.sleep(0.3)
    if not client.calm:
        await client.signal_service(signal.SIGSTOP)
        await client.send_all(client.prompts(1.4), tokens=1)
    for prompt in prompts:
        await client.send("v", prompt, tokens=FEW_TOKENS)
    await client.signal_service(signal.SIGCONT)
    await asyncio.sleep(0.5)


async def slow_tier(client: Client) -> None:
    """The object store stands still while blocks of prompts are loaded from it."""
    await _load_slowly(client)


async def _load_slowly(client: Client, others: int = 0) -> None:
    prompts = await client.next_prompts(len(client.prompts(0.6)))  # all fit at once
    await client.signal_service(signal.SIGSTOP)
    burst = asyncio.create_task(client.burst("x", 0 if client.calm else others))
    await asyncio.sleep(PAUSE_S)
    again = [asyncio.create_task(client.send("v", prompt, tokens=FEW_TOKENS)) for prompt in prompts]
    await asyncio.sleep(0.0 if client.calm else 1.8 if others else 0.8)
    await client.signal_service(signal.SIGCONT)
    await asyncio.gather(burst, *again)


async def slow_transfer(client: Client) -> None:
    """Pulls between workers take longer for a while."""
    if not client.calm:
        client.delay.write_text("0.6")
    for _ in range(4):
        await client.burst("v", 4)
    client.delay.unlink(missing_ok=True)


async def salted_behind(client: Client) -> None:
    """Cached prompts come with another salt, behind a long prompt at each worker."""
    prompts = [client.words(client.size.cached) for _ in client.each_worker()]
    await client.send_all(prompts * 2, tokens=1)
    for _ in range(5):
        await _send_behind(client, prompts, **_salt(client))


async def evicted_behind(client: Client) -> None:
    """Evicted prompts come again, behind a long prompt at each worker."""
    await _send_behind(client, await client.next_prompts(client.size.workers))


async def _send_behind(client: Client, prompts: list[str], **body: Any) -> None:
    ahead = client.start_long()
    await asyncio.sleep(PAUSE_S)
    await asyncio.gather(
        *(client.send("v", prompt, tokens=FEW_TOKENS, **body) for prompt in prompts), *ahead
    )


async def killed_overloaded(client: Client) -> None:
    """A worker is killed while twice as many requests are there as have a place."""
    await _signal_worker(client, signal.SIGKILL, 0.5 if client.calm else 2)


async def frozen_behind(client: Client) -> None:
    """A worker stands still, and short requests wait there behind a long prompt."""
    ahead = client.start_long()
    await asyncio.sleep(PAUSE_S)
    burst = asyncio.create_task(client.burst("v", 12 * client.size.workers))
    await asyncio.sleep(PAUSE_S)
    await client.signal_one("worker", signal.SIGSTOP)
    await asyncio.gather(burst, *ahead)
    await client.wait_for_workers()


async def slow_tier_overloaded(client: Client) -> None:
    """The object store stands still, and many requests come at once."""
    await _load_slowly(client, 2 * client.size.slots * client.size.workers)


async def stalled_slow_client(client: Client) -> None:
    """The frontend stands still near the end of answers, and clients do not read for a while."""
    read_after_s = 0.0 if client.calm else 4.5
    answer_s = client.size.answer * LONG_ANSWER * QUICK_STEPS[1] * 1e-3
    burst = asyncio.create_task(client.burst("v", 12, read_after_s=read_after_s, stream=True))
    await _stall(client, 0.7 * answer_s)
    await burst


async def plane_away_killed(client: Client) -> None:
    """The server of the request plane stands still, then a worker is killed."""
    burst = asyncio.create_task(client.burst("v", 16 * client.size.workers))
    await asyncio.sleep(PAUSE_S)
    await client.signal_service(signal.SIGSTOP)
    await asyncio.sleep(0.0 if client.calm else 1.6)
    await client.signal_one("worker", signal.SIGKILL)
    await asyncio.sleep(0.0 if client.calm else 1.0)
    await client.signal_service(signal.SIGCONT)
    await burst
    await client.wait_for_workers()
    await asyncio.sleep(0.0 if client.calm else 7.0)


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


FEW_TOKENS = 5
"""The tokens of an answer where the prompt matters."""
FULL = ("--num-blocks", "{blocks}")
"""Small caches: `CACHE_TOKENS` in blocks of the scene's size."""
FEW = ("--max-num-seqs", "{slots}")
TCP_REQUESTS = ("--request-plane", "tcp://127.0.0.1:0")
"""With NATS for events alone."""
TIER = (*FULL, "--kv-remote-url", "s3://kv-blocks/blame")
DISAGGREGATED = (
    *("--prefill-workers", "1", "--disagg", "always", "--transfer-plane", "tcp://127.0.0.1:0"),
)
QUICK_STEPS, LONG_ANSWER = (0.1, 0.2), 170
"""Answers of so many times the usual tokens, which fill the buffers of sockets."""
SLOW_PROMPTS = (0.3, 5.0)
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
    "slow_client": Scenario(slow_client, ("slow client",), timing=QUICK_STEPS, answers=LONG_ANSWER),
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
        stalled_slow_client,
        ("stalled loop", "slow client"),
        timing=QUICK_STEPS,
        answers=LONG_ANSWER,
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
