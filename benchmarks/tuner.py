#!/usr/bin/env python3
"""Measure the tuner: how near its search comes to the full grid, and its rounds on live traffic.

    benchmarks/tuner.py TRACES [--only NAME] [--rounds 20]

TRACES is a folder with sharegpt300_llama-3.1-8b_blk16.jsonl, mooncake_conversation_trace.jsonl and
azure2023_conv.csv. The search begins with 16 sequences and 512 tokens a step. Its advice is compared
with the best of all 36 pairs of sizes, by cost. The cost is the mean time of a request, times 1 + 10 x
the share of broken promises. A round lets one of 8 workers have other settings for 5 minutes of a
replay. Settings are good, of a search whose timing is wrong by 2 (half or twice), bad, or change
nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dynamo.core.settings.keys import setting_specs_by_key
from dynamo.core.settings.schema_router import RouterSettings
from dynamo.core.timing.model import Timing
from dynamo.core.values import EngineInfo
from dynamo.operations.planner.values import Promise
from dynamo.operations.replay.fast.replay import FastReplay
from dynamo.operations.replay.replay import ReplayPlan
from dynamo.operations.replay.trace import (
    ArrivalOptions,
    TraceConversation,
    TraceRequest,
    read_trace,
)
from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
from dynamo.operations.tuner.outcome import SettingOutcome, replay_outcome
from dynamo.operations.tuner.search import Recommendation, SettingSearch
from dynamo.operations.tuner.trials import LONG_S, MOST_LONG, busiest, make_stages
from dynamo.operations.tuner.verdict import LiveRequest, TrialRules, TrialVerdict, judge

KEYS = ("engine.max_num_seqs", "engine.max_num_batched_tokens")
RANGES = {key: setting_specs_by_key()[key].meta.tuned for key in KEYS}
START = dict(zip(KEYS, (16, 512), strict=True))
PERIOD_S, CHECKS = 300.0, 60
ROUND_WORKERS, LOAD = 8, 0.7
GOOD = dict(zip(KEYS, (256, 8192), strict=True))


class Case(msgspec.Struct, frozen=True):
    """A trace, and the deployment that serves it."""

    requests: Sequence[TraceConversation]
    workers: int
    timing: Timing
    promise: Promise
    mode: str = "round_robin"
    block_tokens: int = 64

    def plan(
        self, values: Mapping[str, Any], scale: float = 1.0, tried: Mapping[str, Any] | None = None
    ) -> ReplayPlan:
        """Return the plan with these values; with `tried`, one of the workers has those."""
        timing = Timing(*(scale * value for value in msgspec.structs.astuple(self.timing)))
        groups = [ReplayGroup(self.workers, _engine(values), timing)]
        if tried is not None:
            groups = [
                ReplayGroup(1, _engine(tried), timing),
                ReplayGroup(self.workers - 1, _engine(values), timing, "siblings"),
            ]
        return ReplayPlan(
            "case", ReplayWorkers(groups, "lru"), RouterSettings(mode=self.mode), self.block_tokens
        )


def _engine(values: Mapping[str, Any]) -> EngineInfo:
    return EngineInfo("mock", 64, 600_000 // 64, 131_072, *(values[key] for key in KEYS))


def cases(folder: Path) -> Mapping[str, Case]:
    """Return the traces by name."""
    sharegpt = read_trace(str(folder / "sharegpt300_llama-3.1-8b_blk16.jsonl"), ArrivalOptions(), 0)
    mooncake = folder / "mooncake_conversation_trace.jsonl"
    twice = read_trace(str(mooncake), ArrivalOptions(2.0), 3000)
    l4, fast = Timing(13.61, 0.0415, 0.0749, 4.0e-5), Timing(12.0, 0.09, 0.05, 6e-5)
    return {
        "sharegpt": Case(sharegpt, 1, l4, Promise(2.0, 60.0), block_tokens=16),
        "mooncake": Case(twice, 8, l4, Promise(4.0, 60.0), "kv", 512),
        "azure": Case(azure(folder / "azure2023_conv.csv"), 2, fast, Promise(2.0, 60.0)),
    }


def azure(path: Path) -> list[TraceConversation]:
    """Return an hour of Azure's conversations."""
    with path.open() as file:
        rows = [
            (
                datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                int(row["ContextTokens"]),
                max(1, int(row["GeneratedTokens"])),
            )
            for row in csv.DictReader(file)
        ]
    return [
        TraceConversation(at - rows[0][0], [TraceRequest(number, prompt, answer)])
        for number, (at, prompt, answer) in enumerate(rows)
    ]


def search(case: Case, scale: float = 1.0) -> tuple[SettingSearch, list[Recommendation]]:
    """Return a search from `START`, and what it recommends."""
    stages = make_stages(case.requests, lambda values: case.plan(values, scale), case.promise)
    searched = SettingSearch(RANGES, START, stages, 0.9)
    searched.run()
    return searched, [each for each in searched.recommendations(0.05) if each.safety_score > 0.9]


def measure_search(name: str, case: Case) -> None:
    """Print a search beside the full grid, both on the busiest hour."""
    begin = time.process_time()
    searched, advice = search(case)
    seconds = time.process_time() - begin
    hour = busiest(case.requests, LONG_S)[:MOST_LONG]

    def cost(values: Mapping[str, Any]) -> float:
        outcome: SettingOutcome = replay_outcome(
            *FastReplay(case.plan(values)).run(hour), case.promise
        )
        return outcome.figures.cost

    grid = {pair: cost(dict(zip(KEYS, pair, strict=True))) for pair in product(*RANGES.values())}
    best = min(grid, key=grid.__getitem__)
    chosen = tuple({**START, **(advice[0].after if advice else {})}[key] for key in KEYS)
    row = {
        "trace": name,
        "requests": len(hour),
        "replays": searched.replays,
        "cpu_s": round(seconds, 1),
        "start": round(grid[tuple(START.values())], 3),
        "chosen": chosen,
        "cost": round(grid[chosen], 3),
        "best": best,
        "best_cost": round(grid[best], 3),
        "above_best": round(grid[chosen] / grid[best] - 1, 4),
        "live_changes": len(advice[0].after) if advice else 0,
    }
    print(json.dumps(row), flush=True)


def live_round(
    case: Case, old: Mapping[str, Any], new: Mapping[str, Any], part: Sequence[TraceConversation]
) -> tuple[TrialVerdict, float, float]:
    """Return the verdict on a process with new settings, when it was given, and the share of all
    requests of the period whose promise is broken by the trial."""
    rules = TrialRules(case.promise, PERIOD_S, 0.05)
    tried = _live(case.plan(old, tried=new), part)
    without = _live(case.plan(old), part)
    for check in range(1, CHECKS + 1):
        now_s = check * PERIOD_S / CHECKS
        ended = [row for row in tried if row.arrived_s + (row.e2e_s or 0.0) <= now_s]
        verdict = judge(rules, ended, now_s)
        if verdict is not None:
            break
    assert verdict is not None
    broken, before = (
        sum(_is_broken(row, case.promise, now_s) for row in rows if row.arrived_s < now_s)
        for rows in (tried, without)
    )
    return verdict, now_s, (broken - before) / len(part)


def _live(plan: ReplayPlan, part: Sequence[TraceConversation]) -> list[LiveRequest]:
    _, log = FastReplay(plan).run(part)
    sizes = {row.row: row.prompt_tokens for each in part for row in each.requests}
    workers = {each.request: each.worker for each in log.placements}
    return [
        LiveRequest(at, sizes[row], tokens, ttft_s, e2e_s, str(workers[row]), not workers[row])
        for row, tokens, at, ttft_s, e2e_s in zip(
            log.rows, log.tokens, log.arrived_s, log.ttft_s, log.e2e_s, strict=True
        )
    ]


def _is_broken(row: LiveRequest, promise: Promise, end_s: float) -> bool:
    """Whether the promise is broken, if those that still wait at `end_s` go to other workers."""
    assert row.ttft_s is not None
    assert row.e2e_s is not None
    if row.arrived_s + min(row.ttft_s, promise.ttft_s) > end_s:
        return False
    itl_ms = (row.e2e_s - row.ttft_s) * 1e3 / max(1, row.output_tokens - 1)
    return row.ttft_s > promise.ttft_s or itl_ms > promise.itl_ms


def periods(case: Case, count: int) -> Iterator[list[TraceConversation]]:
    """Yield periods with requests of the trace, of which all workers bear `LOAD` with `GOOD`."""
    rng = random.Random(1)
    at_once = [replace(each, start_s=0.0) for each in case.requests[:1000]]
    result, _ = FastReplay(replace(case, workers=1).plan(GOOD)).run(at_once)
    mean_s = result.duration_s / len(at_once) / LOAD / ROUND_WORKERS
    for _ in range(count):
        now_s, part = 0.0, list[TraceConversation]()
        while (now_s := now_s + rng.expovariate(1 / mean_s)) < PERIOD_S:
            (request, *_) = rng.choice(case.requests).requests
            part.append(TraceConversation(now_s, [replace(request, row=len(part), block_ids=())]))
        yield part


def measure_rounds(name: str, case: Case, count: int) -> None:
    """Print what becomes of good, wrong and bad advice, and of settings that change nothing."""
    live = replace(case, workers=ROUND_WORKERS, mode="round_robin")
    wrong = {scale: search(case, scale)[1] for scale in (0.5, 2.0)}
    advice = {
        "good": (START, GOOD),
        **{
            f"timing times {scale:g}": (
                START,
                {**START, **(recommended[0].after if recommended else {})},
            )
            for scale, recommended in wrong.items()
        },
        "planted: 1 sequence": (GOOD, {**GOOD, "engine.max_num_seqs": 1}),
        "planted: 16 sequences": (GOOD, {**GOOD, "engine.max_num_seqs": 16}),
        "without effect": (GOOD, {**GOOD, "engine.max_num_seqs": 255}),
    }
    for label, (old, new) in advice.items():
        rounds = [live_round(live, old, new, part) for part in periods(live, count)]
        row = {
            "trace": name,
            "advice": label,
            "settings": list(new.values()),
            "rounds": count,
            "kept": sum(verdict.keep for verdict, _, _ in rounds),
            "verdict_s": max(seconds for _, seconds, _ in rounds),
            "reason": rounds[-1][0].why,
            "broken_most": round(max(broken for *_, broken in rounds), 4),
        }
        print(json.dumps(row), flush=True)


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    for name, case in cases(args.traces).items():
        if args.only in {"", name}:
            measure_search(name, case)
            if args.rounds:
                measure_rounds(name, case, args.rounds)


if __name__ == "__main__":
    main()
