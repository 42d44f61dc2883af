"""Decisions and outcomes, counted: what could have been hit and what was."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.clock import SystemClock
from dynamo.core.values import GenerateRequest, Load, Sampling, Stops
from dynamo.runtime.instances import Instance
from dynamo.scheduling.router.collector.seen import SeenPrefixes
from dynamo.scheduling.router.explain.timeline import Timeline
from dynamo.scheduling.router.explain.watch import RoutingWatch
from dynamo.scheduling.router.policy import Decision, Outcome, Ticket
from dynamo.scheduling.router.prompt import Prompt
from dynamo.scheduling.router.remote.messages import (
    decode_answer,
    decode_ask,
    encode_answer,
    encode_ask,
    read_asked,
    request_of,
)
from dynamo.telemetry import Registry


class Place(Ticket):
    def __init__(self, hashes: list[int]) -> None:
        super().__init__()
        self.hashes = hashes


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, "tiny", b"", Sampling(), Stops(7), choice=1, priority=2)


def decision(hashes: list[int], worker: str = "w1", **more: Any) -> Decision:
    instance = Instance(worker, "tcp://", "dynamo", "worker", "generate")
    return Decision(
        instance, "predicted", 2, prompt_blocks=len(hashes), ticket=Place(hashes), **more
    )


def counters(registry: Registry) -> dict[str, float]:
    lines = [line for line in registry.render().splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_was_seen_reachable_and_hit_is_counted() -> None:
    registry = Registry()
    watch = RoutingWatch(SystemClock(), registry)
    hashes = list(range(100, 108))
    first = decision(hashes)
    watch.decided(request(), first)
    assert watch.active["w1"] == 1
    watch.ended(request(), first, Outcome(0.1, 0.2, 0, 128, 5))
    second = decision(hashes, "w2", overlap_blocks=2, best_overlap_blocks=6)
    watch.decided(request("s"), second)
    watch.ended(request("s"), second, Outcome(0.1, 0.2, 32, 128, 5))
    found = counters(registry)
    assert found["dynamo_router_prompt_blocks_total"] == 16
    assert found["dynamo_router_seen_blocks_total"] == 8
    assert found["dynamo_router_reachable_blocks_total"] == 6
    assert found["dynamo_router_hit_blocks_total"] == 2
    assert found["dynamo_router_cached_tokens_total"] == 32
    assert not watch.active
    cache = watch.collector.report().aggregated_metrics["cache_hit"]
    assert (cache["seen"], cache["reachable"], cache["hit"]) == (0.5, 0.375, 0.125)
    assert watch.explained.find("s")[0].outcome is not None


def test_a_client_that_left_is_no_failure_nor_is_a_drained_worker() -> None:
    watch = RoutingWatch(SystemClock(), Registry())
    for number, error in enumerate(("", "cancelled", "worker_leaving", "worker_failed")):
        made = decision([])
        watch.decided(request(str(number)), made)
        watch.ended(request(str(number)), made, Outcome(None, 0.2, 0, 128, 0, error))
    assert watch.collector.report().raw_data_summary["failed"] == 1


def test_samples_hold_reports_and_what_was_sent() -> None:
    watch = RoutingWatch(SystemClock(), Registry())
    timeline = Timeline(watch, kept=2)
    watch.decided(request(), decision([]))
    load = Load(running=3, cached_blocks=7, total_blocks=10)
    for at in (1.0, 2.0, 3.0):
        timeline.sample(at, ["w1", "w2"], {"w1": load}, views={"w1": "exact"}, waiting=4)
    assert [one.at for one in timeline.since()] == [2.0, 3.0]
    (last,) = timeline.since(2.0)
    assert last.waiting == 4
    assert (last.workers["w1"].cached_blocks, last.workers["w1"].sent) == (7, 1)
    assert (last.workers["w1"].routed, last.workers["w2"].view) == (0, "")
    timeline.sample(4.0, ["w2"], {}, views={}, waiting=0)
    assert not watch.routed


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=20), st.integers(1, 4))
def test_seen_prefixes_are_those_of_a_plain_set(prompts: list[list[int]], stride: int) -> None:
    seen = SeenPrefixes(stride=stride)
    plain: set[tuple[int, ...]] = set()
    for prompt in prompts:
        chain = [hash(tuple(prompt[: at + 1])) for at in range(len(prompt))]
        known = max(
            (at + 1 for at in range(len(prompt)) if tuple(prompt[: at + 1]) in plain), default=0
        )
        whole = len(prompt) // stride * stride
        assert seen.add(chain) == min(known // stride * stride, whole)
        plain.update(tuple(prompt[: at + 1]) for at in range(whole))


def test_seen_prefixes_are_bounded() -> None:
    seen = SeenPrefixes(kept=100, stride=1)
    for number in range(10_000):
        seen.add([number])
    assert len(seen._new) + len(seen._old) + len(seen._oldest) <= 303
    assert seen.add([9_999]) == 1
    assert seen.add([1]) == 0


def test_questions_and_answers_survive_the_wire() -> None:
    prompt = Prompt(100, [2**64 - 1, 0, 17])
    ask = decode_ask(encode_ask(request(), prompt, ("w3",)))
    assert ask.tried == ("w3",)
    again = request_of(ask, "r")
    assert read_asked(again) == prompt
    assert (again.choice, again.priority, again.stops.max_tokens) == (1, 2, 7)
    made = decision([1, 2], overlap_blocks=1, predicted_ttft_s=0.5, view="stale")
    answer = decode_answer(encode_answer(made))
    assert (answer.instance, answer.overlap_blocks, answer.view) == ("w1", 1, "stale")
    assert answer.predicted_ttft_s == 0.5
