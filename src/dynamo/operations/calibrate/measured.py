"""Measured runs: the load of an engine, and the times that its requests took."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.bench_result import BenchResult
from dynamo.operations.bench.traces import read_lines, read_record
from dynamo.operations.bench.workload import LoadProfile
from dynamo.operations.latency_summary import LatencySummary
from dynamo.operations.replay.request_log import ReplayLog
from dynamo.operations.replay.trace import PrefixBlockIds, TraceConversation, TraceRequest
from dynamo.scheduling.request_record import RequestRecord

MIN_REQUESTS = 20
PERCENTILES = (*range(5, 100, 5), 99)
METRICS = ("TTFT", "TPOT", "E2E")
SPLIT_SEED = 1
FORMATS = "the record of a deployment, rows of a trace with ttft_ms and e2e_ms, a result of `dynamo bench`, or vLLM's requests.jsonl"  # noqa: E501


class RequestTimes(msgspec.Struct, frozen=True):
    """When a request arrived, got its first token and its last one, in seconds from the beginning
    of the run, and its tokens. `counts`: its times are compared with those of a replay."""

    arrived_s: float
    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    counts: bool = True


class Distribution(msgspec.Struct, frozen=True):
    """The mean and the percentiles `PERCENTILES` of one metric, in seconds."""

    mean: float
    percentiles: Sequence[float]


Metrics = Mapping[str, Distribution]


class MeasuredRun(msgspec.Struct, frozen=True):
    """A run to fit a timing to. `times` are those of each request by row, where they are known.
    `fitted` are the measured metrics of the requests in `fitted_rows`, `tested` those of the
    others. `workers`: how many answered, 0: unknown. A run that tells no single requests has
    neither rows nor `tested`."""

    name: str
    conversations: Sequence[TraceConversation]
    fitted: Metrics
    block_tokens: int = 0
    workers: int = 0
    times: Mapping[int, RequestTimes] = {}
    fitted_rows: frozenset[int] = frozenset()
    tested: Metrics = {}

    def simulated(self, log: ReplayLog) -> tuple[Metrics, Metrics]:
        """Return the metrics of a replay of the run that compare with `fitted` and `tested`."""
        first_s, last_s, tokens = np.array(log.ttft_s), np.array(log.e2e_s), np.array(log.tokens)
        if not self.times:
            return _metrics(first_s, last_s, tokens), {}
        counts = np.array([self.times[row].counts for row in log.rows], dtype=bool)
        fitted = np.array([row in self.fitted_rows for row in log.rows], dtype=bool)
        halves = (counts & fitted, counts & ~fitted)
        first, second = (_metrics(first_s[half], last_s[half], tokens[half]) for half in halves)
        return first, second


def read_run(path: str, rows: int) -> MeasuredRun:
    """Read a measured run of at most `rows` requests. Raises `ConfigError`. Blocks."""
    if Path(path).is_dir():
        return _run_of_records(path, read_record(path, RequestRecord).rows[:rows])
    lines = list(read_lines(path, f"wanted: {FORMATS}"))
    data = b"".join(lines)
    try:
        first = msgspec.json.decode(data.partition(b"\n")[0] if data[:2] != b"{\n" else data)
        if isinstance(first, dict) and "queued_ts" in first:
            logged = list(map(msgspec.json.decode, lines))
            return _run_of_vllm(path, sorted(logged, key=lambda row: row["queued_ts"])[:rows])
        if isinstance(first, dict) and "timestamp" in first:
            records = list(map(msgspec.json.Decoder(RequestRecord).decode, lines))
            return _run_of_records(path, sorted(records, key=lambda row: row.timestamp)[:rows])
        return _run_of_bench(path, msgspec.json.decode(data, type=BenchResult), rows)
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error}", hint=f"wanted: {FORMATS}") from None


def _run_of_records(path: str, records: Sequence[RequestRecord]) -> MeasuredRun:
    """Requests that failed or moved are load, and do not count; those that no worker began are
    neither."""
    begun = [record for record in records if record.ttft_ms is not None]
    block_tokens = next((record.block_tokens for record in begun if record.block_tokens), 0)
    block_ids, begin_ms = PrefixBlockIds(), begun[0].timestamp if begun else 0.0
    conversations, times = [], {}
    for row, record in enumerate(begun):
        arrived_s = (record.timestamp - begin_ms) * 1e-3
        hashes = record.hash_ids if record.block_tokens == block_tokens else ()
        request = TraceRequest(
            row,
            max(1, record.input_length),
            max(1, record.output_length),
            block_ids.assign(hashes),
        )
        conversations.append(TraceConversation(arrived_s, [request]))
        times[row] = RequestTimes(
            arrived_s,
            arrived_s + (record.ttft_ms or 0.0) * 1e-3,
            arrived_s + record.e2e_ms * 1e-3,
            request.prompt_tokens - record.cached_tokens,
            request.output_tokens,
            counts=not (record.end or record.moves or record.choices > 1),
        )
    workers = len({record.worker for record in begun if record.worker})
    return _split(path, conversations, times, block_tokens, workers)


def _run_of_vllm(path: str, rows: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    """Requests in vLLM's own words; each waits from `queued_ts`."""
    begin_s = rows[0]["queued_ts"]
    times = {
        row: RequestTimes(
            each["queued_ts"] - begin_s,
            each["first_token_ts"] - begin_s,
            each["last_token_ts"] - begin_s,
            each["input_toks"],
            each["output_toks"],
        )
        for row, each in enumerate(rows)
    }
    conversations = [
        TraceConversation(
            each.arrived_s, [TraceRequest(row, each.prompt_tokens, each.output_tokens)]
        )
        for row, each in times.items()
    ]
    return _split(path, conversations, times)


def _run_of_bench(path: str, result: BenchResult, rows: int) -> MeasuredRun:
    """The result of a benchmark has the load in its settings, and only distributions."""
    load, shape = msgspec.convert(result.settings["load"], LoadProfile), result.settings["shape"]
    if result.settings.get("trace") or result.settings.get("sharegpt"):
        raise ConfigError(
            f"{path} was measured with a file of requests, of which it has no times",
            hint="calibrate with the record of the server's deployment",
        )
    requests = min(result.requests, rows)
    lengths = max(1, result.prompt_tokens // result.requests), max(1, shape["output_tokens"])
    starts = list(islice(load.start_times(), requests)) if load.rate else []
    chains = [[row] for row in range(len(starts))]
    if not starts:
        slots = load.concurrency
        chains, starts = (
            [list(range(slot, requests, slots)) for slot in range(slots)],
            [0.0] * slots,
        )
    conversations = [
        TraceConversation(start_s, [TraceRequest(row, *lengths) for row in chain])
        for start_s, chain in zip(starts, chains, strict=True)
        if chain
    ]
    summaries = zip(METRICS, (result.ttft_ms, result.tpot_ms, result.e2e_ms), strict=True)
    return MeasuredRun(
        path, conversations, {name: _of_summary(summary) for name, summary in summaries}
    )


def _of_summary(summary: LatencySummary) -> Distribution:
    percentiles = [summary.curve[each] * 1e-3 for each in PERCENTILES]
    return Distribution(summary.mean * 1e-3, percentiles)


def _split(
    path: str,
    conversations: Sequence[TraceConversation],
    times: Mapping[int, RequestTimes],
    block_tokens: int = 0,
    workers: int = 0,
) -> MeasuredRun:
    """Choose half of the requests by chance to fit, the others to test. Raises `ConfigError`."""
    counted = [row for row, each in times.items() if each.counts]
    if len(counted) < MIN_REQUESTS:
        raise ConfigError(
            f"{path}: {len(counted)} whole answers with times are too few",
            hint=f"a calibration needs {MIN_REQUESTS}",
        )
    fitted = frozenset(Random(SPLIT_SEED).sample(counted, len(counted) // 2))
    halves = (fitted, [row for row in counted if row not in fitted])
    first, second = (_measured([times[row] for row in half]) for half in halves)
    return MeasuredRun(path, conversations, first, block_tokens, workers, times, fitted, second)


def _measured(times: Sequence[RequestTimes]) -> Metrics:
    first_s = np.array([each.first_s - each.arrived_s for each in times])
    last_s = np.array([each.last_s - each.arrived_s for each in times])
    return _metrics(first_s, last_s, np.array([each.output_tokens for each in times]))


def _metrics(first_s: Any, last_s: Any, tokens: Any) -> Metrics:
    several = tokens > 1
    between_s = (last_s - first_s)[several] / (tokens[several] - 1)
    return dict(zip(METRICS, map(_distribution, (first_s, between_s, last_s)), strict=True))


def _distribution(seconds: Any) -> Distribution:
    if not len(seconds):
        return Distribution(0.0, [0.0] * len(PERCENTILES))
    return Distribution(float(seconds.mean()), np.percentile(seconds, PERCENTILES).tolist())


def errors(simulated: Metrics, measured: Metrics) -> Iterator[tuple[str, float, float]]:
    """Yield each metric with the relative errors of its mean and of its 99th percentile."""
    for name, target in measured.items():
        if target.mean > 0:
            mean = simulated[name].mean / target.mean - 1
            p99 = simulated[name].percentiles[-1] / max(1e-9, target.percentiles[-1]) - 1
            yield name, mean, p99 if math.isfinite(p99) else 0.0
