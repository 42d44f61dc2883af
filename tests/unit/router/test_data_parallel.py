"""Data-parallel ranks: each has a worker state, a cache and placements of its own."""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.processes import Open, send_through
from tests.unit.router.fake_cluster import ENGINE, FakeCluster, instance

from dynamo.core.clock import SystemClock
from dynamo.core.context import Context
from dynamo.core.errors import ConfigError
from dynamo.core.hashing import block_hashes
from dynamo.core.reply import LogprobsPerToken, Reply
from dynamo.core.settings.schema_engine import EngineSettings as EngineSettings
from dynamo.core.values import (
    Finish,
    GenerateRequest,
    Load,
    SamplingParams,
    Started,
    StopConditions,
    sum_loads,
)
from dynamo.inference.data_parallel import DataParallelEngine
from dynamo.inference.engine import BatchedEngine
from dynamo.inference.load_publisher import encode_load
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.runtime import DistributedRuntime
from dynamo.scheduling.router.costs.alternatives import CompositeCost
from dynamo.scheduling.router.factory import open_policy
from dynamo.scheduling.router.policies.kv import KvPolicy
from dynamo.scheduling.router.policy import PolicyInputs
from dynamo.scheduling.workers.ledger import Ledger

TWO_RANKS = {"engine": ENGINE | {"data_parallel": 2}}


def mock(**settings: int) -> BatchedEngine:
    engine_settings = EngineSettings(kind="mock", **settings)
    return make_mock_engine(
        engine_settings, range(100, 900), SystemClock(), context_tokens=4096, vocab_size=1000
    )


def prompt(first: int, blocks: int = 100) -> bytes:
    return array("I", ((first + at) % 1000 for at in range(16 * blocks))).tobytes()


def request(name: str, ids: bytes, rank: int | None = None) -> GenerateRequest:
    return GenerateRequest(
        name, "m", ids, SamplingParams(), StopConditions(max_tokens=2), rank=rank
    )


class RecordingReply(Reply):
    cached = 0

    def begin(self, started: Started) -> None:
        self.cached = started.cached_tokens

    def tokens(self, ids: Sequence[int], logprobs: LogprobsPerToken | None = None) -> bool:
        return True

    def finish(self, end: Finish) -> None:
        pass


def test_every_rank_has_a_state_with_its_share() -> None:
    cluster = FakeCluster(0)
    cluster.worker_states.update_instances({"a": instance("a", **TWO_RANKS), "b": instance("b")})
    assert [
        (worker_state.name, worker_state.rank) for worker_state in cluster.worker_states.workers
    ] == [
        ("a/0", 0),
        ("a/1", 1),
        ("b", None),
    ]
    infos = [worker_state.engine_info for worker_state in cluster.worker_states.workers]
    assert [info and (info.num_blocks, info.max_num_seqs) for info in infos] == [
        (2048, 50),
        (2048, 50),
        (4096, 100),
    ]
    cluster.worker_states.update_instances({"b": instance("b")})
    assert [state.name for state in cluster.worker_states.workers] == ["b"]
    assert not cluster.worker_states.ranks_of("a")


def test_a_rank_is_chosen_by_its_cache_and_load() -> None:
    cluster = FakeCluster(0)
    cluster.worker_states.update_instances({"a": instance("a", **TWO_RANKS), "b": instance("b")})
    hashes = list(range(1, 101))
    cluster.view.caches["a/1"] = set(hashes)
    assert cluster.route(1600, hashes) == "a/1"
    assert cluster.route(1600, hashes, excluded=frozenset("a")) == "b"
    cluster.add_prefill("a/1", 60_000)
    cluster.add_prefill("b", 60_000)
    assert cluster.route(1600, list(range(500, 600))) == "a/0"
    cluster.submit(16, excluded=frozenset("ab"))
    assert len(cluster.solver.pop_unplaceable()) == 1


def test_a_load_report_reaches_the_state_of_each_rank() -> None:
    cluster = FakeCluster(0)
    cluster.worker_states.update_instances({"a": instance("a", **TWO_RANKS), "b": instance("b")})
    ranks = (Load(active_blocks=1, total_blocks=4), Load(active_blocks=3, total_blocks=4))
    report = msgspec.msgpack.decode(encode_load(replace(sum_loads(ranks), ranks=ranks)), type=Load)
    assert (report.active_blocks, report.total_blocks) == (4, 8)
    cluster.worker_states.on_load_report("a", report, cluster.now)
    cluster.worker_states.on_load_report("b", ranks[1], cluster.now)
    assert [worker_state.kv_cache_usage() for worker_state in cluster.worker_states.workers] == [
        0.25,
        0.75,
        0.75,
    ]
    costs = CompositeCost()
    pending = cluster.make_request(16)
    memory = [
        costs.terms(pending, worker_state, cluster.now)["memory"]
        for worker_state in cluster.worker_states.workers
    ]
    assert memory == pytest.approx([-0.075, -0.025, -0.025])


async def test_requests_reach_their_rank() -> None:
    engine = DataParallelEngine([mock(), mock()])
    info = await engine.start()
    assert (info.data_parallel, info.num_blocks) == (2, 2 * 16_384)
    for _ in range(2):
        await engine.generate(request("r", prompt(0), rank=1), Context("r"), RecordingReply())
    await engine.generate(request("r", prompt(0), rank=0), Context("r"), reply := RecordingReply())
    assert reply.cached == 0
    assert [mock_of(engine, rank).counters.requests for rank in (0, 1)] == [1, 2]
    assert engine.report_load().total_blocks == 2 * 16_384
    assert [rank.total_blocks for rank in engine.report_load().ranks] == [16_384, 16_384]
    await engine.stop()
    with pytest.raises(ConfigError):
        await DataParallelEngine([mock(), mock(num_blocks=8)]).start()


def mock_of(engine: DataParallelEngine, rank: int) -> BatchedEngine:
    rank_engine = engine.ranks[rank]
    assert isinstance(rank_engine, BatchedEngine)
    return rank_engine


@pytest.fixture
async def runtime(open_runtime: Open) -> DistributedRuntime:
    return await open_runtime()


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    file = FileRef("tokenizer.json", hashlib.sha256(b"{}").hexdigest(), 2, str(path))
    return ModelCard(names=("m",), context_tokens=4096, vocab_size=1000, tokenizer=file)


async def test_events_and_placements_use_the_same_rank_names(
    runtime: DistributedRuntime, card: ModelCard
) -> None:
    """A repeated prompt goes to the same rank, whose KV events have the rank's name."""
    engine = DataParallelEngine([mock(), mock()])
    worker = EngineWorker(engine, card)
    await worker.attach(runtime)
    client = await runtime.endpoint("dynamo.worker.generate").client()
    await client.wait_for_instances(1)
    ledger = Ledger(runtime.clock, client)
    policy = await open_policy(
        PolicyInputs(
            runtime.settings.router, client, runtime.events, runtime.clock, ledger, block_tokens=16
        )
    )
    assert isinstance(policy, KvPolicy)
    view = policy.solver.view
    names = [worker_state.name for worker_state in policy.solver.worker_states.workers]
    assert names == [f"{runtime.instance_id}/{rank}" for rank in (0, 1)]
    send = send_through(client, policy, ledger=ledger)
    for rank in (0, 1):
        ids = prompt(1 + 400 * rank)
        await engine.generate(request("seed", ids, rank=rank), Context("seed"), RecordingReply())
        while view.find_overlaps(block_hashes(ids)).get(names[rank]) != 100:
            await asyncio.sleep(0)
    for rank in (1, 0, 1):
        ids = prompt(1 + 400 * rank)
        await send(request("again", ids), Context("again"), reply := RecordingReply())
        assert reply.cached >= 99 * 16
    assert [mock_of(engine, rank).counters.requests for rank in (0, 1)] == [2, 3]
    assert {view.get_mode(name) for name in names} == {"exact"}
    await policy.close()
    await worker.close()
