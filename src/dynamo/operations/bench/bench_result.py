"""The result of a bench run: from its requests and the CPU of processes; the comparison of two."""

from __future__ import annotations

import contextlib
import os
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import LatencyObjectives
from dynamo.operations.latency_summary import LatencySummary, summarize_latencies
from dynamo.runtime.deployment import ProcessRecord, live_deployments

VERSION = 1
RESULT_HINT = "`dynamo bench --out FILE` writes one"


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met the objectives. `ratio` is their share of all requests, failed ones too."""

    objectives: LatencyObjectives
    requests: int
    requests_per_s: float
    ratio: float


class ProcessCpu(msgspec.Struct, frozen=True):
    """CPU time of all processes of one role during the measured part of a run."""

    cpu_s: float
    us_per_token: float
    us_per_request: float


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result file of one run. `settings` is the BenchConfig without its API key. `timeline`
    holds the text events of every second. Requests in flight when a run was `interrupted` are not
    counted. `late_ms` is the delay of the request that was sent latest after its due time."""

    version: int = VERSION
    name: str = ""
    when: str = ""
    interrupted: bool = False
    settings: Mapping[str, Any] = {}
    seconds: float
    requests: int
    failed: int
    errors: Mapping[str, int]
    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    cached_tokens: int
    cached_ratio: float
    events_per_token: float
    ttft_ms: LatencySummary
    itl_ms: LatencySummary
    tpot_ms: LatencySummary
    e2e_ms: LatencySummary
    goodput: Goodput | None = None
    peak_in_flight: int = 0
    late_ms: float = 0.0
    timeline: Sequence[int] = ()
    processes: Mapping[str, ProcessCpu] = {}


class BenchRun(msgspec.Struct):
    """Raw measurements of a run. `inter_token_s` holds the gaps between the text events of all
    streams. `started` and `ended` are monotonic seconds."""

    samples: list[RequestSample]
    inter_token_s: Sequence[float]
    started: float
    ended: float
    peak_in_flight: int = 0
    late_s: float = 0.0


def compute_result(run: BenchRun, objectives: LatencyObjectives) -> BenchResult:
    """Compute the result of a run. Output tokens are text events if the server reports no usage."""
    answered = [sample for sample in run.samples if not sample.error]
    seconds = max(run.ended - run.started, 1e-9)
    usages = [sample.usage for sample in answered if sample.usage is not None]
    prompt = sum(usage.prompt for usage in usages)
    cached = sum(usage.cached for usage in usages)
    events = sum(sample.text_events for sample in answered)
    tokens = sum(usage.completion for usage in usages) or events
    ttft_s = [
        sample.first_text_at - sample.sent_at
        for sample in answered
        if sample.first_text_at is not None
    ]
    gaps_s = [gap for sample in answered if (gap := mean_inter_token_s(sample)) is not None]
    return BenchResult(
        seconds=round(seconds, 3),
        requests=len(answered),
        failed=len(run.samples) - len(answered),
        errors=Counter(sample.error for sample in run.samples if sample.error),
        requests_per_s=round(len(answered) / seconds, 3),
        prompt_tokens=prompt,
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 1),
        cached_tokens=cached,
        cached_ratio=round(cached / prompt, 4) if prompt else 0.0,
        events_per_token=round(events / tokens, 4) if tokens else 0.0,
        ttft_ms=summarize_latencies(ttft_s),
        itl_ms=summarize_latencies(run.inter_token_s),
        tpot_ms=summarize_latencies(gaps_s),
        e2e_ms=summarize_latencies([sample.ended_at - sample.sent_at for sample in answered]),
        goodput=_goodput(run.samples, objectives, seconds) if objectives.any_set else None,
        peak_in_flight=run.peak_in_flight,
        late_ms=round(run.late_s * 1000, 3),
    )


def mean_inter_token_s(sample: RequestSample) -> float | None:
    """Return the mean seconds between text events; None for fewer than two events."""
    if sample.first_text_at is None or sample.text_events < 2:
        return None
    return (sample.last_text_at - sample.first_text_at) / (sample.text_events - 1)


def meets_objectives(sample: RequestSample, objectives: LatencyObjectives) -> bool:
    """Return True if a request was answered within the objectives that are set."""
    if sample.error or sample.first_text_at is None:
        return False
    gap_s = mean_inter_token_s(sample) or 0.0
    ttft_ms = (sample.first_text_at - sample.sent_at) * 1000
    return not (
        (objectives.ttft_ms and ttft_ms > objectives.ttft_ms)
        or (objectives.itl_ms and gap_s * 1000 > objectives.itl_ms)
    )


def read_result(path: str) -> BenchResult:
    """Read a result file. Raises `ConfigError`. Blocks."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the error names the path as typed
            return msgspec.json.decode(file.read(), type=BenchResult)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", hint=RESULT_HINT) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a result of `dynamo bench`: {error}",
            hint=RESULT_HINT,
        ) from None


def _goodput(
    samples: Sequence[RequestSample], objectives: LatencyObjectives, seconds: float
) -> Goodput:
    good = sum(meets_objectives(sample, objectives) for sample in samples)
    ratio = good / len(samples) if samples else 0.0
    return Goodput(objectives, good, round(good / seconds, 3), round(ratio, 4))


COMPARED_METRICS = (
    "requests_per_s", "output_tokens_per_s", "cached_ratio", "failed", "goodput.ratio",
    "ttft_ms.mean", "ttft_ms.p50", "ttft_ms.p99", "itl_ms.mean", "itl_ms.p50", "itl_ms.p99",
    "tpot_ms.p50", "tpot_ms.p99", "e2e_ms.p50", "e2e_ms.p99",
)  # fmt: skip
IGNORED_SETTINGS = ("name", "target.url")
HIGHER_IS_BETTER = {"requests_per_s", "output_tokens_per_s", "cached_ratio", "goodput.ratio"}


class ResultDifference(msgspec.Struct, frozen=True):
    """A metric of two results, named by its dotted path. `change` is relative to the first value
    (0.1 = 10 % more), None if that is zero. `better` is None for equal values."""

    figure: str
    first: float
    second: float
    change: float | None
    better: bool | None


def compare(first: BenchResult, second: BenchResult) -> Iterator[ResultDifference]:
    """Yield the differences of the metrics that both results have."""
    cpu_metrics = [f"processes.{role}.us_per_token" for role in first.processes]
    for name in [*COMPARED_METRICS, *cpu_metrics]:
        before, after = metric_value(first, name), metric_value(second, name)
        if before is None or after is None:
            continue
        change = (after - before) / before if before else None
        better = None if before == after else (after > before) == (name in HIGHER_IS_BETTER)
        yield ResultDifference(name, before, after, change, better)


def differing_settings(first: BenchResult, second: BenchResult) -> Sequence[str]:
    """Return the dotted keys of settings that differ, since such runs are hard to compare."""
    left, right = _flatten(first.settings), _flatten(second.settings)
    return [
        key
        for key in sorted(left.keys() | right.keys())
        if key not in IGNORED_SETTINGS and left.get(key) != right.get(key)
    ]


def metric_value(result: BenchResult, name: str) -> float | None:
    """Return a number of the result by its dotted path; None if there is none."""
    value: object = result
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value if isinstance(value, int | float) else None


def _flatten(settings: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(settings, dict):
        return {prefix.rstrip("."): settings}
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= _flatten(value, f"{prefix}{key}.")
    return flat


BENCH_ROLE = "bench"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


class ProcessCpuMeter:
    """Measures the CPU time, by role, of the processes behind `url` on this host."""

    def __init__(self, url: str) -> None:
        self._roles = {process.pid: process.role for process in _processes_serving(url)}
        self._roles[os.getpid()] = BENCH_ROLE
        self._before = self._after = self._read_cpu_s()

    def start(self) -> None:
        """Begin the measured interval."""
        self._before = self._read_cpu_s()

    def stop(self) -> None:
        """End the measured interval."""
        self._after = self._read_cpu_s()

    def summarize(self, tokens: int, requests: int) -> Mapping[str, ProcessCpu]:
        """Return the CPU time between `start` and `stop` by role, of the processes that have not
        ended between them."""
        used: defaultdict[str, float] = defaultdict(float)
        for pid, role in self._roles.items():
            if self._after[pid]:
                used[role] += self._after[pid] - self._before[pid]
        return {
            role: ProcessCpu(
                cpu_s=round(cpu_s, 4),
                us_per_token=round(cpu_s / max(1, tokens) * 1e6, 2),
                us_per_request=round(cpu_s / max(1, requests) * 1e6, 1),
            )
            for role, cpu_s in sorted(used.items(), key=lambda item: item[0] == BENCH_ROLE)
        }

    def _read_cpu_s(self) -> Mapping[int, float]:
        own = resource.getrusage(resource.RUSAGE_SELF)
        by_pid = {pid: _process_cpu_s(pid) for pid in self._roles}
        return by_pid | {os.getpid(): own.ru_utime + own.ru_stime}


def _processes_serving(url: str) -> Sequence[ProcessRecord]:
    parts = urlsplit(url)
    if parts.hostname not in LOCAL_HOSTS:
        return ()
    for deployment in live_deployments():
        processes = deployment.live_processes()
        ports = {urlsplit(record.address).port for record in processes if "http" in record.address}
        if parts.port in ports:
            return processes
    return ()


def _process_cpu_s(pid: int) -> float:
    """Return the CPU seconds of all threads of a process; 0 once the process has ended."""
    used_ns = 0
    for stat in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):
            used_ns += int(stat.read_text().split()[0])
    return used_ns / 1e9
