#!/usr/bin/env python3
"""Find the length from which a running request is moved with its KV blocks sooner than computed again.

    benchmarks/moving_requests.py [--model FILE_OR_FOLDER] [--rounds 3] [--simulated]

The next two tokens of a request with so many tokens come from an engine that did not write those. Either that engine
computes them, or it pulls their blocks from the engine that did, which computes the partial last block and the
first token. Native engines of one process pull over `shm:`. With --simulated, the engines are those of `dynamo
replay` in virtual time: Dynamo's default timing, 128 KiB a token, links of 4 to 64 GB/s. Neither has a request
plane between the engines, which adds about 1 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from array import array
from collections.abc import Callable
from random import Random

from disaggregated_text import BreakingPeer, open_engine
from msgspec.structs import replace

from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.reply import LogprobsPerToken
from dynamo.core.timing.model import DYNAMO_TIMING
from dynamo.core.values import EngineInfo, GenerateRequest, SamplingParams, StopConditions
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.mock.simulated_engine import make_simulated_engine
from dynamo.models.resolve import resolve_model_blocking
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorker, ReplayWorkers
from dynamo.testing.fakes import CollectedReply

NATIVE_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 1500)
SIMULATED_LENGTHS = (64, 256, 512, 1024, 2048, 4096, 8192)
GBPS = (4, 16, 64)
KV_BYTES_PER_TOKEN = 128 << 10
SIMULATED_ENGINE = EngineInfo("mock", 64, 16_384, 16_384 * 64, 256, 8192)
OLD = "0"
"""The id of the worker that has the blocks."""


class TimedReply(CollectedReply):
    """Records when the last token comes."""

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__()
        self._now = now
        self.last_s = 0.0

    def tokens(self, ids: tuple[int, ...], logprobs: LogprobsPerToken | None = None) -> bool:
        self.last_s = self._now()
        return super().tokens(ids, logprobs)


def make_request(length: int, seed: int) -> GenerateRequest:
    """Return a request of `length` random tokens, one of which was generated."""
    ids = array("I", Random(seed).choices(range(1000, 40_000), k=length))
    stops = StopConditions(max_tokens=2, ignore_eos=True)
    sampling = SamplingParams(temperature=0.0)
    return GenerateRequest("r", "m", ids.tobytes(), sampling, stops, resumed=1)


async def two_tokens_ms(
    engine: BatchedEngine, request: GenerateRequest, now: Callable[[], float]
) -> float:
    """Return after how many milliseconds the engine has delivered two tokens."""
    reply, started_s = TimedReply(now), now()
    await engine.generate(request, Context("r"), reply)
    return (reply.last_s - started_s) * 1e3


async def measure_native(model: str, rounds: int) -> None:
    """Print the times of native engines."""
    files = resolve_model_blocking(model, ensure_verified=False)
    old, old_plane, descriptor = await open_engine(files, "shm:")
    new, new_plane, _ = await open_engine(files, "shm:")
    peer = BreakingPeer(old, await new_plane.connect(descriptor), 0.0)

    async def find(instance_id: str) -> PrefillPeer:  # noqa: ARG001
        return peer

    clock = SystemClock()
    new.kv_source = PeerPrefill(find, clock)
    print("native: tokens, ms by moving, ms by computing")
    for length in NATIVE_LENGTHS:
        moved, computed = [], []
        for seed in range(rounds):
            request = make_request(length, seed)
            await two_tokens_ms(old, request, clock.now)
            held = replace(request, kv_from=OLD)
            moved.append(await two_tokens_ms(new, held, clock.now))
            new.clear_prefix_cache()
            computed.append(await two_tokens_ms(new, request, clock.now))
            new.clear_prefix_cache()
            old.clear_prefix_cache()
        print(f"| {length} | {statistics.median(moved):.0f} | {statistics.median(computed):.0f} |")
    for engine, plane in ((old, old_plane), (new, new_plane)):
        await engine.stop()
        await plane.close()


async def simulate(clock: VirtualClock, length: int, gbps: float, *, moves: bool) -> float:
    """Return the milliseconds of two tokens in virtual time."""
    group = ReplayGroup(2, SIMULATED_ENGINE, DYNAMO_TIMING)
    plan = ReplayWorkers([group], "lru", transfer=gbps * 1e9, kv_bytes_per_token=KV_BYTES_PER_TOKEN)
    workers: dict[str, ReplayWorker] = {}
    for number in range(2):
        engine, _ = make_simulated_engine(
            SIMULATED_ENGINE,
            DYNAMO_TIMING,
            clock,
            wait_until_quiescent=clock.wait_until_idle,
            eviction="lru",
            vocabulary=range(1000, 40_000),
            region=plan.make_region(SIMULATED_ENGINE),
        )
        name = str(number)
        workers[name] = ReplayWorker(name, [name], [engine], clock)
        await engine.start()
    for worker in workers.values():
        await worker.open_links(gbps * 1e9, workers)
    request = make_request(length, 0)
    await two_tokens_ms(workers[OLD].ranks[0], request, clock.now)
    sent = replace(request, kv_from=OLD) if moves else request
    result = await two_tokens_ms(workers["1"].ranks[0], sent, clock.now)
    for worker in workers.values():
        await worker.stop()
    return result


def print_simulated() -> None:
    """Print the times of simulated engines."""
    links = ", ".join(f"ms by moving at {gbps} GB/s" for gbps in GBPS)
    print(f"simulated: tokens, {links}, ms by computing")
    for length in SIMULATED_LENGTHS:
        moved = [
            run_in_virtual_time(
                lambda clock, gbps=gbps, length=length: simulate(clock, length, gbps, moves=True)
            )
            for gbps in GBPS
        ]
        computed = run_in_virtual_time(
            lambda clock, length=length: simulate(clock, length, 1, moves=False)
        )
        print("|", " | ".join(f"{ms:.1f}" for ms in [length, *moved, computed]), "|")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--simulated", action="store_true")
    args = parser.parse_args()
    if args.simulated:
        print_simulated()
    else:
        asyncio.run(measure_native(args.model, args.rounds))


if __name__ == "__main__":
    main()
