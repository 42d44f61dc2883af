"""A round of tuning on a deployment of tiny processes whose record a test writes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.support.supervisors import serving

from dynamo.core.clock import SystemClock
from dynamo.core.errors import ConfigError
from dynamo.core.settings import Settings
from dynamo.core.settings.schema_planner import TunerSettings
from dynamo.operations.planner.values import Promise
from dynamo.operations.tuner.outcome import Comparison, Figures
from dynamo.operations.tuner.rounds import RecordTail, live_requests, run_round
from dynamo.operations.tuner.search import Recommendation
from dynamo.operations.tuner.tuner import AutoTuner
from dynamo.operations.tuner.verdict import TrialRules, TrialVerdict
from dynamo.runtime.deployment import Deployment
from dynamo.runtime.processes.child_spec import ChildSpec
from dynamo.runtime.processes.control import RunningTrial
from dynamo.runtime.processes.supervisor import Supervisor
from dynamo.scheduling.request_record import RequestRecord

CHILD = """
import json, os, signal
os.read(0, 1 << 20)
report = {"state": "ready", "key": f"/workers/{os.getpid()}"}
os.write(0, json.dumps(report).encode() + b"\\n")
signal.pause()
"""
KEY = "engine.max_num_seqs"
BEGIN_S, PERIOD_S = 1e9, 300.0
TRIAL = TrialRules(Promise(1.0, 100.0), PERIOD_S, 0.05)


class PeriodClock(SystemClock):
    """A clock on which a period has passed after two readings."""

    def __init__(self) -> None:
        super().__init__()
        self._readings = 0

    def wall(self) -> float:
        self._readings += 1
        return BEGIN_S if self._readings <= 2 else BEGIN_S + PERIOD_S


@pytest.fixture
def supervisor(tmp_path: Path) -> Supervisor:
    deployment = Deployment("test", tmp_path / "test")
    command = (sys.executable, "-S", "-c", CHILD)
    specs = [
        ChildSpec(role="worker", name=f"worker-{number}", settings=Settings(), command=command)
        for number in (1, 2)
    ]
    settings = Settings()
    runtime = replace(settings.runtime, discovery=deployment.discovery_url)
    return Supervisor(specs, deployment, replace(settings, runtime=runtime))


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "record").mkdir()
    return tmp_path / "record"


def row(second: int, worker: str, e2e_ms: float, end: str = "") -> bytes:
    at_ms = (BEGIN_S + second) * 1e3
    return msgspec.json.encode(
        RequestRecord(at_ms, 500, 50, ttft_ms=100.0, e2e_ms=e2e_ms, worker=worker, end=end)
    )


@pytest.mark.parametrize(("e2e_ms", "seqs"), [(500.0, [64, 64]), (2000.0, [0, 0])])
async def test_a_round_ends_with_one_setting_everywhere(
    supervisor: Supervisor,
    record: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    e2e_ms: float,
    seqs: list[int],
) -> None:
    async def wait(trial: RunningTrial, seconds: float) -> None:
        assert seconds == pytest.approx(5.0)
        rows = [
            row(second, *(("other", 1000.0 + second % 7), (trial.instance, e2e_ms))[second % 2])
            for second in range(300)
        ]
        (record / "frontend-1-00001.jsonl").write_bytes(b"\n".join(rows) + b"\n")

    monkeypatch.setattr(RunningTrial, "wait", wait)
    async with serving(supervisor):
        folder = tmp_path / "test"
        verdict = await run_round(folder, record, "worker", {KEY: 64}, TRIAL, PeriodClock())
        assert verdict.keep == (seqs == [64, 64])
        children = supervisor.children
        assert [child.spec.settings.engine.max_num_seqs for child in children] == seqs


async def test_a_round_that_ends_by_itself_raises_its_reason(
    supervisor: Supervisor, record: Path, tmp_path: Path
) -> None:
    async with serving(supervisor):
        with pytest.raises(ConfigError, match=r"engine\.max_num_seqs = -1"):
            await run_round(tmp_path / "test", record, "worker", {KEY: -1}, TRIAL, PeriodClock())


def test_the_record_is_read_from_a_time_on(record: Path) -> None:
    path = record / "frontend-1-00001.jsonl"
    path.write_bytes(row(-5, "w", 1.0) + b"\n" + row(1, "w", 1.0) + b"\n" + b'{"timest')
    tail = RecordTail(record, BEGIN_S)
    assert [each.timestamp for _, each in tail.read()] == [(BEGIN_S + 1) * 1e3]
    with path.open("ab") as file:
        file.write(b'amp": 1}\n' + row(2, "w", 1.0) + b"\n")
    rows = tail.read()
    assert [(name, each.timestamp) for name, each in rows] == [("frontend-1", (BEGIN_S + 2) * 1e3)]
    assert tail.read() == []


def test_requests_of_the_record_belong_to_a_worker_or_a_frontend() -> None:
    rows = [
        ("frontend-1", msgspec.json.decode(each, type=RequestRecord))
        for each in (
            row(1, "w-1", 900.0),
            row(2, "w-2", 900.0, "worker_failed"),
            row(3, "w-1", 900.0, "cancelled"),
            row(4, "", 1.0, "overloaded"),
        )
    ]
    first, second = live_requests(rows, "w-2")
    assert (first.tried, first.e2e_s, second.tried, second.e2e_s) == (False, 0.9, True, None)
    assert all(each.tried for each in live_requests(rows, "frontend-1"))


FIGURES = Figures(1.0, 0.0, 1.0, 1.0)
ADVICE = Recommendation(
    {KEY: 16, "router.policy": "predicted"},
    {KEY: 64, "router.policy": "block_cost"},
    Comparison(0.5, 0.4, 0.6, 1.0),
    FIGURES,
    FIGURES,
)


async def test_a_recommendation_is_tried_in_a_round_for_each_kind() -> None:
    rounds = []

    async def round_of(kind: str, values: object) -> TrialVerdict:
        rounds.append((kind, values))
        return TrialVerdict(keep=True, why="")

    tuner = AutoTuner(TunerSettings(), run_round=round_of)
    assert len(await tuner.apply(ADVICE)) == 2
    assert rounds == [("worker", {KEY: 64}), ("frontend", {"router.policy": "block_cost"})]


async def test_a_tuner_without_a_record_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="no record to search"):
        await AutoTuner().generate_recommendations({}, [])
    with pytest.raises(ConfigError, match="no deployment"):
        await AutoTuner().apply(ADVICE)
