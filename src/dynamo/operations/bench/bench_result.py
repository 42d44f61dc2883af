"""From samples to figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.request_sample import RequestSample
from dynamo.operations.bench.workload import LatencyObjectives

VERSION = 1
CURVE_POINTS = 100


class LatencySummary(msgspec.Struct, frozen=True):
    """Milliseconds. `curve`: the value at every hundredth of the values, smallest first."""

    n: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    curve: Sequence[float] = ()


class Goodput(msgspec.Struct, frozen=True):
    """Requests that met the objectives. `ratio`: of all that were sent, failed ones too."""

    objectives: LatencyObjectives
    requests: int
    requests_per_s: float
    ratio: float


class ProcessCpu(msgspec.Struct, frozen=True):
    """Time on a CPU of all processes of one role, while it was measured."""

    cpu_s: float
    us_per_token: float
    us_per_request: float


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run. `settings`: what was asked for; `timeline`: events with text in every second;
    `interrupted`: it was told to stop, and what was in flight then is left out."""

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
    """What was seen. `gaps`: seconds between texts of every stream; `late_s`: how late the latest
    request was sent."""

    samples: list[RequestSample]
    inter_token_s: Sequence[float]
    started: float
    ended: float
    peak_in_flight: int = 0
    late_s: float = 0.0
    timeline: Sequence[int] = ()


def compute_result(run: BenchRun, objectives: LatencyObjectives) -> BenchResult:
    """Of a whole run."""
    good = [one for one in run.samples if not one.error]
    seconds = max(run.ended - run.started, 1e-9)
    usages = [one.usage for one in good if one.usage is not None]
    prompt = sum(one.prompt for one in usages)
    cached = sum(one.cached for one in usages)
    events = sum(one.text_events for one in good)
    tokens = sum(one.completion for one in usages) or events
    return BenchResult(
        seconds=round(seconds, 3),
        requests=len(good),
        failed=len(run.samples) - len(good),
        errors=Counter(one.error for one in run.samples if one.error),
        requests_per_s=round(len(good) / seconds, 3),
        prompt_tokens=prompt,
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 1),
        cached_tokens=cached,
        cached_ratio=round(cached / prompt, 4) if prompt else 0.0,
        events_per_token=round(events / tokens, 4) if tokens else 0.0,
        ttft_ms=summarize_latencies(
            [one.first_text_at - one.sent_at for one in good if one.first_text_at is not None]
        ),
        itl_ms=summarize_latencies(run.inter_token_s),
        tpot_ms=summarize_latencies(
            [gap for one in good if (gap := mean_inter_token_s(one)) is not None]
        ),
        e2e_ms=summarize_latencies([one.ended_at - one.sent_at for one in good]),
        goodput=_goodput(run.samples, objectives, seconds) if objectives.any_set else None,
        peak_in_flight=run.peak_in_flight,
        late_ms=round(run.late_s * 1000, 3),
        timeline=run.timeline,
    )


def mean_inter_token_s(sample: RequestSample) -> float | None:
    """Mean seconds between texts of one stream; None: fewer than two."""
    if sample.first_text_at is None or sample.text_events < 2:
        return None
    return (sample.last_text_at - sample.first_text_at) / (sample.text_events - 1)


def summarize_latencies(seconds: Sequence[float]) -> LatencySummary:
    """Of values in seconds."""
    if not seconds:
        return LatencySummary()
    ordered = sorted(seconds)
    return LatencySummary(
        n=len(ordered),
        mean=_ms(sum(ordered) / len(ordered)),
        p50=_ms(quantile(ordered, 0.5)),
        p90=_ms(quantile(ordered, 0.9)),
        p95=_ms(quantile(ordered, 0.95)),
        p99=_ms(quantile(ordered, 0.99)),
        max=_ms(ordered[-1]),
        curve=[_ms(quantile(ordered, at / CURVE_POINTS)) for at in range(CURVE_POINTS + 1)],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that `share` of all are not above."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


def meets_objectives(sample: RequestSample, objectives: LatencyObjectives) -> bool:
    """Did one request meet the objectives?"""
    if sample.error or sample.first_text_at is None:
        return False
    gap = mean_inter_token_s(sample) or 0.0
    ttft_ms = (sample.first_text_at - sample.sent_at) * 1000
    return not (
        (objectives.ttft_ms and ttft_ms > objectives.ttft_ms)
        or (objectives.itl_ms and gap * 1000 > objectives.itl_ms)
    )


def read_result(path: str) -> BenchResult:
    """A result file. Raises `ConfigError`. Blocks."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the error names what was asked for
            return msgspec.json.decode(file.read(), type=BenchResult)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no result of `dynamo bench`: {error}", hint="made with --out FILE"
        ) from None


def _goodput(
    samples: Sequence[RequestSample], objectives: LatencyObjectives, seconds: float
) -> Goodput:
    good = sum(meets_objectives(one, objectives) for one in samples)
    ratio = good / len(samples) if samples else 0.0
    return Goodput(objectives, good, round(good / seconds, 3), round(ratio, 4))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
