"""Metrics of decisions, the history of prefixes, and the router messages."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.runtime.calls.instances import Instance
from dynamo.scheduling.router.attempt import Attempt
from dynamo.scheduling.router.decision_metrics import DecisionMetrics, PrefixHistory
from dynamo.scheduling.router.policies.remote_messages import (
    decode_query,
    decode_reply,
    encode_query,
    encode_reply,
    read_query_prompt,
    request_from_query,
)
from dynamo.scheduling.router.policy import Decision
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.prompt import Prompt
from dynamo.telemetry import Registry
from dynamo.testing.fakes import CollectedReply


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(
        name, "tiny", b"", SamplingParams(), StopConditions(7), choice=1, priority=2
    )


def decision(hashes: list[int], worker: str = "w1", **fields: Any) -> Decision:
    instance = Instance(worker, "tcp://", "dynamo", "worker", "generate")
    return Decision(
        instance, "predicted", 2, prompt_blocks=len(hashes), prompt=Prompt(0, hashes), **fields
    )


def counters(registry: Registry) -> dict[str, float]:
    lines = [line for line in registry.render().splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def attempt(decision: Decision, cached_tokens: int = 0) -> Attempt:
    ledger = Ledger()
    worker = ledger.workers.at(decision.instance, None)
    placed = ledger.place("r/0/0", worker, Prompt(128, ()), new_tokens=128)
    ledger.first_token(placed)
    started = Attempt(CollectedReply(), placed, ledger, decision=decision)
    started.cached_tokens = cached_tokens
    return started


def test_seen_reachable_and_hit_blocks_are_counted() -> None:
    registry = Registry()
    metrics = DecisionMetrics(registry)
    hashes = list(range(100, 108))
    first = attempt(decision(hashes))
    second = attempt(decision(hashes, "w2", overlap_blocks=2, best_overlap_blocks=6), 32)
    for each in (first, second):
        metrics.on_attempt_started(each)
        metrics.on_attempt_ended(each)
    values = counters(registry)
    assert values["dynamo_router_prompt_blocks_total"] == 16
    assert values["dynamo_router_seen_blocks_total"] == 8
    assert values["dynamo_router_reachable_blocks_total"] == 6
    assert values["dynamo_router_hit_blocks_total"] == 2
    assert values["dynamo_router_cached_tokens_total"] == 32
    assert (first.seen_blocks, second.seen_blocks) == (0, 8)


@given(st.lists(st.lists(st.integers(0, 2), max_size=12), max_size=20), st.integers(1, 4))
def test_prefix_history_equals_a_set_of_prefixes(prompts: list[list[int]], stride: int) -> None:
    seen = PrefixHistory(stride=stride)
    prefixes: set[tuple[int, ...]] = set()
    for prompt in prompts:
        chain = [hash(tuple(prompt[: at + 1])) for at in range(len(prompt))]
        known = max(
            (at + 1 for at in range(len(prompt)) if tuple(prompt[: at + 1]) in prefixes), default=0
        )
        whole = len(prompt) // stride * stride
        assert seen.add(chain) == min(known // stride * stride, whole)
        prefixes.update(tuple(prompt[: at + 1]) for at in range(whole))


def test_prefix_history_is_bounded() -> None:
    seen = PrefixHistory(generation_size=100, stride=1)
    for number in range(10_000):
        seen.add([number])
    assert len(seen._new) + len(seen._old) + len(seen._oldest) <= 303
    assert seen.add([9_999]) == 1
    assert seen.add([1]) == 0


def test_queries_and_replies_survive_encoding() -> None:
    prompt = Prompt(100, [2**64 - 1, 0, 17])
    query = decode_query(encode_query(request(), prompt, ("w3",)))
    assert query.excluded == ("w3",)
    again = request_from_query(query, "r")
    assert read_query_prompt(again) == prompt
    assert (again.choice, again.priority, again.stops.max_tokens) == (1, 2, 7)
    decided = decision([1, 2], overlap_blocks=1, predicted_ttft_s=0.5, view="stale")
    reply = decode_reply(encode_reply(decided))
    assert (reply.instance, reply.overlap_blocks, reply.view) == ("w1", 1, "stale")
    assert reply.predicted_ttft_s == 0.5
