"""Ranks are workers: whatever counts requests or predicts times names them as the engines do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.property.named_cluster import BLOCK, CheckedLog, Fleet, Frontend, NamedCluster
from tests.support.invariants import check_ledger

from dynamo.core.context import Context
from dynamo.core.errors import Overloaded
from dynamo.core.hashing import TOKEN_BYTES
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import (
    GenerateRequest,
    SamplingParams,
    StopConditions,
)
from dynamo.core.virtual_time import VirtualClock, run_in_virtual_time
from dynamo.operations.replay.trace import TraceBlockConverter, TraceRequest
from dynamo.scheduling.workers.ledger import Ledger
from dynamo.scheduling.workers.slots import MAX_REPORT_AGE_S

LIMIT_S = 2.0
LONG_TOKENS = 6_000
"""A prompt of this length takes 1.8 s."""
REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 1),  # the frontend
        st.sampled_from([30, 400, 2_000]),  # the length of the prompt
        st.integers(1, 80),  # the length of the answer
        st.integers(0, 300),  # milliseconds until the next request
        st.sampled_from([None, None, None, 0.05, 0.5]),  # seconds after which its client leaves
        st.sampled_from([None, None, None, 0, 1, 20]),  # tokens after which its worker fails
    ),
    min_size=1,
    max_size=16,
)
FLEETS = st.tuples(
    st.integers(1, 3),  # ranks
    st.integers(1, 2),  # instances of each role
    st.sampled_from(
        [("both", "auto"), ("both", "flexible")]
        + [("apart", mode) for mode in ("always", "predicted", "thresholds", "flexible")]
    ),
)


class Trial:
    """A fleet under requests of two frontends, which checks all counts by worker name."""

    def __init__(
        self, fleet: Fleet, cluster: NamedCluster, frontends: Sequence[Frontend], clock: Any
    ) -> None:
        self.fleet, self.cluster, self.frontends, self.clock = fleet, cluster, frontends, clock
        self._rows = 0

    async def send(
        self,
        frontend: Frontend,
        prompt: int,
        answer: int,
        timeout_s: float | None = None,
        fails_after: int | None = None,
    ) -> None:
        """Send a request and wait for its end; its client leaves after `timeout_s`, and its first
        worker fails after so many tokens."""
        row, log = self._rows, self.cluster.log
        self._rows += 1
        turn = TraceRequest(row, prompt, answer)
        reply = log.on_arrival(turn)
        if fails_after is not None:
            frontend.counts.failures[str(row)] = fails_after
        ids, stops = bytes(prompt * TOKEN_BYTES), StopConditions(answer)
        request = GenerateRequest(str(row), "m", ids, SamplingParams(), stops)
        try:
            async with asyncio.timeout(timeout_s):
                await frontend.send(request, Context(str(row)), reply)
            frontend.first_token_s[str(row)] = reply.first_token_s - reply.arrived_s
        except Overloaded:
            frontend.shed += 1
        except TimeoutError:
            pass
        finally:
            log.on_ended(turn)

    async def check(self) -> None:
        """Check all names and counts, once the events that are on their way have arrived."""
        for _ in range(10):
            await asyncio.sleep(0)
        total: Counter[str] = Counter()
        for frontend in self.frontends:
            total += frontend.counts.active
            self._check_frontend(frontend)
        for ledger in self.cluster.states:
            check_ledger(ledger)
            assert count_active(ledger) == total

    def _check_frontend(self, frontend: Frontend) -> None:
        ledger, capacity = frontend.ledger, frontend.admission.capacity
        check_ledger(ledger)
        assert [worker.name for worker in capacity.workers] == self.fleet.names("both", "decode")
        names = self.fleet.names("both", "decode", "prefill")
        assert {worker.name for worker in ledger.workers.workers} == {*names}
        reserved = {worker.name: worker.slots.occupied for worker in ledger.workers.all()}
        assert +Counter(reserved) == +frontend.counts.reserved
        own = Counter(placed.worker.name for placed in ledger.requests.values())
        assert own == +frontend.counts.active


def count_active(ledger: Ledger) -> Counter[str]:
    """Return the number of requests by worker, without those that have none."""
    return +Counter({worker.name: len(worker.active) for worker in ledger.workers.workers})


@asynccontextmanager
async def open_trial(
    clock: VirtualClock, fleet: Fleet, mode: str, disaggregation: str, limit_s: float
) -> AsyncIterator[Trial]:
    rules = DisaggregationSettings(mode=disaggregation, prefill_length_threshold=100)
    routing = RouterSettings(mode="kv" if mode == "remote" else mode, disaggregation=rules)
    workers = fleet.make_workers(transfer=disaggregation != "auto")
    log = CheckedLog(clock, TraceBlockConverter(BLOCK, BLOCK), BLOCK)
    log.names, log.sent_to = fleet.names("both", "decode", "prefill"), {}
    cluster = NamedCluster(workers, routing, log, clock, Random(1))
    cluster.log, cluster.remote = log, mode == "remote"
    async with cluster:
        clock.on_time_advanced(cluster.deliver_computed_tokens)
        limits = RouterSettings(ttft_slo=limit_s, disaggregation=rules)
        frontends = await cluster.open_frontends(limits)
        await clock.sleep(0.5)
        yield Trial(fleet, cluster, frontends, clock)


async def send_all(trial: Trial, requests: Sequence[Any]) -> None:
    """Send requests, and check all counts while they are in flight and after their ends."""
    async with BackgroundTasks() as tasks:
        for number, prompt, answer, pause_ms, timeout_s, fails_after in requests:
            frontend = trial.frontends[number]
            tasks.start(trial.send(frontend, prompt, answer, timeout_s, fails_after))
            await trial.clock.sleep(pause_ms * 1e-3 + 0.000_37)
            await trial.check()
        await tasks.join()
    await trial.clock.sleep(1.0)
    await trial.check()
    await trial.clock.sleep(MAX_REPORT_AGE_S)  # no report tells of requests that have ended
    assert all(not +frontend.counts.reserved for frontend in trial.frontends)


async def overload(trial: Trial) -> None:
    """Send many long prompts at once: each rank answers one or two of them, the rest are shed."""
    frontend, fleet = trial.frontends[0], trial.fleet
    ranks = len(fleet.names("both", "prefill", "decode"))
    for _ in range(4 * ranks):  # the time of long prompts is learnt
        await trial.send(frontend, LONG_TOKENS, 4)
    frontend.first_token_s.clear()
    async with BackgroundTasks() as tasks:
        for _ in range(8 * ranks):
            tasks.start(trial.send(frontend, LONG_TOKENS, 4))
            await trial.clock.sleep(0.001)
            await trial.check()
        await tasks.join()
    assert frontend.shed >= 6 * ranks
    assert max(frontend.first_token_s.values()) < 2 * LIMIT_S


@pytest.mark.parametrize("limit_s", [LIMIT_S, inf])
@pytest.mark.parametrize("mode", ["round_robin", "least_loaded", "adaptive", "kv", "remote"])
@settings(max_examples=8)
@given(fleet=FLEETS, requests=REQUESTS)
@example(
    fleet=(2, 1, ("apart", "flexible")),
    requests=[(0, 2_000, 1, 0, None, None), (0, 30, 1, 0, None, None)],
)
@example(  # the last report, 0.9 s before the long prompts, has a request of the other frontend
    fleet=(1, 2, ("both", "auto")),
    requests=[
        *[(1, 30, 52, 108, None, None), (0, 400, 42, 60, None, None)],
        *[(0, 30, 22, 100, None, 0), (0, 30, 42, 60, None, None), (0, 30, 10, 206, None, None)],
        *[(0, 30, 19, 225, None, None), (1, 2_000, 57, 173, None, 1), (0, 30, 27, 214, None, None)],
        *[(0, 30, 1, 163, None, None), (0, 30, 8, 254, None, None), (0, 400, 58, 208, None, None)],
    ],
)
@example(  # a client leaves, and the engine ends the step of its prompt before the next one's
    fleet=(2, 2, ("apart", "always")),
    requests=[(0, 30, 1, 300, None, None)] * 3
    + [(0, 2_000, 1, 73, 0.05, None), (0, 400, 1, 0, None, None)],
)
def test_ranks_are_workers_wherever_they_are_named(
    mode: str, limit_s: float, fleet: tuple[int, int, tuple[str, str]], requests: Sequence[Any]
) -> None:
    ranks, instances, (roles, disaggregation) = fleet
    role_names = ("prefill", "decode") if roles == "apart" else ("both",)

    async def main(clock: VirtualClock) -> None:
        named = Fleet(ranks, [role for role in role_names for _ in range(instances)])
        async with open_trial(clock, named, mode, disaggregation, limit_s) as trial:
            await send_all(trial, requests)
            if limit_s < inf:
                await overload(trial)

    run_in_virtual_time(main)
