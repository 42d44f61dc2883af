"""Several models in one simulated deployment, or in one deployment each, with equal requests.

The parts are those of real processes, over memory planes: workers, frontends with a pipeline for
each model, router processes, the indexer.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import count, cycle
from random import Random
from typing import Any
from unittest.mock import patch

import msgspec
from tests.simulation.chaos.processes import FlakyTiers, SimulatedNetwork, SimulatedWorker
from tests.simulation.chaos.requests import GREEDY, RecordedReply

from dynamo.communication.events import Event
from dynamo.core.context import Context
from dynamo.core.errors import DynamoError
from dynamo.core.reply import SendRequest
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo, GenerateRequest, Started, StopConditions
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.models.card import ModelCard
from dynamo.operations.latency_summary import LatencySummary, summarize_latencies
from dynamo.operations.replay.workers import SimulatedTier
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.scheduling.index.cache_view import CacheView
from dynamo.services.indexer import IndexerService
from dynamo.services.model_pipeline import open_model_pipeline
from dynamo.services.router import RouterService
from dynamo.services.routing import ProcessRouting

BLOCK_TOKENS = {"a": 16, "b": 32, "ab": 16}
"""The models of a trial and the sizes of their blocks. The name "ab" begins with "a"."""
ANSWER_TOKENS, CACHE_TOKENS = 20, 12_288
FAMILIES, COMMON_TOKENS, OWN_TOKENS = 24, 1_024, 96
"""Prompts begin as those of their family do, which do not all fit into the caches."""
_plane_numbers = count()


class TrialShape(msgspec.Struct, frozen=True):
    """A deployment. With `roles`, half of the workers compute prompts for the others. With `tiers`,
    blocks fall into a tier of each worker, and into a store that the workers of a model share. The
    model "a" gets `flood` times the `rate` of prompts that are longer by `flood_tokens`, and all its
    workers crash every `kill_every_s`."""

    workers: int = 4
    frontends: int = 1
    routers: int = 0
    shared_index: bool = False
    roles: bool = False
    tiers: bool = False
    rate: float = 10.0
    seconds: float = 8.0
    flood: float = 1.0
    flood_tokens: int = 0
    kill_every_s: float = 0.0


class ModelResult(msgspec.Struct, frozen=True):
    """The result of one model."""

    hit_ratio: float
    ttft_ms: LatencySummary
    failed: int


class TrialResult(msgspec.Struct, frozen=True):
    """`events`: KV events that the indexes of all processes received, of `event_bytes`, for which
    they took `event_cpu_s`. `index_bytes`: the memory of these indexes."""

    models: Mapping[str, ModelResult]
    events: int
    event_bytes: int
    event_cpu_s: float
    index_bytes: int


class TimedReply(RecordedReply):
    """Records the cached tokens, and the time of the first token."""

    started = Started("")
    first_token_s = -1.0

    def begin(self, started: Started) -> None:
        self.started = started

    def tokens(self, ids: Sequence[int], logprobs: Any = None) -> bool:
        if self.first_token_s < 0:
            self.first_token_s = self._clock.now()
        return super().tokens(ids, logprobs)


class _Events:
    """Counts the KV events that all cache views receive, and remembers the views."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self.cpu_s = 0.0
        self.views: dict[int, CacheView] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the events of every view in this block."""
        on_event: Callable[[CacheView, Event], None] = CacheView.on_event

        def count_event(view: CacheView, event: Event) -> None:
            began = time.thread_time()
            on_event(view, event)
            self.cpu_s += time.thread_time() - began
            self.count += 1
            self.bytes += len(event.payload)
            self.views[id(view)] = view

        with patch.object(CacheView, "on_event", count_event):
            yield

    def index_bytes(self) -> int:
        """Return the bytes of all indexes now."""
        return sum(view.tiers.bytes_used for view in self.views.values())


class _Router(RouterService):
    """A router process that chooses among the workers of a model as if it had no other one."""

    async def _open_model(self, card: ModelCard) -> None:
        self._runtime.rng = Random(f"{card.name} {self._runtime.name}")
        await super()._open_model(card)


async def _no_pages(*_: object, **__: object) -> None:
    """Open no HTTP port, since there are no sockets in virtual time."""


def _make_network(shape: TrialShape, clock: VirtualClock, plane: str, model: str) -> Any:
    block_tokens = BLOCK_TOKENS[model]
    blocks = CACHE_TOKENS // block_tokens
    engine = EngineInfo("mock", block_tokens, blocks, CACHE_TOKENS, 16, 8_192)
    tiers = [SimulatedTier("host", blocks, 4e9), SimulatedTier("shared", 4 * blocks, 1e9)]
    return SimulatedNetwork(
        plane,
        clock,
        engine,
        Timing(10.0, 0.05),
        "kv",
        disaggregation="predicted" if shape.roles else "off",
        tiers=FlakyTiers(tiers, clock, 0.0, Random(0)) if shape.tiers else None,
        model=model,
        routers=shape.routers,
        shared_index=shape.shared_index,
    )


async def _open_dying_workers(
    shape: TrialShape, network: SimulatedNetwork, stack: AsyncExitStack
) -> None:
    """Start workers that all crash at once every `kill_every_s`, and start again a second later."""
    tasks = await stack.enter_async_context(BackgroundTasks())

    async def start_all(first: int) -> Sequence[SimulatedWorker]:
        workers = [SimulatedWorker(network, f"a-{first + n}") for n in range(shape.workers)]
        for number, worker in enumerate(workers):
            await worker.start(number)
        return workers

    async def run(workers: Sequence[SimulatedWorker]) -> None:
        try:
            for number in count(shape.workers, shape.workers):
                await network.clock.sleep(shape.kill_every_s)
                for worker in workers:
                    await worker.crash()
                await network.clock.sleep(1.0)
                for worker in workers:
                    await worker.end_lease()
                workers = await start_all(number)
        finally:
            for worker in workers:
                await worker.shutdown()

    tasks.start(run(await start_all(0)))


async def _open_deployment(
    shape: TrialShape, networks: Sequence[SimulatedNetwork], stack: AsyncExitStack
) -> Mapping[str, Sequence[SendRequest]]:
    """Start a deployment of the models of `networks`; return the entries of its frontends by model.
    The stack stops it."""
    sends: dict[str, list[SendRequest]] = {network.model: [] for network in networks}
    for network in networks:
        if network.model == "a" and shape.kill_every_s:
            await _open_dying_workers(shape, network, stack)
            continue
        for number in range(shape.workers):
            role = ("decode", "prefill")[number % 2] if shape.roles else "both"
            worker = SimulatedWorker(network, f"{network.model}-{number}", role)
            await worker.start(number)
            stack.push_async_callback(worker.shutdown)

    async def create_runtime(role: str, name: str, seed: int) -> Any:
        runtime, discovery = await networks[0].create_runtime(role, name, seed)
        stack.push_async_callback(discovery.close)
        stack.push_async_callback(runtime.shutdown, 0.0)
        return runtime

    if shape.shared_index:
        await IndexerService().attach(await create_runtime("indexer", "indexer", 0))
    for number in range(shape.routers):
        runtime = await create_runtime("router", f"router-{number}", number)
        with patch("dynamo.services.router.serve_pages", _no_pages):
            await _Router().attach(runtime)
    for number in range(shape.frontends):
        runtime = await create_runtime("frontend", f"frontend-{number}", number)
        detector = FailureDetector(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)
        routing = ProcessRouting(runtime)
        for network in networks:
            runtime.rng = Random(f"{network.model} {number}")  # equal choices in both cases
            pipeline = await open_model_pipeline(runtime, detector, routing, network.card)
            stack.push_async_callback(pipeline.close)
            sends[network.model].append(pipeline.send)
    return sends


class _Client:
    """Sends the requests of one model."""

    def __init__(self, model: str, clock: VirtualClock, sends: Sequence[SendRequest]) -> None:
        self.model, self._clock, self._sends = model, clock, cycle(sends)
        self._rng = Random(model)
        self._beginnings = [self._random_ids(COMMON_TOKENS) for _ in range(FAMILIES)]
        self._replies: list[tuple[float, int, TimedReply]] = []
        self._failed = 0

    def _random_ids(self, tokens: int) -> array[int]:
        return array("I", array("H", self._rng.randbytes(2 * tokens)))

    async def run(self, rate: float, seconds: float, own_tokens: int) -> None:
        """Send requests at random times, and wait for their answers."""
        end = self._clock.now() + seconds
        async with BackgroundTasks() as tasks:
            while self._clock.now() < end:
                await self._clock.sleep(self._rng.expovariate(rate))
                prompt = self._rng.choice(self._beginnings) + self._random_ids(own_tokens)
                tasks.start(self._send(prompt))
            await tasks.join()

    async def _send(self, prompt: array[int]) -> None:
        name, reply = f"{self.model}{len(self._replies)}", TimedReply(self._clock)
        self._replies.append((self._clock.now(), len(prompt), reply))
        stops = StopConditions(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        request = GenerateRequest(name, self.model, prompt.tobytes(), GREEDY, stops)
        try:
            await next(self._sends)(request, Context(name), reply)
        except DynamoError:
            self._failed += 1
            return
        if list(reply.ids) != reply.expected_ids(prompt):
            raise AssertionError(f"the answer to {name} is altered")

    def result(self) -> ModelResult:
        """Return what the requests have measured."""
        cached = sum(reply.started.cached_tokens for _, _, reply in self._replies)
        return ModelResult(
            cached / sum(tokens for _, tokens, _ in self._replies),
            summarize_latencies(
                array(
                    "d", [r.first_token_s - s for s, _, r in self._replies if r.first_token_s > 0]
                )
            ),
            self._failed,
        )


def run_trial(shape: TrialShape, *, together: bool) -> TrialResult:
    """Send each model the same requests, all in one deployment or in one each."""

    async def main(clock: VirtualClock) -> TrialResult:
        planes = cycle([f"memory:models-{next(_plane_numbers)}"])
        networks = [
            _make_network(
                shape, clock, next(planes) if together else f"memory:models-{number}", model
            )
            for number, model in zip(_plane_numbers, BLOCK_TOKENS, strict=False)
        ]

        def deliver_tokens() -> None:
            for network in networks:
                network.deliver_tokens()

        clock.on_time_advanced(deliver_tokens)
        events = _Events()
        with events.counted():
            async with AsyncExitStack() as stack, BackgroundTasks() as running:
                clients = []
                for group in [networks] if together else [[network] for network in networks]:
                    sends = await _open_deployment(shape, group, stack)
                    clients += [_Client(model, clock, sends[model]) for model in sends]
                await clock.sleep(2.0)
                for client in clients:
                    rate, tokens = shape.rate, OWN_TOKENS
                    if client.model == "a":
                        rate, tokens = rate * shape.flood, tokens + shape.flood_tokens
                    running.start(client.run(rate, shape.seconds, tokens))
                await running.join()
                await clock.sleep(1.0)
                results = [client.result() for client in clients]
                index_bytes = events.index_bytes()
        return TrialResult(
            dict(zip(BLOCK_TOKENS, results, strict=True)),
            events.count,
            events.bytes,
            events.cpu_s,
            index_bytes,
        )

    return run_in_virtual_time(main)
