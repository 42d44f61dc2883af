#!/usr/bin/env python3
"""Compare policies of the planner in fast replays of recorded arrivals.

    benchmarks/planner.py TRACES [--only NAME] [--startup 30,120,300] [--policies flow,rule,...]
    benchmarks/planner.py --roles 300 [--startup 15,60]      prompts and answers apart, 16 GPUs

TRACES is a folder with azure2023_conv.csv, mooncake_conversation_trace.jsonl and servegen/. The first
half of a trace is history, the second is scored. Prints the avoidable broken promises (above those
of many workers) and the GPU-hours: of the best fixed size, of a rule that knows the future, and of
each policy.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from dynamo.core.plugins import PLANNER_POLICIES, PLANNER_PREDICTORS
from dynamo.core.settings.schema_planner import PlannerSettings
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.operations.planner.backtest import backtest
from dynamo.operations.planner.capacity import Lengths, PromiseCapacity
from dynamo.operations.planner.connectors.simulated import SimulatedConnector
from dynamo.operations.planner.planner import ScalePlanner
from dynamo.operations.planner.policies.policy import PolicyOptions
from dynamo.operations.planner.rails import Rails
from dynamo.operations.planner.simulation import (
    Trial,
    TrialResult,
    complete,
    play,
    play_static,
    with_size,
)
from dynamo.operations.planner.values import EngineLimits, Order, Promise
from dynamo.operations.replay.fleet import ReplayFleet, Startup
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import TraceConversation, TraceRequest
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers

TIMING = Timing(c0=12.0, c1=0.09, c2=0.05, c3=6e-5)
ENGINE = EngineInfo("mock", 64, 600_000 // 64, 131_072, 256, 8192)
PROMISE = Promise(1.5, 50.0)
WARM_UP_S = 600.0
ALLOWED = 0.012
Arrival = tuple[float, int, int]


def azure(folder: Path) -> list[Arrival]:
    """Six copies of Azure's conversations, each arrival up to 3 s later."""
    with (folder / "azure2023_conv.csv").open() as file:
        rows = [
            (datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
             int(row["ContextTokens"]), int(row["GeneratedTokens"]))
            for row in csv.DictReader(file)
        ]  # fmt: skip
    rng = np.random.default_rng(1)
    first = rows[0][0]
    return [
        (at - first + delay, prompt, max(1, answer))
        for _ in range(6)
        for (at, prompt, answer), delay in zip(rows, rng.uniform(0, 3, len(rows)), strict=True)
    ]


def mooncake(folder: Path) -> list[Arrival]:
    """Mooncake's conversations at twice the speed, without what a cache has."""
    arrivals, seen = [], set[int]()
    for line in (folder / "mooncake_conversation_trace.jsonl").open():
        row = json.loads(line)
        ids = row["hash_ids"]
        hits = next((place for place, each in enumerate(ids) if each not in seen), len(ids))
        seen.update(ids)
        prompt = max(64, row["input_length"] - 512 * hits)
        arrivals.append((row["timestamp"] / 2000, prompt, max(1, row["output_length"])))
    return arrivals


def servegen(name: str, first: int, rate: float) -> Callable[[Path], list[Arrival]]:
    """Twelve windows of ServeGen from the number `first`, at a mean rate."""

    def make(folder: Path) -> list[Arrival]:
        with (folder / f"servegen/{name}_rate600s.csv").open() as file:
            windows = list(csv.DictReader(file))[first : first + 12]
        rng = np.random.default_rng(2)
        mean = sum(float(row["rate_rps"]) for row in windows) / len(windows)
        arrivals = []
        for number, row in enumerate(windows):
            shape = 1 / (0.15 * min(3.0, float(row["rate_weighted_cv"]))) ** 2
            for part in range(120):
                bin_rate = float(row["rate_rps"]) * rate / mean * rng.gamma(shape, 1 / shape)
                count = rng.poisson(bin_rate * 5)
                times = 600 * number + 5 * part + np.sort(rng.uniform(0, 5, count))
                prompts = rng.lognormal(math.log(float(row["mean_in_tok"])) - 0.5, 1.0, count)
                answers = rng.lognormal(math.log(float(row["mean_out_tok"])) - 0.32, 0.8, count)
                arrivals += zip(
                    times.tolist(),
                    np.clip(prompts, 16, 30_000).astype(int).tolist(),
                    np.clip(answers, 2, 4000).astype(int).tolist(),
                    strict=True,
                )
        return arrivals

    return make


def jump(_: Path) -> list[Arrival]:
    """8 requests a second for an hour, then 24 for an hour."""
    rng, arrivals, now = np.random.default_rng(5), list[Arrival](), 0.0
    while now < 7200:
        now += rng.exponential(1 / (8.0 if now < 3600 else 24.0))
        prompt, answer = rng.lognormal(math.log(900), 0.8), rng.lognormal(math.log(250), 0.6)
        lengths = int(np.clip(prompt, 16, 30_000)), int(np.clip(answer, 2, 4000))
        arrivals.append((now, *lengths))
    return arrivals


ARRIVALS: dict[str, Callable[[Path], list[Arrival]]] = {
    "azure": azure,
    "mooncake": mooncake,
    "m-large": servegen("m-large", 60, 50.0),
    "m-mid": servegen("m-mid", 30, 40.0),
    "m-small": servegen("m-small", 40, 45.0),
    "jump": jump,
}


def conversations(
    arrivals: Sequence[Arrival], from_s: float, to_s: float
) -> list[TraceConversation]:
    """Return the arrivals of a part, whose begin is 0."""
    return [
        TraceConversation(at - from_s, [TraceRequest(row, prompt, answer)])
        for row, (at, prompt, answer) in enumerate(sorted(arrivals))
        if from_s <= at < to_s
    ]


def prompt_s(tokens: int) -> float:
    """Return the time that a prompt alone takes, by which its first token may come later."""
    steps = math.ceil(tokens / ENGINE.max_num_batched_tokens)
    return (TIMING.c0 * steps + TIMING.c1 * tokens) / 1e3


def make_trial(
    requests: list[TraceConversation], start_s: float, from_s: float, mode: str
) -> Trial:
    """Return a trial of workers that take `start_s` to start."""
    workers = ReplayWorkers([ReplayGroup(1, ENGINE, TIMING)], "lru", prefix_caching=False)
    plan = ReplayPlan(
        "planner",
        workers,
        RouterSettings(mode=mode, max_queue_wait=math.inf),
        startup=Startup(start_s, start_s),
    )
    return Trial(plan, requests, PROMISE, from_s, prompt_s)


def planner_of(policy: str, predictor: str) -> Callable[[float, int], ScalePlanner]:
    """Return what makes a planner without limits for an eta and a peak."""

    def make(eta: float, peak: int) -> ScalePlanner:
        options = PolicyOptions(PLANNER_PREDICTORS.load(predictor), {}, eta, "", peak)
        return ScalePlanner(
            PLANNER_POLICIES.load(policy)(options), Rails(PlannerSettings()), PROMISE
        )

    return make


class Clairvoyant:
    """Wants the largest work of the next time, which it knows."""

    def __init__(self, trial: Trial, start_s: float, eta: float) -> None:
        requests = [(each.start_s, each.requests[0]) for each in trial.conversations]
        prompt = sum(each.prompt_tokens for _, each in requests) / len(requests)
        answer = sum(each.output_tokens for _, each in requests) / len(requests)
        limits = EngineLimits(256, 600_000, 8192)
        capacity = PromiseCapacity(TIMING, limits, PROMISE, Lengths(prompt, answer))
        answer_ms = capacity.answer_work_ms(capacity.batch())
        self.bins = [0.0] * (int(trial.end_s // 10) + 40)
        for at, each in requests:
            work_ms = TIMING.c1 * each.prompt_tokens + each.output_tokens * answer_ms
            self.bins[int(at // 10)] += work_ms / 1e3 / 10
        self.trial, self.start_s, self.eta = trial, start_s, eta
        self.number = 0

    def size(self, now: float) -> int:
        """Return the wanted size."""
        low, high = int(max(0.0, now - 10) // 10), int((now + self.start_s + 10) // 10)
        return max(1, math.ceil(max(self.bins[low : high + 1]) / self.eta))

    def drive(self, fleet: ReplayFleet) -> None:
        """Change the size every 10 s."""
        connector = SimulatedConnector(fleet, self.trial.plan.workers, self.start_s)

        def step() -> None:
            self.number += 1
            now = fleet.clock.now()
            complete(connector.scale(Order(self.number, "worker", self.size(now), "")))
            fleet.clock.call_at(now + 10.0, step)

        fleet.clock.call_at(0.0, step)


def play_clairvoyant(trial: Trial, start_s: float, floor: float) -> tuple[float, TrialResult]:
    """Return the largest eta that keeps the promise, and its result."""
    for eta in (number / 100 for number in range(100, 45, -5)):
        rule = Clairvoyant(trial, start_s, eta)
        result = play(with_size(trial, rule.size(0.0)), None, rule.drive)
        if result.broken <= floor + ALLOWED:
            break
    return eta, result


def play_best_static(trial: Trial, floor_at: int) -> tuple[int, TrialResult, float]:
    """Return the fewest fixed workers that keep the promise, their result, and the floor."""
    floor = play_static(trial, floor_at).broken
    low, high, best = 0, floor_at, play_static(trial, floor_at)
    while high - low > 1:
        middle = (low + high) // 2
        result = play_static(trial, middle)
        if result.broken <= floor + ALLOWED:
            high, best = middle, result
        else:
            low = middle
    return high, best, floor


def turning(turn_s: float) -> list[Arrival]:
    """Long prompts and short answers for 900 s, then the reverse, and so on, each turn in a time."""
    rng, arrivals = np.random.default_rng(3), []
    kinds = ((13.0, (6000, 0.5), (120, 0.5), 0), (75.0, (600, 0.6), (700, 0.4), 1))
    for rate, (prompt, prompt_sigma), (answer, answer_sigma), phase in kinds:
        now = 0.0
        while (now := now + rng.exponential(1 / rate)) < 3600:
            number, inside = divmod(now, 900)
            own = 1.0 if number % 2 == phase else 0.0
            if number and inside < turn_s:
                own = inside / turn_s if own else 1 - inside / turn_s
            if rng.random() < own:
                lengths = (
                    rng.lognormal(math.log(prompt), prompt_sigma),
                    rng.lognormal(math.log(answer), answer_sigma),
                )
                arrivals.append((now, max(1, int(lengths[0])), max(1, int(lengths[1]))))
    return arrivals


def compare_roles(
    turn_s: float, startups: Sequence[float], sizes: Sequence[int], *, flexible: bool
) -> None:
    """Print what fixed sizes, workers that compute prompts for each other, and `flow` do with 16
    workers."""
    requests = conversations(turning(turn_s), 0.0, math.inf)

    def trial_of(prefill: int, start_s: float) -> Trial:
        groups = [
            ReplayGroup(prefill, replace(ENGINE, roles=("prefill",)), TIMING),
            ReplayGroup(16 - prefill, replace(ENGINE, roles=("decode",)), TIMING),
        ]
        trial = make_trial(requests, start_s, 600.0, "kv")
        workers = ReplayWorkers(groups, "lru", prefix_caching=False, transfer=1e15)
        return replace(trial, plan=replace(trial.plan, workers=workers))

    if flexible:
        began, trial = time.process_time(), trial_of(8, 15.0)
        routing = trial.plan.router_settings
        disaggregation = replace(routing.disaggregation, mode="flexible", itl_slo=PROMISE.itl_ms)
        workers = replace(trial.plan.workers, groups=[ReplayGroup(16, ENGINE, TIMING)])
        routing = replace(routing, disaggregation=disaggregation)
        plan = replace(trial.plan, workers=workers, router_settings=routing)
        report(f"{turn_s:.0f} s", "16 flexible", play(replace(trial, plan=plan), None), 0.0, began)
    for prefill in sizes:
        began = time.process_time()
        result = play(trial_of(prefill, 15.0), None)
        report(f"{turn_s:.0f} s", f"fixed {prefill}:{16 - prefill}", result, 0.0, began)
    for start_s in startups:
        began = time.process_time()
        policy = PLANNER_POLICIES.load("flow")(PolicyOptions())
        rails = Rails(PlannerSettings(budget=16, cooldown=0.0))
        result = play(trial_of(8, start_s), ScalePlanner(policy, rails, PROMISE))
        report(f"{turn_s:.0f} s", f"{start_s:.0f} s flow", result, 0.0, began)


def report(name: str, what: str, result: TrialResult, floor: float, began: float) -> None:
    """Print a row."""
    avoidable = 100 * (result.broken - floor)
    took = time.process_time() - began
    print(
        f"{name:9} {what:32} {avoidable:7.2f} % {result.gpu_hours:8.2f} GPU-h {took:7.0f} s",
        flush=True,
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="?")
    parser.add_argument("--roles", type=float, help="seconds in which the mix turns")
    parser.add_argument("--fixed", default="8,9", help="--roles: workers for prompts")
    parser.add_argument("--flexible", action="store_true", help="--roles: such workers, too")
    parser.add_argument("--only", default=",".join(ARRIVALS))
    parser.add_argument("--startup", default="30,120,300")
    parser.add_argument("--policies", default="flow")
    parser.add_argument("--predictor", default="adaptive")
    parser.add_argument("--eta", type=float, default=0.0, help="omits the backtest")
    parser.add_argument("--no-clairvoyant", action="store_true")
    parser.add_argument("--many", type=int, default=40, help="workers that break what none avoids")
    parser.add_argument("--mode", default="least_loaded", help="of the router")
    args = parser.parse_args()
    if args.roles:
        startups = [float(each) for each in args.startup.split(",") if each]
        sizes = [int(each) for each in args.fixed.split(",") if each]
        compare_roles(args.roles, startups, sizes, flexible=args.flexible)
        return
    for name in args.only.split(","):
        arrivals = ARRIVALS[name](args.traces)
        half_s = max(at for at, *_ in arrivals) / 2
        history = conversations(arrivals, 0.0, half_s)
        begin_s = max(0.0, half_s - WARM_UP_S)
        second = conversations(arrivals, begin_s, math.inf)
        trial = make_trial(second, 30.0, half_s - begin_s, args.mode)
        began = time.process_time()
        size, best, floor = play_best_static(trial, args.many)
        report(name, f"static {size}", best, floor, began)
        for start_s in map(float, args.startup.split(",")):
            scored = make_trial(second, start_s, half_s - begin_s, args.mode)
            if not args.no_clairvoyant:
                began = time.process_time()
                eta, result = play_clairvoyant(scored, start_s, floor)
                report(name, f"{start_s:.0f} s clairvoyant {eta:g}", result, floor, began)
            for policy in args.policies.split(","):
                began, eta, peak = time.process_time(), args.eta, 0
                make = planner_of(policy, args.predictor)
                if policy == "flow" and not eta:
                    tested = backtest(make_trial(history, start_s, 0.0, args.mode), make)
                    eta, peak = tested.eta, tested.peak
                result = play(with_size(scored, peak or size), make(eta, peak))
                what = f"{start_s:.0f} s {policy} eta {eta:g} peak {peak}"
                report(name, what, result, floor, began)


if __name__ == "__main__":
    main()
