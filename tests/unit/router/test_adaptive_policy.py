"""Mode adaptive: requests placed since a worker's last report count as well."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, cast
from unittest.mock import ANY

import pytest
from msgspec.msgpack import encode
from tests.unit.router.fake_cluster import ENGINE, instance

from dynamo.communication.events import Event
from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import NoWorkers
from dynamo.core.labels import LABELS_KEY
from dynamo.core.values import GenerateRequest, Load, SamplingParams, StopConditions
from dynamo.runtime.calls.client import Client
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router import WorkerRouter
from dynamo.scheduling.router.policies.adaptive import AdaptivePolicy
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.load_view import LoadView
from dynamo.scheduling.workers.placed_request import PlacedRequest
from dynamo.testing.fakes import CollectedReply

CONTEXT = Context("r")


class FakeClient:
    """A client that picks the last instance by name, to distinguish tie breaks from the first."""

    def __init__(self, *workers: Instance) -> None:
        self.instances = {worker.id: worker for worker in workers}
        self.picked: list[str] = []
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(callback)
        return lambda: None

    def count_by(self, count_requests: Callable[[str], int]) -> None:
        pass

    def pick(self, mode: str, allowed: frozenset[str]) -> Instance:
        self.picked.append(mode)
        return self.instances[max(allowed)]

    def no_workers_error(self, who: str, of: str) -> NoWorkers:
        return NoWorkers(f"no {who} serves {of}")

    def leave(self, name: str) -> None:
        del self.instances[name]
        for listener in self._listeners:
            listener()


def request(tokens: int) -> GenerateRequest:
    ids = array("I", range(tokens)).tobytes()
    return GenerateRequest("r", "m", ids, SamplingParams(), StopConditions())


class AdaptiveHarness:
    def __init__(self, *workers: Instance) -> None:
        self.clock = SystemClock()
        self.client = FakeClient(*workers)
        self.loads = LoadView(self.clock)
        client = cast("Client", self.client)
        self.ledger = Ledger(self.clock, client)
        self.policy = AdaptivePolicy(client, self.ledger, self.clock, "round_robin")
        self.loads.add_listener(self.ledger.on_load_report)
        self.loads.add_listener(self.policy.on_load_report)
        self.router = WorkerRouter(self.policy, ANY, clock=self.clock, ledger=self.ledger)

    def report_load(self, name: str, **load: int) -> None:
        payload = encode(Load(**load))
        self.loads.update_scores(Event("n.worker.load_metrics", name, 1, 1, payload))

    async def route(self, tokens: int = 1000, context: Context = CONTEXT) -> PlacedRequest:
        decision = await self.policy.choose(request(tokens), context, frozenset())
        attempt = self.router._start_attempt(
            decision, request(tokens), context, CollectedReply(), 0.0
        )
        assert decision.instance.id == attempt.placed.worker.name
        return attempt.placed


async def test_ten_requests_between_two_reports_spread() -> None:
    harness = AdaptiveHarness(*(instance(name) for name in "abcde"))
    for name in "bcde":
        harness.report_load(name, active_blocks=40, total_blocks=4096)
    counts = Counter([(await harness.route(8000)).worker.name for _ in range(10)])
    assert dict(counts) == dict.fromkeys("abcde", 2)


async def test_the_tie_mode_decides_between_equal_workers() -> None:
    harness = AdaptiveHarness(instance("a"), instance("b"))
    assert (await harness.route()).worker.name == "b"
    assert harness.client.picked == ["round_robin"]


async def test_external_load_in_reports_counts() -> None:
    harness = AdaptiveHarness(instance("a"), instance("b"))
    harness.report_load("a", waiting=4, prefill_tokens=30_000)
    assert (await harness.route()).worker.name == "b"
    assert (await harness.route()).worker.name == "b"
    harness.report_load("a")
    assert (await harness.route()).worker.name == "a"


async def test_an_ended_request_is_removed_and_updates_the_prediction() -> None:
    harness = AdaptiveHarness(instance("a"), instance("b"))
    first = await harness.route(8000)
    harness.ledger.first_token(first)
    first.emitted = 40
    harness.ledger.end(first, None)
    assert first.worker.pending_prefill_tokens == 0
    predicted = harness.policy.balancer.prediction_model.predict_request_load(request(8000))
    assert predicted.output_tokens == 40


async def test_a_worker_with_more_memory_gets_more_requests() -> None:
    small = ENGINE | {"num_blocks": 1024}
    harness = AdaptiveHarness(instance("big"), instance("small", engine=small))
    rng = Random(1)
    placed = [await harness.route(rng.randrange(500, 4000)) for _ in range(40)]
    for placement in placed:
        harness.ledger.first_token(placement)
    counts = Counter(placement.worker.name for placement in placed)
    assert counts["big"] > 1.5 * counts["small"] > 0


async def test_labels_and_tried_workers_are_respected() -> None:
    labelled: dict[str, Any] = {LABELS_KEY: {"zone": "east"}}
    harness = AdaptiveHarness(instance("a", **labelled), instance("b"))
    context = Context("r", metadata={LABELS_KEY: "zone=east"})
    assert {(await harness.route(context=context)).worker.name for _ in range(4)} == {"a"}
    harness.client.leave("a")
    with pytest.raises(NoWorkers, match="no worker"):
        await harness.policy.choose(request(10), CONTEXT, frozenset({"b"}))
