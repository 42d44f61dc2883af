#!/usr/bin/env python3
"""Check that a router's index equals the engines' caches after faults, and measure how soon.

benchmarks/index_consistency.py [--workers 4] [--rounds 2] [--load-s 1.0] [--seed 0]

Mock workers run in separate processes with few blocks, so that they evict all the time. Each round
injects every fault under load: lost batches of events, a paused publisher (SIGSTOP), a killed worker
(SIGKILL), an added worker, a restarted router. Then the load ends, and the time is measured until
the index equals each engine's dump: the same blocks for live workers, none for dead ones. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from dynamo.core.codec import ReplyDecoder, encode_request, pack_ids
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.kv_events import decode_kv_events
from dynamo.core.reply import Reply
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import BlocksStored, GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime import Client, DistributedRuntime
from dynamo.scheduling.index import CacheView

BLOCKS = 96
GIVE_UP_S = 30.0


def settings_here() -> Settings:
    settings = Settings()
    return replace(settings, runtime=replace(settings.runtime, deployment="consistency"))


def worker() -> int:
    """Run a worker process."""
    from dynamo.inference.mock.engine import make_mock_engine
    from dynamo.inference.worker import EngineWorker
    from dynamo.models.card import ModelCard
    from dynamo.models.file_cache import FileRef
    from dynamo.runtime.processes.process import run_process

    async def main(runtime: DistributedRuntime) -> None:
        settings = EngineSettings(num_blocks=BLOCKS, speedup_ratio=10.0, timing="constant:0.01,2")
        engine = make_mock_engine(settings, range(50, 90), runtime.clock, context_tokens=1024)
        card = ModelCard(("m",), 1024, 100, FileRef("tokenizer.json", "0" * 64, 2, os.devnull))
        await EngineWorker(engine, card).attach(runtime)

    return run_process(main, settings_here(), "worker")


class IgnoringReply(Reply):
    """Ignores the answer."""

    def begin(self, started: object) -> None: ...

    def tokens(self, *_: object) -> bool:
        return True

    def finish(self, end: object) -> None: ...


class ClusterUnderTest:
    """The workers, their load, and a router's view of them."""

    def __init__(self, runtime: DistributedRuntime, client: Client, rng: random.Random) -> None:
        self.runtime = runtime
        self.client = client
        self.rng = rng
        self.processes: list[subprocess.Popen[bytes]] = []
        self.requests = 0
        self.dropped = 0
        self.dropping = False
        self.view = CacheView(runtime.clock)
        runtime.events.lossy = self._lossy  # type: ignore[attr-defined]

    def _lossy(self, first: int) -> bool:
        del first
        lost = self.dropping and self.rng.random() < 0.4
        self.dropped += lost
        return lost

    def start(self) -> None:
        command = [sys.executable, __file__, "--worker"]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    async def restart_router(self) -> None:
        """Replace the view by an empty one, as after a restart."""
        self.view.close()
        self.view = CacheView(self.runtime.clock)
        await self.view.subscribe(self.runtime.events, "dynamo.worker.kv_events")

    async def load(self, until: asyncio.Event) -> None:
        """Send prompts with shared prefixes one after the other until the event is set."""
        while not until.is_set():
            stem = self.rng.randrange(12)
            tail = [self.rng.randrange(50, 90) for _ in range(self.rng.randrange(120))]
            ids = [stem] * self.rng.randrange(16, 260) + tail
            request = GenerateRequest(
                f"r{self.requests}",
                "m",
                pack_ids(ids),
                SamplingParams(),
                StopConditions(max_tokens=40),
            )
            self.requests += 1
            try:
                async with asyncio.timeout(5):
                    await self.client.call(
                        self.client.pick("random"),
                        encode_request(request),
                        Context(request.request_id),
                        ReplyDecoder(IgnoringReply()).feed,
                    )
            except (DynamoError, TimeoutError):
                await asyncio.sleep(0.02)

    async def dump_blocks(self, name: str) -> set[int]:
        """Fetch the blocks of an engine."""
        blocks: set[int] = set()

        def read_dump(payload: bytes) -> bool:
            for change in decode_kv_events(payload):
                assert isinstance(change, BlocksStored)
                blocks.update(change.hashes)
            return True

        endpoint = self.runtime.endpoint("dynamo.worker.kv_blocks")
        instances = await self.runtime.component_registry.instances("dynamo", "worker", "kv_blocks")
        address = next(instance.address for instance in instances if instance.id == name)
        await self.runtime.requests.call(address, endpoint.path, b"", Context("dump"), read_dump)
        return blocks

    async def is_equal(self) -> bool:
        names = set(self.client.instances)
        if len(names) != len(self.processes) or set(self.view.device_index.workers) - names:
            return False
        for name in names:
            try:
                if self.view.get_mode(name) != "exact":
                    return False
                if self.view.device_index.get_blocks(name) != await self.dump_blocks(name):
                    return False
            except (DynamoError, StopIteration):
                return False
        return True

    async def wait_until_equal(self) -> float:
        start = time.monotonic()
        while not await self.is_equal():
            if time.monotonic() - start > GIVE_UP_S:
                raise SystemExit("the index differs from the engines' caches for too long")
            await asyncio.sleep(0.01)
        return time.monotonic() - start

    async def under_load(self, fault: Callable[[], Awaitable[None]], load_s: float) -> float:
        ending = asyncio.Event()
        async with BackgroundTasks() as tasks:
            for _ in range(8):
                tasks.start(self.load(ending))
            await asyncio.sleep(load_s)
            await fault()
            ending.set()
            await tasks.join()
        return await self.wait_until_equal()

    async def drop(self) -> None:
        self.dropping = True
        await asyncio.sleep(1.0)
        self.dropping = False

    async def pause(self) -> None:
        process = self.rng.choice(self.processes)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        process = self.processes.pop(self.rng.randrange(len(self.processes)))
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    async def add_worker(self) -> None:
        before = set(self.client.instances)
        self.start()
        while not set(self.client.instances) - before:
            await asyncio.sleep(0.01)


async def inject_faults(workers: int, rounds: int, load_s: float, seed: int) -> dict[str, object]:
    async with await DistributedRuntime.create(settings_here()) as runtime:
        client = await runtime.endpoint("dynamo.worker.generate").client()
        cluster = ClusterUnderTest(runtime, client, random.Random(seed))
        equal_after_s: dict[str, list[float]] = {}
        try:
            for _ in range(workers):
                cluster.start()
            await client.wait_for_instances(workers, timeout_s=GIVE_UP_S)
            await cluster.restart_router()
            faults = {
                "none": lambda: asyncio.sleep(0),
                "dropped events": cluster.drop,
                "paused publisher": cluster.pause,
                "router restarts": cluster.restart_router,
                "kill -9": cluster.kill,
                "another worker": cluster.add_worker,
            }
            for _ in range(rounds):
                for name, fault in faults.items():
                    seconds = await cluster.under_load(fault, load_s)
                    equal_after_s.setdefault(name, []).append(round(seconds, 3))
        finally:
            for process in cluster.processes:
                process.kill()
                process.wait()
        return {
            "equal_after_s": equal_after_s,
            "requests": cluster.requests,
            "batches_dropped": cluster.dropped,
            "events_lost": runtime.events.count_lost_events(),
            "heard": dict(cluster.view.event_counts),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--load-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        sys.exit(worker())
    folder = tempfile.mkdtemp(prefix="index-cluster-")
    os.environ["XDG_RUNTIME_DIR"] = folder
    try:
        print(
            json.dumps(
                asyncio.run(inject_faults(args.workers, args.rounds, args.load_s, args.seed))
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
