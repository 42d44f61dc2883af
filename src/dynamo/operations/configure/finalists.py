"""Finalists of a search in the replay: Poisson arrivals on workers with the plan's step times."""

from __future__ import annotations

import math
from random import Random

import msgspec
import numpy as np

from dynamo.core.settings.schema_engine import EngineSettings
from dynamo.core.settings.schema_router import DisaggregationSettings, RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import BOTH_ROLES, EngineInfo
from dynamo.inference.mock.engine import make_mock_engine_info
from dynamo.operations.arrivals import SyntheticLoad
from dynamo.operations.bench.workload import LatencyObjectives
from dynamo.operations.configure.cases import CaseArrays
from dynamo.operations.configure.files import STEP_TOKENS, most_seqs
from dynamo.operations.configure.plans import Plan, Question
from dynamo.operations.configure.predictor import Predictor
from dynamo.operations.configure.search import MOST_WORKERS, Search
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import (
    ArrivalOptions,
    TraceConversation,
    TraceRequest,
    make_synthetic_trace,
)
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.scheduling.router.costs.pair_price import FLEXIBLE

BLOCK_TOKENS = 64
FEWEST_REQUESTS, MOST_REQUESTS = 128, 900
"""Requests of a replay."""
TURNS = 3
"""Requests of a replay for each one that runs at once."""
MOST_BLOCKS = 60_000
SPLIT_ROLES = ("decode", "prefill")
SCALINGS = 2
ROUND_ROBIN = RouterSettings(mode="round_robin")
LOAD = 0.85
"""Arrivals of the replay, as a share of what the plan bears in a closed loop."""


class Replayed(msgspec.Struct, frozen=True):
    """The outcome of a replay of a plan: mean times, the 90th percentile of TTFT, and the share of
    requests within the promise (None without one)."""

    kind: str
    rate: float
    ttft_ms: float
    ttft_p90_ms: float
    tpot_ms: float
    tokens_per_gpu: float
    good_share: float | None


def step_timing(
    plan: Plan, question: Question, predictor: Predictor, *, prefill: bool = False
) -> Timing:
    """Return the step time of a worker that answers, or of a `prefill` worker. The formula's slopes
    at the plan's load are so scaled that a replay of that load has the predicted TPOT."""
    layout = plan.prefill_layout if prefill and plan.prefill_layout else plan.layout
    seqs = 1 if prefill else plan.concurrency
    cases = CaseArrays([Search(question, predictor).case(layout, seqs)])
    times = predictor.times
    context = np.array([question.isl + question.osl / 2])
    running, single = np.array([float(seqs)]), np.ones(1)
    step = float(times.step_ms(cases, running, context, running)[0])
    alone = float(times.step_ms(cases, single, context, single)[0])
    per_context = float(times.step_ms(cases, single, context + 1, single)[0]) - alone
    new = question.isl - question.prefix
    per_pair = 4 * float(cases.attention_size[0] * cases.full_layers[0])
    per_pair /= float(cases.gpus[0] * cases.flops_bf16[0])
    attention = per_pair * new * (question.prefix + new / 2)
    per_token = max(0.0, float(times.prompt_ms(cases)[0]) - attention) / new
    moved = per_context * float(context[0])
    per_seq = max(0.0, (step - alone - moved * (seqs - 1)) / max(1, seqs - 1))
    fixed = max(0.01, step - (per_seq + moved) * seqs)
    values = (fixed, per_token, max(0.0, per_seq - per_token), per_context, per_pair)
    timing = Timing(*values)
    for _ in range(0 if prefill else SCALINGS):
        timing = _scaled(timing, plan.tpot_ms / _closed_loop_tpot(plan, question, timing))
    return _scaled(timing, 1.0)


def _scaled(timing: Timing, factor: float) -> Timing:
    values = msgspec.structs.astuple(timing)
    return Timing(*(float(f"{factor * value:.6g}") for value in values))


def _closed_loop_tpot(plan: Plan, question: Question, timing: Timing) -> float:
    """Return the mean TPOT of a worker with the plan's requests at once. Where others compute the
    prompts, those are a token long, and the context is full from the start."""
    alone = plan.prefill_layout is None
    prompt = question.isl - question.prefix if alone else 1
    rng = Random(1)
    conversations = [
        TraceConversation(
            0.0,
            [
                TraceRequest(row * TURNS + turn, prompt, max(2, round(question.osl * share)))
                for turn in range(TURNS)
                if (share := rng.uniform(0.8, 1.2))
            ],
        )
        for row in range(plan.concurrency)
    ]
    if not alone:
        held = timing.c0 + timing.c3 * plan.concurrency * question.isl
        timing = msgspec.structs.replace(timing, c0=held, c1=0.0)
    group = ReplayGroup(1, _engine(plan, question), timing)
    replay_of = ReplayPlan("closed loop", ReplayWorkers([group], "lru"), ROUND_ROBIN, BLOCK_TOKENS)
    result, _ = FastReplay(replay_of).run(conversations)
    return result.tpot_ms.mean


def replay_plan(
    plan: Plan, question: Question, predictor: Predictor, *, flexible: bool = False
) -> Replayed:
    """Replay a plan with Poisson arrivals. `flexible` workers of an aggregated plan compute
    prompts for each other, in mode kv."""
    groups = _groups(plan, question, predictor)
    share = groups[0].count / plan.replicas
    rate = LOAD * plan.rate * share
    moves = flexible or plan.prefill_layout is not None
    router = ROUND_ROBIN
    if flexible:
        router = RouterSettings(mode="kv", disaggregation=DisaggregationSettings(mode=FLEXIBLE))
    promise = LatencyObjectives(*(_limit(ms) for ms in (question.ttft_ms, question.tpot_ms)))
    workers = ReplayWorkers(
        groups,
        "lru",
        transfer=question.gpu.link * 1e9 / 2 if moves else None,
        kv_bytes_per_token=max(
            1, round(question.shape.kv_bytes_per_token(plan.layout.kv_precision))
        ),
    )
    running = TURNS * plan.concurrency * groups[0].count
    requests = min(max(FEWEST_REQUESTS, running), MOST_REQUESTS)
    load = SyntheticLoad(question.isl - question.prefix, question.osl, requests, rate)
    plan_to_replay = ReplayPlan("finalist", workers, router, BLOCK_TOKENS, objectives=promise)
    trace = make_synthetic_trace(load, ArrivalOptions(seed=1))
    result, _ = FastReplay(plan_to_replay).run(trace)
    return Replayed(
        FLEXIBLE if flexible else plan.kind,
        LOAD * plan.rate,
        result.ttft_ms.mean,
        result.ttft_ms.p90,
        result.tpot_ms.mean,
        LOAD * plan.tokens_per_gpu,
        result.good_share,
    )


def _limit(milliseconds: float) -> float:
    return milliseconds if milliseconds < math.inf else 0.0


def _groups(plan: Plan, question: Question, predictor: Predictor) -> list[ReplayGroup]:
    """Return two workers of an aggregated plan, or the smallest unit that a plan repeats, of at
    most `MOST_WORKERS` of a kind."""
    info = _engine(plan, question)
    timing = step_timing(plan, question, predictor)
    if plan.prefill_layout is None:
        return [ReplayGroup(min(2, plan.replicas), info, timing)]
    counts = (plan.replicas, plan.prefill_workers)
    units = max(math.gcd(*counts), max(counts) / MOST_WORKERS)
    answering, computing = (max(1, round(count / units)) for count in counts)
    ahead = step_timing(plan, question, predictor, prefill=True)
    decode, prefill = (msgspec.structs.replace(info, roles=(role,)) for role in SPLIT_ROLES)
    return [
        ReplayGroup(answering, decode, timing),
        ReplayGroup(computing, prefill, ahead),
    ]


def _engine(plan: Plan, question: Question) -> EngineInfo:
    """Return a mock engine with the plan's memory and batch, and both roles."""
    tokens = (min(plan.capacity, most_seqs(plan)) + 1) * (question.isl + question.osl)
    settings = EngineSettings(
        block_size=BLOCK_TOKENS,
        num_blocks=min(MOST_BLOCKS, math.ceil(tokens / BLOCK_TOKENS)),
        max_num_seqs=most_seqs(plan),
        max_num_batched_tokens=STEP_TOKENS,
    )
    info = make_mock_engine_info(settings, context_tokens=4 * (question.isl + question.osl))
    return msgspec.structs.replace(info, roles=BOTH_ROLES)
