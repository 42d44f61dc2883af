"""Values that describe a benchmark's server, requests and load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from dynamo.operations.arrivals import Arrivals


class RequestPlan(msgspec.Struct, frozen=True):
    """A request of a session. The prompt is `text`, else the blocks of words that `hash_ids`
    determine, else fresh words. The request is sent `delay_s` after the previous turn. A recorded
    `answer` takes the place of the server's answer in the conversation."""

    input_tokens: int
    output_tokens: int
    delay_s: float = 0.0
    hash_ids: Sequence[int | str] = ()
    text: str = ""
    answer: str = ""


class SessionPlan(msgspec.Struct, frozen=True):
    """Requests that run one after the other. `start_s` counts from the beginning of the run; None
    starts the session as soon as another ends. With `history`, each prompt contains the previous
    turns."""

    turns: Sequence[RequestPlan]
    start_s: float | None = None
    history: bool = False


class BenchTarget(msgspec.Struct, frozen=True):
    """The measured server and the common part of its requests. `extra` is merged into each body."""

    url: str = "http://127.0.0.1:8000"
    model: str = "default"
    api_key: str = ""
    completions: bool = False
    ignore_eos: bool = True
    timeout_s: float = 0.0
    extra: Mapping[str, Any] = {}


class RequestShape(msgspec.Struct, frozen=True):
    """Lengths of synthetic requests. The first `prefix_share` of each prompt is one of `prefixes`
    shared prefixes. Sessions with several `turns` are conversations."""

    input_tokens: int = 128
    output_tokens: int = 64
    prefix_share: float = 0.0
    prefixes: int = 1
    turns: int = 1


class LoadProfile(msgspec.Struct, frozen=True):
    """Arrival of requests. An open loop sends `rate` requests per second, growing linearly to
    `rate_to`, or swinging to that and back each `day_s`; `cv` as in `Arrivals`, 0 if `even`. With
    rate 0, a closed loop holds `concurrency` in flight. The run ends after `duration_s` or
    `requests` (0 = no limit). Seed 0 means a random seed: prompts of earlier runs are in no cache
    then."""

    concurrency: int = 1
    rate: float = 0.0
    rate_to: float = 0.0
    even: bool = False
    duration_s: float = 10.0
    requests: int = 0
    warmup: int = 0
    seed: int = 0
    cv: float = 1.0
    day_s: float = 0.0

    def start_times(self) -> Iterator[float]:
        """Yield session starts of an open loop in seconds from the beginning of the run."""
        cv = 0.0 if self.even else self.cv
        arrivals = Arrivals(self.rate, self.rate_to, self.duration_s, cv, self.day_s)
        return arrivals.times(Random(self.seed))


class LatencyObjectives(msgspec.Struct, frozen=True):
    """Limits on TTFT and on the mean inter-token latency of a good request; 0 sets no limit."""

    ttft_ms: float = 0.0
    itl_ms: float = 0.0

    @property
    def any_set(self) -> bool:
        """True if at least one limit is set."""
        return bool(self.ttft_ms or self.itl_ms)
