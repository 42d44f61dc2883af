"""From samples to figures."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dynamo.core.errors import ConfigError
from dynamo.operations.bench.plan import Objectives
from dynamo.operations.bench.sample import Sample

VERSION = 1
CURVE_POINTS = 100


class Spread(msgspec.Struct, frozen=True):
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

    objectives: Objectives
    requests: int
    requests_per_s: float
    ratio: float


class ProcessCpu(msgspec.Struct, frozen=True):
    """Time on a CPU of all processes of one role, while it was measured."""

    cpu_s: float
    us_per_token: float
    us_per_request: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
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
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread
    goodput: Goodput | None = None
    peak_in_flight: int = 0
    late_ms: float = 0.0
    timeline: Sequence[int] = ()
    processes: Mapping[str, ProcessCpu] = {}


class Run(msgspec.Struct):
    """What was seen. `gaps`: seconds between texts of every stream; `late_s`: how late the latest
    request was sent."""

    samples: list[Sample]
    gaps: Sequence[float]
    began: float
    ended: float
    peak_in_flight: int = 0
    late_s: float = 0.0
    timeline: Sequence[int] = ()


def figures(run: Run, objectives: Objectives) -> Result:
    """Of a whole run."""
    good = [one for one in run.samples if not one.error]
    seconds = max(run.ended - run.began, 1e-9)
    usages = [one.usage for one in good if one.usage is not None]
    prompt = sum(one.prompt for one in usages)
    cached = sum(one.cached for one in usages)
    events = sum(one.events for one in good)
    tokens = sum(one.completion for one in usages) or events
    return Result(
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
        ttft_ms=spread([one.first - one.began for one in good if one.first is not None]),
        itl_ms=spread(run.gaps),
        tpot_ms=spread([gap for one in good if (gap := mean_gap(one)) is not None]),
        e2e_ms=spread([one.ended - one.began for one in good]),
        goodput=_goodput(run.samples, objectives, seconds) if objectives.given else None,
        peak_in_flight=run.peak_in_flight,
        late_ms=round(run.late_s * 1000, 3),
        timeline=run.timeline,
    )


def mean_gap(sample: Sample) -> float | None:
    """Mean seconds between texts of one stream; None: fewer than two."""
    if sample.first is None or sample.events < 2:
        return None
    return (sample.last - sample.first) / (sample.events - 1)


def spread(seconds: Sequence[float]) -> Spread:
    """Of values in seconds."""
    if not seconds:
        return Spread()
    ordered = sorted(seconds)
    return Spread(
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


def meets(sample: Sample, objectives: Objectives) -> bool:
    """Did one request meet the objectives?"""
    if sample.error or sample.first is None:
        return False
    gap = mean_gap(sample) or 0.0
    ttft_ms = (sample.first - sample.began) * 1000
    return not (
        (objectives.ttft_ms and ttft_ms > objectives.ttft_ms)
        or (objectives.itl_ms and gap * 1000 > objectives.itl_ms)
    )


def read_result(path: str) -> Result:
    """A result file. Raises `ConfigError`. Blocks."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the error names what was asked for
            return msgspec.json.decode(file.read(), type=Result)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is no result of `dynamo bench`: {error}", hint="made with --out FILE"
        ) from None


def _goodput(samples: Sequence[Sample], objectives: Objectives, seconds: float) -> Goodput:
    good = sum(meets(one, objectives) for one in samples)
    ratio = good / len(samples) if samples else 0.0
    return Goodput(objectives, good, round(good / seconds, 3), round(ratio, 4))


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
