"""Compare answers with and without a prefill worker: the native engine, real prompts, random faults.

    python benchmarks/disaggregated_text.py PROMPTS.jsonl [--model FILE_OR_FOLDER] [--count 200]
        [--tokens 16] [--transfer shm:] [--faults]

Each line of PROMPTS has a `prompt`. Every prompt is answered greedily and with a seed, by one engine alone and
by an engine whose prompts another engine computes. An answer that differs is a near tie if the two tokens of
the first difference are less than 0.001 apart in log probability. With --faults, calls of the prefill engine
break at random times and caches are cleared. Both block pools must be whole and unused at the end. Exits
with 1 if an answer differs otherwise, fails, or a block is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.communication.transfer import RegionPeer, TransferPlane, open_transfer
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import run_all
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions, TokenLogprobs
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_source import PrefillSink
from dynamo.inference.native.runner import NativeRunner
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.testing.fakes import CollectedReply

NEAR_TIE = 1e-3
AT_ONCE = 8
MAX_PROMPT_TOKENS = 300
FAULT_SHARE = 0.4
rng = Random(0)


class BreakingPeer(PrefillPeer):
    """An engine of this process, whose calls may break after a random time."""

    def __init__(self, engine: BatchedEngine, region: RegionPeer, fault_share: float) -> None:
        self._engine = engine
        self._region = region
        self._fault_share = fault_share

    async def connect(self, rank: int) -> RegionPeer:  # noqa: ARG002
        return self._region

    async def prefill(
        self,
        rank: int,  # noqa: ARG002
        request: GenerateRequest,
        context: Context,
        have_blocks: int,
        sink: PrefillSink,
    ) -> None:
        breaks = rng.random() < self._fault_share
        try:
            async with asyncio.timeout(rng.random() * 3 if breaks else None):
                await self._engine.prefill(request, context, have_blocks, sink)
        except TimeoutError:
            raise WorkerFailed("the call broke, as it should") from None


async def open_engine(files: Any, url: str) -> tuple[BatchedEngine, TransferPlane, Any]:
    settings = EngineSettings(num_blocks=600, max_num_batched_tokens=128)
    engine = BatchedEngine(NativeRunner(files.open_weights, settings))
    await engine.start()
    plane = await open_transfer(url)
    assert engine.runner.region is not None
    return engine, plane, await plane.expose(engine.runner.region, engine.runner.layout)


async def answer_all(engine: BatchedEngine, requests: list[GenerateRequest]) -> list[Any]:
    """Return the answers of all requests, some of which run at once."""
    replies = [CollectedReply() for _ in requests]
    slots = asyncio.Semaphore(AT_ONCE)

    async def answer(request: GenerateRequest, reply: CollectedReply) -> None:
        async with slots:
            await engine.generate(request, Context("r"), reply)

    await run_all(*(answer(*pair) for pair in zip(requests, replies, strict=True)))
    return replies


def first_difference(alone: CollectedReply, reply: CollectedReply) -> str:
    """Return "same", "near tie" or "different"."""
    if alone.ids == reply.ids:
        return "same"
    pairs = zip(alone.ids, reply.ids, strict=False)
    at = next((at for at, (token, other) in enumerate(pairs) if token != other), -1)
    extras = alone.extras[at]
    if at < 0 or extras is None:
        return "different"
    logprobs: TokenLogprobs = extras[0]
    best = dict(logprobs.top)
    gap = abs(logprobs.logprob - best.get(reply.ids[at], -100.0))
    return "near tie" if gap < NEAR_TIE else "different"


def make_requests(options: argparse.Namespace, tokenizer: Any) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    for line in Path(options.prompts).read_bytes().splitlines()[: options.count]:
        packed = tokenizer.encode(msgspec.json.decode(line)["prompt"])[: 4 * MAX_PROMPT_TOKENS]
        stops = StopConditions(max_tokens=options.tokens)
        requests += [
            GenerateRequest("r", "m", packed, sampling, stops, top_logprobs=5)
            for sampling in (SamplingParams(temperature=0.0), SamplingParams(seed=len(requests)))
        ]
    return requests


async def compare(options: argparse.Namespace) -> int:
    files = resolve_model_blocking(options.model, ensure_verified=False)
    requests = make_requests(options, load_tokenizer(files.tokenizer))
    alone, _, _ = await open_engine(files, options.transfer)
    expected = await answer_all(alone, requests)
    await alone.stop()
    prefill, prefill_plane, descriptor = await open_engine(files, options.transfer)
    decode, decode_plane, _ = await open_engine(files, options.transfer)
    region = await decode_plane.connect(descriptor)
    peer = BreakingPeer(prefill, region, FAULT_SHARE * options.faults)

    async def find(instance_id: str) -> PrefillPeer:  # noqa: ARG001
        return peer

    decode.kv_source = PeerPrefill(find, SystemClock())
    results: Counter[str] = Counter()
    half = len(requests) // 2
    for part in (slice(half), slice(half, None)):
        remote = [replace(request, prefill="p") for request in requests[part]]
        replies = await answer_all(decode, remote)
        pairs = zip(expected[part], replies, strict=True)
        results.update(first_difference(alone_reply, reply) for alone_reply, reply in pairs)
        if options.faults:
            prefill.clear_prefix_cache()
            decode.clear_prefix_cache()
    counters = decode.arrivals.counters
    print(f"answers: {dict(results)}")
    print(f"blocks moved {counters.blocks_arrived}, saved {counters.blocks_saved}")
    print(f"fallbacks: {dict(counters.fallbacks)}")
    for engine in (prefill, decode):
        engine.scheduler.pool.check_invariants()
        assert engine.report_load().active_blocks == 0
        await engine.stop()
    for plane in (prefill_plane, decode_plane):
        await plane.close()
    return 1 if results["different"] else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts")
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--transfer", default="shm:")
    parser.add_argument("--faults", action="store_true")
    return asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
