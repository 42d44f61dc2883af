"""The stages of a model's pipeline: how they are opened, and which of them a request passes."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from functools import partial
from importlib import metadata
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.processes import Open, Processes

from dynamo.core.context import Context
from dynamo.core.errors import ConfigError, NoWorkers, WorkerFailed
from dynamo.core.reply import Operator, Reply, SendRequest
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.tasks import BackgroundTasks
from dynamo.core.values import GenerateRequest, SamplingParams, StopConditions
from dynamo.inference.mock.engine import make_mock_engine
from dynamo.inference.worker import EngineWorker
from dynamo.models.card import ModelCard
from dynamo.models.file_cache import FileRef
from dynamo.operations.replay import cluster
from dynamo.runtime import DistributedRuntime
from dynamo.runtime.calls.failure_detector import FailureDetector
from dynamo.runtime.supervisors import SupervisorRecord, supervisor_record_key
from dynamo.scheduling.admission import Admission
from dynamo.scheduling.migration import Migration
from dynamo.scheduling.pipeline import OperatorInputs, StagedPipeline
from dynamo.scheduling.router import WorkerRouter
from dynamo.services.model_pipeline import (
    REQUEST_ORDER,
    ROUTER_PROCESS_STAGES,
    STAGES,
    ModelPipeline,
    Stage,
    open_model_pipeline,
    open_router_process_pipeline,
)
from dynamo.services.routing import ProcessRouting
from dynamo.testing.fakes import CollectedReply

REQUEST = GenerateRequest(
    "r", "m", b"\1\0\0\0" * 64, SamplingParams(), StopConditions(3), priority=0
)
STAGE_NAMES = [stage.name for stage in STAGES]


@pytest.fixture(params=["round_robin", "adaptive", "kv"])
async def open_process(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """`await open_process()`: a runtime of a process that routes by the mode of the test."""
    settings = Settings()
    router = replace(settings.router, mode=request.param)
    processes = Processes(settings=replace(settings, router=router))
    yield processes.open
    await processes.close()


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(b"{}")
    file = FileRef(path.name, hashlib.sha256(b"{}").hexdigest(), 2, str(path))
    return ModelCard(names=("m",), context_tokens=4096, vocab_size=1000, tokenizer=file)


async def start_worker(
    runtime: DistributedRuntime, card: ModelCard, supervisor: str = ""
) -> EngineWorker:
    runtime.supervisor = supervisor
    settings = EngineSettings(kind="mock", speedup_ratio=1000)
    engine = make_mock_engine(settings, range(100, 900), runtime.clock, context_tokens=4096)
    worker = EngineWorker(engine, card)
    await worker.attach(runtime)
    return worker


def failure_detector(runtime: DistributedRuntime) -> FailureDetector:
    return FailureDetector(runtime.requests, runtime.clock, runtime.tasks, runtime.metrics)


async def passed_stages(pipeline: ModelPipeline) -> list[str]:
    """Send one request and return the stages whose `send` was called, in order of first call."""
    senders = [name for name in STAGE_NAMES if hasattr(getattr(pipeline, name), "send")]
    names = {type(getattr(pipeline, name)).send.__code__: name for name in senders}
    passed: list[str] = []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        name = names.get(frame.f_code)
        if event == "call" and name is not None and name not in passed:
            passed.append(name)

    sys.setprofile(note)
    try:
        await pipeline.send(REQUEST, Context("r"), reply := CollectedReply())
    finally:
        sys.setprofile(None)
    assert len(reply.ids) == 3
    return passed


async def test_a_request_passes_the_stages_of_request_order(
    open_process: Open, card: ModelCard
) -> None:
    worker = await start_worker(await open_process(), card)
    runtime = await open_process()
    pipeline = await open_model_pipeline(
        runtime, failure_detector(runtime), ProcessRouting(runtime), card
    )
    await pipeline.client.wait_for_instances(1)
    assert await passed_stages(pipeline) == list(REQUEST_ORDER)
    await pipeline.close()
    await worker.close()


async def test_requests_wait_for_a_worker_that_a_supervisor_in_discovery_starts(
    open_runtime: Open, card: ModelCard
) -> None:
    supervisor = (await open_runtime()).discovery
    record = msgspec.json.encode(SupervisorRecord({"worker": 1}, {"worker": 5.0}))
    await supervisor.put(supervisor_record_key("s"), record)
    await start_worker(first := await open_runtime(), card, "s/worker")
    runtime = await open_runtime()
    detector = failure_detector(runtime)
    pipeline = await open_model_pipeline(runtime, detector, ProcessRouting(runtime), card)
    await first.shutdown(0)
    replies = [CollectedReply() for _ in range(16)]
    async with BackgroundTasks() as tasks:
        for number, reply in enumerate(replies):
            request = replace(REQUEST, choice=number)
            tasks.start(pipeline.send(request, Context("r"), reply))
        await asyncio.sleep(0.02)
        assert not any(reply.ids for reply in replies)
        worker = await start_worker(await open_runtime(), card, "s/worker")
        await tasks.join()
    assert all(len(reply.ids) == 3 for reply in replies)

    await supervisor.put(supervisor_record_key("s"), msgspec.json.encode(SupervisorRecord()))
    await worker.close()
    with pytest.raises(NoWorkers, match="no worker serves this model now"):
        await pipeline.send(REQUEST, Context("r"), CollectedReply())
    await pipeline.close()


async def test_each_row_opens_the_stage_of_its_name(open_process: Open, card: ModelCard) -> None:
    runtime = await open_process()
    pipeline = ModelPipeline(runtime, ProcessRouting(runtime), card, failure_detector(runtime))
    for stage in STAGES:
        assert stage.name not in vars(pipeline)
        await stage.open(pipeline)
        assert stage.name in vars(pipeline)
    assert set(REQUEST_ORDER) < set(STAGE_NAMES)
    await pipeline.close()


def test_a_replay_opens_stages_of_the_same_table_in_the_same_order() -> None:
    serving = {stage.name: stage.open for stage in STAGES}
    replayed = {stage.name: stage.open for stage in cluster.STAGES}
    assert list(replayed) == [name for name in STAGE_NAMES if name in replayed]
    assert {name for name in replayed if replayed[name] is serving[name]} >= {"ledger"}
    assert issubclass(cluster.ReplayCluster, StagedPipeline)
    assert issubclass(ModelPipeline, StagedPipeline)


async def test_frontends_watch_prefill_workers(open_process: Open, card: ModelCard) -> None:
    runtime = await open_process()
    pipeline = await open_model_pipeline(
        runtime, failure_detector(runtime), ProcessRouting(runtime), card
    )
    assert pipeline.prefill_client.on_instance_busy is not None
    await pipeline.close()
    assert pipeline.prefill_client.on_instance_busy is None


async def test_a_router_process_opens_what_chooses_a_worker(
    open_process: Open, card: ModelCard
) -> None:
    runtime = await open_process()
    pipeline = await open_router_process_pipeline(runtime, ProcessRouting(runtime), card)
    names = ["client", "ledger", "policy", "loads"]
    assert [stage.name for stage in ROUTER_PROCESS_STAGES] == names
    assert [name for name in STAGE_NAMES if name in vars(pipeline)] == names
    await pipeline.close()


async def test_load_reports_reach_policy_and_admission(open_process: Open, card: ModelCard) -> None:
    serving = await open_process()
    worker = await start_worker(serving, card)
    runtime = await open_process()
    detector = failure_detector(runtime)
    pipeline = await open_model_pipeline(runtime, detector, ProcessRouting(runtime), card)
    readers = (pipeline.ledger, pipeline.policy, pipeline.admission)
    listeners = [reader.on_load_report for reader in readers]
    if pipeline.policy.predicts:
        states = pipeline.ledger.workers
        await pipeline.client.wait_for_instances(1)
        while states[serving.instance_id].load is None:
            await asyncio.sleep(0.005)
    while serving.instance_id not in pipeline.loads.loads:
        await asyncio.sleep(0.005)
    assert pipeline.load_listeners == listeners
    await pipeline.close()
    await worker.close()


async def test_a_stage_that_fails_closes_those_before_it(
    open_runtime: Open, card: ModelCard
) -> None:
    runtime = await open_runtime()
    closed: list[str] = []

    async def open_first(pipeline: ModelPipeline) -> None:
        pipeline.resources.callback(closed.append, "first")

    async def open_second(pipeline: ModelPipeline) -> None:
        pipeline.resources.callback(closed.append, "second")

    async def fail(pipeline: ModelPipeline) -> None:
        raise ConfigError("unknown mode")

    pipeline = ModelPipeline(runtime, routing := ProcessRouting(runtime), card)
    stages = [Stage("a", open_first, ""), Stage("b", open_second, ""), Stage("c", fail, "")]
    with pytest.raises(ConfigError):
        await pipeline.open(stages)
    assert closed == ["second", "first"]
    assert routing.view_modes() == {}


class NotingOperator(Operator):
    """Notes its name in `passed` for each request, and in `closed` when its model is closed."""

    passed: ClassVar[list[str]] = []
    closed: ClassVar[list[str]] = []

    def __init__(self, name: str) -> None:
        self.name = name

    async def send(
        self, request: GenerateRequest, context: Context, reply: Reply, call_next: SendRequest
    ) -> None:
        self.passed.append(self.name)
        await call_next(request, context, reply)


async def open_noting(name: str, inputs: OperatorInputs) -> Operator:
    assert inputs.card.names == ("m",)
    inputs.resources.callback(NotingOperator.closed.append, name)
    return NotingOperator(name)


def install_operators(monkeypatch: pytest.MonkeyPatch, **factories: Any) -> None:
    """Install entry points that load these factories, and note built-in operators, too."""

    def entry_points(group: str) -> list[Any]:
        assert group == "dynamo.operators"
        rows = factories.items()
        return [SimpleNamespace(name=n, value="x:y", load=lambda f=f: f) for n, f in rows]

    monkeypatch.setattr(metadata, "entry_points", entry_points)
    NotingOperator.passed.clear()
    NotingOperator.closed.clear()
    for kind in (Admission, Migration):

        def send(*args: Any, kind: Any = kind, original: Any = kind.send) -> Any:
            NotingOperator.passed.append(kind.__name__.lower())
            return original(*args)

        monkeypatch.setattr(kind, "send", send)


async def open_with_operators(processes: Processes, card: ModelCard) -> ModelPipeline:
    runtime = await processes.open()
    detector = failure_detector(runtime)
    return await open_model_pipeline(runtime, detector, ProcessRouting(runtime), card)


def processes_with_operators(*names: str) -> Processes:
    settings = Settings()
    return Processes(settings=replace(settings, router=replace(settings.router, operators=names)))


@pytest.mark.parametrize(
    ("listed", "passed"),
    [
        ((), ["admission", "migration"]),
        (("b", "a"), ["b", "a", "admission", "migration"]),
        (("admission", "a"), ["admission", "a", "migration"]),
        (("admission", "migration", "a"), ["admission", "migration", "a", "a"]),
        (("b", "admission", "a", "migration"), ["b", "admission", "a", "migration"]),
    ],
)
async def test_installed_operators_stand_where_the_setting_lists_them(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...], passed: list[str]
) -> None:
    names = ("a", "b", "not_listed")
    install_operators(monkeypatch, **{name: partial(open_noting, name) for name in names})
    send, failures = WorkerRouter.send, [WorkerFailed("gone")]

    async def fail_once(*args: Any) -> None:
        if failures:
            raise failures.pop()
        await send(*args)

    monkeypatch.setattr(WorkerRouter, "send", fail_once)
    processes = processes_with_operators(*listed)
    pipeline = await open_with_operators(processes, card)
    worker = await start_worker(await processes.open(), card)
    await pipeline.client.wait_for_instances(1)
    await pipeline.send(REQUEST, Context("r"), reply := CollectedReply())
    assert (len(reply.ids), NotingOperator.passed) == (3, passed)
    await pipeline.close()
    own = [name for name in listed if name in names]
    assert NotingOperator.closed == own[::-1]
    await worker.close()
    await processes.close()


async def test_without_listed_operators_no_entry_point_is_looked_up(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metadata, "entry_points", pytest.fail)
    processes = processes_with_operators()
    pipeline = await open_with_operators(processes, card)
    await pipeline.close()
    await processes.close()


async def test_an_operator_of_the_wrong_type_is_refused(
    card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def open_nothing(inputs: OperatorInputs) -> Any:
        return "nothing"

    install_operators(monkeypatch, a=open_nothing)
    processes = processes_with_operators("a")
    with pytest.raises(ConfigError, match="token operator 'a' is a str and no Operator"):
        await open_with_operators(processes, card)
    await processes.close()
