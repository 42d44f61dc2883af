"""Fitting a timing to measured runs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from dynamo.cli.foresight.calibrate import run as run_command
from dynamo.core.errors import ConfigError
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.timing.model import Timing, parse_timing
from dynamo.core.values import EngineInfo
from dynamo.inference.model_runner import StepPlan
from dynamo.operations.bench.bench_result import BenchResult
from dynamo.operations.bench.workload import LoadProfile, RequestShape
from dynamo.operations.calibrate import fit
from dynamo.operations.calibrate.fit import calibrate
from dynamo.operations.calibrate.measured import read_run
from dynamo.operations.latency_summary import LatencySummary, summarize_latencies
from dynamo.operations.replay.replay import Replay, ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.scheduling.request_record import RequestRecord

TRUE = Timing(c0=10.0, c1=0.05, c2=0.8, c3=0.002)


def plan_for(timing: Timing, workers: int = 1) -> ReplayPlan:
    engine = EngineInfo("mock", 16, 4096, 65_536, 32, 512)
    groups = [ReplayGroup(workers, engine, timing)]
    return ReplayPlan("t", ReplayWorkers(groups, "lru"), RouterSettings(), trace_block_tokens=16)


def measure(
    folder: Path, *, requests: int = 48, gap_s: float = 0.1, even: bool = False
) -> list[RequestRecord]:
    """Write the record of a run on an engine with the time of TRUE."""
    rng, now, conversations = Random(1), 0.0, []
    for row in range(requests):
        now += gap_s if even else rng.expovariate(1 / gap_s)
        lengths = (200, 20) if even else (rng.choice((50, 300, 900)), rng.randint(5, 60))
        conversations.append(TraceConversation(now, [TraceRequest(row, *lengths)]))
    _, log = Replay(plan_for(TRUE)).run(conversations)
    records = []
    for row, first_s, last_s in zip(log.rows, log.ttft_s, log.e2e_s, strict=True):
        (request,) = conversations[row].requests
        records.append(
            RequestRecord(
                1e12 + conversations[row].start_s * 1e3,
                request.prompt_tokens,
                request.output_tokens,
                ttft_ms=first_s * 1e3,
                e2e_ms=last_s * 1e3,
                worker="w",
            )
        )
    write(folder, records)
    return records


def write(folder: Path, records: list[RequestRecord]) -> None:
    lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    (folder / "frontend-00001.jsonl").write_bytes(lines)


def test_the_time_of_steps_is_recovered(tmp_path: Path) -> None:
    measure(tmp_path)
    calibration = calibrate([read_run(str(tmp_path), 1000)], plan_for(Timing(1.0, 1.0)))
    assert {metric for _, metric, *_ in calibration.tested} == {"TTFT", "TPOT", "E2E"}
    assert all(abs(mean) < 0.03 for *_, mean, _ in calibration.tested)
    for counts in ({"new_tokens": 300}, {"decode_seqs": 8, "decode_context": 3_000}):
        step = StepPlan([None] * counts.get("decode_seqs", 1), **counts)  # type: ignore[list-item]
        expected = TRUE.step_ms(step, 1)
        assert calibration.timing.step_ms(step, 1) == pytest.approx(expected, rel=0.15)


def test_equal_requests_one_at_a_time_do_not_tell_a_step_from_a_sequence(tmp_path: Path) -> None:
    measure(tmp_path, gap_s=5.0, even=True)
    with pytest.raises(ConfigError, match=r"cannot be told from"):
        calibrate([read_run(str(tmp_path), 1000)], plan_for(Timing(1.0, 1.0)))


def test_only_whole_answers_at_one_worker_count(tmp_path: Path) -> None:
    records = measure(tmp_path)
    changed = [replace(record, end="cancelled") for record in records[:5]]
    changed += [replace(record, moves=1) for record in records[5:8]]
    changed += [replace(record, ttft_ms=None, end="overloaded") for record in records[8:10]]
    write(tmp_path, changed + records[10:])
    run = read_run(str(tmp_path), 1000)
    assert len(run.conversations) == 46
    assert sum(each.counts for each in run.times.values()) == 38
    assert len(run.fitted_rows) == 19
    write(tmp_path, records[:19])
    with pytest.raises(ConfigError, match="19 whole answers"):
        read_run(str(tmp_path), 1000)


def vllm_row(number: int) -> dict[str, Any]:
    row = {"request_id": str(number), "input_toks": 10 + number, "output_toks": 5}
    times = {"queued_ts": 50.0 + number, "first_token_ts": 50.5 + number}
    return {**row, **times, "last_token_ts": 52.5 + number}


@pytest.mark.parametrize("name", ["requests.jsonl", "requests.jsonl.gz"])
def test_vllms_own_rows_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with gzip.open(path, "wt") if name.endswith(".gz") else path.open("w") as file:
        file.writelines(json.dumps(vllm_row(number)) + "\n" for number in range(29, -1, -1))
    run = read_run(str(path), 20)
    assert [each.start_s for each in run.conversations] == [float(each) for each in range(20)]
    assert run.fitted["TTFT"].mean == pytest.approx(0.5)
    assert run.tested["TPOT"].mean == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["", "{}", "[1]", "{\n", '{"queued_ts": 1}', "\0\1", "5"])
def test_another_file_is_refused_with_what_is_wanted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_run(str(path), 10)
    assert str(path) in str(refused.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_run(str(tmp_path / "none"), 10)


def test_the_command_writes_a_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "ITERATIONS", 1)
    record, out = tmp_path / "record", tmp_path / "timing.json"
    record.mkdir()
    measure(record, requests=40)
    flags = ["--block-size", "16", "--max-num-seqs", "32", "--max-num-batched-tokens", "512"]
    assert run_command([str(record), "--out", str(out), *flags]) == 0
    assert isinstance(parse_timing(str(out)), Timing)
    assert "tested" in capsys.readouterr().out


def write_bench(path: Path, slots: int, lengths: tuple[int, int], requests: int = 24) -> str:
    """Write the result of a closed loop on an engine with the time of TRUE."""
    chains = [range(slot, requests, slots) for slot in range(slots)]
    conversations = [
        TraceConversation(0.0, [TraceRequest(row, *lengths) for row in chain]) for chain in chains
    ]
    _, log = Replay(plan_for(TRUE)).run(conversations)
    result = BenchResult(
        settings={
            "load": msgspec.to_builtins(LoadProfile(concurrency=slots)),
            "shape": msgspec.to_builtins(RequestShape(*lengths)),
        },
        seconds=1.0,
        requests=requests,
        failed=0,
        errors={},
        requests_per_s=1.0,
        prompt_tokens=requests * lengths[0],
        output_tokens=requests * lengths[1],
        output_tokens_per_s=1.0,
        cached_tokens=0,
        cached_ratio=0.0,
        events_per_token=1.0,
        ttft_ms=summarize_latencies(log.ttft_s),
        itl_ms=LatencySummary(),
        tpot_ms=summarize_latencies(log.tpot_s),
        e2e_ms=summarize_latencies(log.e2e_s),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
    return str(path)


def test_results_of_benchmarks_with_different_loads_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = ((1, (100, 10)), (8, (100, 20)), (4, (400, 10)), (16, (400, 20)))
    paths = [write_bench(tmp_path / f"{slots}.json", slots, lengths) for slots, lengths in loads]
    plan = plan_for(Timing(1.0, 1.0))
    with pytest.raises(ConfigError, match="cannot be told from"):
        calibrate([read_run(paths[0], 1000)], plan)
    with monkeypatch.context() as short:
        short.setattr(fit, "ITERATIONS", 8)
        calibration = calibrate([read_run(path, 1000) for path in paths], plan)
    assert calibration.tested == []
    assert all(abs(mean) < 0.1 for _, metric, mean, _ in calibration.fitted if metric == "E2E")
