"""Compare answers with and without a prefill worker: the native engine, real prompts, random faults.

    python benchmarks/disaggregated_text.py [PROMPTS.jsonl] [--model FILE_OR_FOLDER] [--count 200]
        [--tokens 16] [--prompt-tokens 300] [--modes always,predicted,flexible] [--transfer shm:] [--faults]
        [--tiers host,disk,shared,all] [--blocks 600]

Each line of PROMPTS has a `prompt`; without a file, prompts are paragraphs of this project's docs. Every prompt is
answered greedily and with a seed, by one engine alone and then by two. In mode `always` the second engine computes all prompts, in
`predicted` a random half of them. In `flexible` either engine answers, and the other one computes half of its
prompts. In `together`, each engine answers half of them alone. With --tiers, each mode runs with each tier, each part of
the prompts twice, and --blocks should be few. An answer that differs is a near tie if the two tokens of the first difference are less than 0.001 apart in
log probability. With --faults, calls of the other engine break at random times and caches are cleared.
With tiers, these are also cleared, damaged, full, failing or frozen (`tier_faults.py`). All block
pools must be whole and unused at the end. Exits with 1 if an answer differs otherwise, fails, or a block is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from msgspec.structs import replace
from tier_faults import TierFaults, tier_settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.invariants import check_pool
from tests.support.servers import S3Process

from dynamo.communication.transfer import RegionPeer, TransferPlane, open_transfer
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import WorkerFailed
from dynamo.core.settings.schema_cache import NO_TIERS, CacheSettings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks, run_all
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions, TokenLogprobs
from dynamo.inference.disaggregation.peer_prefill import PeerPrefill, PrefillPeer
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.kv_source import PrefillSink
from dynamo.inference.native.runner import NativeRunner
from dynamo.inference.tiers.opening import tier_opener
from dynamo.models.resolve import resolve_model_blocking
from dynamo.models.tokenization.tokenizer import load_tokenizer
from dynamo.testing.fakes import CollectedReply

NEAR_TIE = 1e-3
AT_ONCE = 8
ALONE_BLOCKS = 600
MIN_CHARACTERS = 200
PART = 120
TIER_PART = 40
"""Requests that are repeated with tiers: more blocks than a tight device holds, fewer than host memory does."""
FAULT_SHARE = 0.4
REMOTE_SHARE = {"always": 1.0, "predicted": 0.5, "flexible": 0.5, "together": 0.0}
DEFAULT_MODES = "always,predicted,flexible"
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


async def open_engine(
    files: Any, url: str, blocks: int, cache: CacheSettings = NO_TIERS
) -> tuple[BatchedEngine, TransferPlane, Any]:
    settings = EngineSettings(num_blocks=blocks, max_num_batched_tokens=128)
    engine = BatchedEngine(
        NativeRunner(files.open_weights, settings, cache=cache),
        open_tiers=tier_opener(cache, settings, SystemClock()),
    )
    await engine.start()
    plane = await open_transfer(url)
    assert engine.runner.region is not None
    return engine, plane, await plane.expose(engine.runner.region, engine.runner.layout)


async def answer_all(
    engines: Sequence[BatchedEngine], requests: list[GenerateRequest], remote_share: float
) -> list[Any]:
    """Return the answers of all requests, some of which run at once, by any of the `engines`. The
    other engine computes `remote_share` of the prompts."""
    replies = [CollectedReply() for _ in requests]
    slots = asyncio.Semaphore(AT_ONCE)

    async def answer(request: GenerateRequest, reply: CollectedReply) -> None:
        prefill = "other" if rng.random() < remote_share else ""
        async with slots:
            sent = replace(request, prefill=prefill)
            await rng.choice(engines).generate(sent, Context("r"), reply)

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


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Return the prompts of the file, or paragraphs of the docs."""
    if options.prompts:
        lines = Path(options.prompts).read_bytes().splitlines()[: options.count]
        return [msgspec.json.decode(line)["prompt"] for line in lines]
    pages = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    paragraphs = [part for page in pages for part in page.read_text().split("\n\n")]
    return rng.sample([part for part in paragraphs if len(part) >= MIN_CHARACTERS], options.count)


def make_requests(options: argparse.Namespace, tokenizer: Any) -> list[GenerateRequest]:
    requests: list[GenerateRequest] = []
    for prompt in read_prompts(options):
        packed = tokenizer.encode(prompt)[: 4 * options.prompt_tokens]
        stops = StopConditions(max_tokens=options.tokens)
        requests += [
            GenerateRequest("r", "m", packed, sampling, stops, top_logprobs=5)
            for sampling in (SamplingParams(temperature=0.0), SamplingParams(seed=len(requests)))
        ]
    return requests


async def connect(
    engine: BatchedEngine, region: RegionPeer, other: BatchedEngine, share: float
) -> None:
    """Let `other` compute prompts of `engine`. A `share` of the calls breaks."""
    peer = BreakingPeer(other, region, share)

    async def find(instance_id: str) -> PrefillPeer:  # noqa: ARG001
        return peer

    engine.kv_source = PeerPrefill(find, SystemClock())


def parts(count: int, *, repeated: bool) -> list[slice]:
    """Divide the requests. Each repeated part comes twice in turn."""
    size = TIER_PART if repeated else PART
    whole = [slice(start, start + size) for start in range(0, count, size)]
    return [part for part in whole for _ in range(1 + repeated)]


def describe(engines: Sequence[BatchedEngine]) -> str:
    """Say how many blocks came from where."""
    counters = [engine.arrivals.counters for engine in engines]
    moved = sum(counter.blocks_arrived for counter in counters)
    fallbacks = sum((counter.fallbacks for counter in counters), Counter())
    loaded: Counter[str] = Counter()
    for engine in engines:
        for tier in engine.tiers.tiers if engine.tiers else ():
            loaded[tier.name] += tier.counters.loaded_blocks
    return f"blocks moved {moved}, loaded {dict(loaded)}, fallbacks {dict(fallbacks)}"


async def run_mode(
    mode: str,
    tier: str,
    requests: list[GenerateRequest],
    expected: list[Any],
    options: argparse.Namespace,
) -> int:
    """Answer all requests with two engines and print the result. Returns the number of answers that
    differ."""
    files = resolve_model_blocking(options.model, ensure_verified=False)
    with ExitStack() as stack:
        s3 = None
        if tier in {"shared", "all"}:
            s3 = stack.enter_context(S3Process())
            os.environ |= s3.environ
        cache = tier_settings(tier, stack.enter_context(TemporaryDirectory()))
        engines, planes, descriptors = zip(
            *[await open_engine(files, options.transfer, options.blocks, cache) for _ in range(2)],
            strict=True,
        )
        for at in range(2 if REMOTE_SHARE[mode] else 0):
            region = await planes[at].connect(descriptors[1 - at])
            await connect(engines[at], region, engines[1 - at], FAULT_SHARE * options.faults)
        answering = engines if mode in {"flexible", "together"} else engines[:1]
        faults = TierFaults(engines, s3, rng)
        results: Counter[str] = Counter()
        async with BackgroundTasks() as tasks:
            if options.faults:
                tasks.start(faults.run(), "faults")
            for part in parts(len(requests), repeated=bool(tier)):
                replies = await answer_all(answering, requests[part], REMOTE_SHARE[mode])
                pairs = zip(expected[part], replies, strict=True)
                results.update(first_difference(alone, reply) for alone, reply in pairs)
        print(
            f"{mode} {tier}: answers {dict(results)}, {describe(engines)}, faults {dict(faults.counts)}",
            flush=True,
        )
        for engine in engines:
            check_pool(engine.scheduler.pool)
            assert engine.report_load().active_blocks == 0
            await engine.stop()
        for plane in planes:
            await plane.close()
    return results["different"]


async def compare(options: argparse.Namespace) -> int:
    files = resolve_model_blocking(options.model, ensure_verified=False)
    requests = make_requests(options, load_tokenizer(files.tokenizer))
    alone, _, _ = await open_engine(files, options.transfer, ALONE_BLOCKS)
    expected = await answer_all([alone], requests, 0.0)
    await alone.stop()
    different = 0
    for tier in options.tiers.split(","):
        for mode in options.modes.split(","):
            different += await run_mode(mode, tier, requests, expected, options)
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="?", default="", help="default: paragraphs of docs/")
    parser.add_argument("--model", default="", help="default: the default model")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=300, help="longer ones are cut")
    parser.add_argument("--modes", default=DEFAULT_MODES)
    parser.add_argument("--tiers", default="", help="host, disk, shared, all; default: none")
    parser.add_argument("--blocks", type=int, default=ALONE_BLOCKS, help="of each engine")
    parser.add_argument("--transfer", default="shm:")
    parser.add_argument("--faults", action="store_true")
    return asyncio.run(compare(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
