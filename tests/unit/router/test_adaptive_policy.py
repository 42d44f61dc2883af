"""Mode adaptive: what was sent since a worker's last report counts beside it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, cast

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
from dynamo.scheduling.router.load_view import LoadView
from dynamo.scheduling.router.policies.adaptive import AdaptivePolicy
from dynamo.scheduling.router.worker_state import PlacedRequest

CONTEXT = Context("r")


class Workers:
    """A client's instances; picks the last by name, so that ties can be told from firsts."""

    def __init__(self, *workers: Instance) -> None:
        self.instances = {one.id: one for one in workers}
        self.picked: list[str] = []
        self._changed: Callable[[], None] = lambda: None

    def on_change(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._changed = callback
        return lambda: None

    def pick(self, mode: str, allowed: frozenset[str]) -> Instance:
        self.picked.append(mode)
        return self.instances[max(allowed)]

    def no_workers_error(self, who: str, of: str) -> NoWorkers:
        return NoWorkers(f"no {who} serves {of}")

    def leave(self, name: str) -> None:
        del self.instances[name]
        self._changed()


def request(tokens: int) -> GenerateRequest:
    ids = array("I", range(tokens)).tobytes()
    return GenerateRequest("r", "m", ids, SamplingParams(), StopConditions())


class Bench:
    def __init__(self, *workers: Instance) -> None:
        self.clock = SystemClock()
        self.workers = Workers(*workers)
        self.loads = LoadView(self.clock)
        self.policy = AdaptivePolicy(
            cast("Client", self.workers), self.loads, self.clock, "round_robin"
        )

    def reports(self, name: str, **load: int) -> None:
        told = encode(Load(**load))
        self.loads.update_scores(Event("n.worker.load_metrics", name, 1, 1, told))

    async def route(self, tokens: int = 1000, context: Context = CONTEXT) -> PlacedRequest:
        decision = await self.policy.choose(request(tokens), context, frozenset())
        assert isinstance(decision.placement, PlacedRequest)
        assert decision.instance.id == decision.placement.worker.name
        return decision.placement


async def test_ten_at_once_spread_though_no_report_comes_between() -> None:
    bench = Bench(*(instance(name) for name in "abcde"))
    for name in "bcde":
        bench.reports(name, active_blocks=40, total_blocks=4096)
    went = Counter([(await bench.route(8000)).worker.name for _ in range(10)])
    assert dict(went) == dict.fromkeys("abcde", 2)


async def test_the_setting_decides_between_equals() -> None:
    bench = Bench(instance("a"), instance("b"))
    assert (await bench.route()).worker.name == "b"
    assert bench.workers.picked == ["round_robin"]


async def test_reports_of_what_others_sent_count() -> None:
    bench = Bench(instance("a"), instance("b"))
    bench.reports("a", waiting=4, prefill_tokens=30_000)
    assert (await bench.route()).worker.name == "b"
    assert (await bench.route()).worker.name == "b"
    bench.reports("a")
    assert (await bench.route()).worker.name == "a"


async def test_what_ended_weighs_no_more_and_teaches_how_long_answers_are() -> None:
    bench = Bench(instance("a"), instance("b"))
    first = await bench.route(8000)
    first.on_first_token()
    first.emitted = 40
    first.end()
    assert first.worker.pending_prefill_tokens == 0
    predicted = bench.policy.balancer.prediction_model.predict_request_load(request(8000))
    assert predicted.output_tokens == 40


async def test_the_bigger_memory_gets_more() -> None:
    small = ENGINE | {"num_blocks": 1024}
    bench = Bench(instance("big"), instance("small", engine=small))
    rng = Random(1)
    placed = [await bench.route(rng.randrange(500, 4000)) for _ in range(40)]
    for one in placed:
        one.on_first_token()
    went = Counter(one.worker.name for one in placed)
    assert went["big"] > 1.5 * went["small"] > 0


async def test_labels_and_tried_ones_are_respected() -> None:
    labelled: dict[str, Any] = {LABELS_KEY: {"zone": "east"}}
    bench = Bench(instance("a", **labelled), instance("b"))
    context = Context("r", metadata={LABELS_KEY: "zone=east"})
    assert {(await bench.route(context=context)).worker.name for _ in range(4)} == {"a"}
    bench.workers.leave("a")
    with pytest.raises(NoWorkers, match="no worker"):
        await bench.policy.choose(request(10), CONTEXT, frozenset({"b"}))
