"""The result file of a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from dynamo.operations.latency_summary import LatencySummary


class PrefillCounts(msgspec.Struct, frozen=True):
    """Requests by the worker that computed the prompt: the one that decodes, or another."""

    local: int
    remote: int


class TierResult(msgspec.Struct, frozen=True):
    """The work of one tier for all engines. `hit_share`: the share of the prompt tokens of all
    admissions that it supplied. `load_s`: the sum of the loads' durations."""

    loaded_blocks: int
    stored_blocks: int
    evicted_blocks: int
    hit_share: float
    load_s: float


class ReplayCapacity(msgspec.Struct, frozen=True):
    """The highest load that keeps limits of latency. Rates are means from the first arrival to the
    last token. All is 0 if no load keeps them. `lower_bound`: every load that was tried keeps them,
    and a higher one may."""

    speed: float
    requests_per_s: float
    output_tokens_per_s_per_gpu: float
    lower_bound: bool = False


class LoadPoint(msgspec.Struct, frozen=True):
    """A point of a Pareto curve. A user's tokens per second are the inverse of the mean TPOT."""

    speed: float
    tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    ttft_ms_p90: float


class ReplayResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result file of a replay. Latencies are those of completed requests. `rejected` counts the
    `errors` of code `overloaded`. `reuse_first_admission` is the share of prompt tokens that a
    cache held when their request was first admitted. `tpot_ms` is each request's mean time between
    tokens, `itl_ms` every single one. `duration_s` is virtual time; `wall_s` and `cpu_s` are what
    the replay took. `requests_per_worker` has an entry for each data-parallel rank of each
    worker. `good_share` is the share of all requests that were completed within the objectives of
    the plan. `prefill_fallbacks` counts prompts whose KV did not arrive, by reason. Empty fields
    from there on are not written."""

    trace: str
    settings: Mapping[str, object]
    requests: int
    completed: int
    rejected: int
    reuse_first_admission: float
    ttft_ms: LatencySummary
    tpot_ms: LatencySummary
    itl_ms: LatencySummary
    e2e_ms: LatencySummary
    output_tokens_per_s: float
    duration_s: float
    preemptions: int
    evictions: int
    requests_per_worker: Sequence[int]
    prefills: PrefillCounts
    kv_bytes_moved: int
    errors: Mapping[str, int]
    wall_s: float
    cpu_s: float
    prefill_fallbacks: Mapping[str, int] = {}
    tiers: Mapping[str, TierResult] = {}
    good_share: float | None = None
    capacity: ReplayCapacity | None = None
    pareto: Sequence[LoadPoint] = ()
