"""`dynamo tune`: find better settings in replays of a record, and try them on one process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from dynamo.cli.benchmark.replay_flags import FLAGS as REPLAY_FLAGS
from dynamo.cli.benchmark.replay_flags import named_flags, set_replay_defaults
from dynamo.cli.parsing import Flag, Parser, format_table
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings
from dynamo.core.settings.reload import replace_setting

if TYPE_CHECKING:
    from dynamo.operations.replay.replay import ReplayPlan
    from dynamo.operations.tuner.search import Recommendation, SettingSearch
    from dynamo.operations.tuner.verdict import TrialVerdict
    from dynamo.runtime.deployment import Deployment

EXAMPLES = """\
  dynamo tune                                          the record that was written last
  dynamo tune http-8000 --timing timing.json --planner.ttft 1s --planner.itl 40ms
  dynamo tune http-8000 --apply --workers 4 --timing timing.json
  dynamo tune --trace trace.jsonl --max-num-seqs 16 --max-num-batched-tokens 512"""
FLAGS: Mapping[str, Sequence[Flag]] = {
    "tune": (
        Flag("--trace", "replay this trace instead of a record", metavar="FILE"),
        Flag(
            "--apply",
            "try the best on one process of the deployment, and let all have it, or none",
            False,
        ),
        Flag("--json", "print JSON", False),
        *named_flags("--rows", "--speed"),
    )
}
SHARED_FLAGS = ("prompts computed by other workers",)
MOST_SHOWN = 3
CHOOSE_HINT = "name one of: {}"


def parser() -> Parser:
    """Return the parser: the deployment or the trace, and the settings to begin with."""
    parser = Parser(
        "dynamo tune",
        "Find better settings by at most 32 replays of a record, and say what they gain and how "
        "safe they are. The flags are the settings of the deployment and its timing. Requests "
        "take as little time as possible, and break as few promises (planner.ttft and .itl).\n"
        "With --apply, one process has the best of them for tuner.tuning_observation_period. Then "
        "all of its kind get them, if it gained enough beside its siblings.",
        EXAMPLES,
        usage="[DEPLOYMENT] [FLAGS]",
    )
    parser.add_argument(
        "deployment",
        nargs="?",
        default="",
        metavar="DEPLOYMENT",
        help="whose record is replayed, and which gets better settings (default: the record that "
        "was written last, and the only deployment that runs)",
    )
    parser.add_flags({**FLAGS, **{title: REPLAY_FLAGS[title] for title in SHARED_FLAGS}})
    set_replay_defaults(parser, fast=True)
    add_settings_flags(parser, shown=("tuner", "planner", "router", "engine"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Search, and print what was found."""
    args = parser().parse(arguments)
    loaded = load_settings(args)
    if args.trace and args.deployment and not args.apply:
        raise ConfigError("two sources of requests", hint="name a deployment or --trace FILE")
    deployment = _live_deployment(args) if args.apply else None
    search = make_search(args, loaded)
    from dynamo.operations.tuner.tuner import AutoTuner

    interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted after {search.replays} replays", file=sys.stderr)
    settings = loaded.settings
    safe = AutoTuner(settings.tuner).select(search)
    better = search.recommendations(settings.tuner.min_improvement_threshold)
    if args.json:
        print(msgspec.json.encode({"replays": search.replays, "recommendations": safe}).decode())
    else:
        _print(safe, better, search.replays)
    if interrupted or deployment is None or not safe:
        return 130 if interrupted else 0
    return _apply(safe[0], deployment, settings)


def _live_deployment(args: argparse.Namespace) -> Deployment:
    """Return the deployment to tune. Raises `ConfigError` and `NotFound`."""
    from dynamo.cli.stop import select_deployments
    from dynamo.runtime.deployment import live_deployments

    (deployment,) = select_deployments(live_deployments(), args.deployment or None, CHOOSE_HINT)
    args.deployment = deployment.id
    return deployment


def _apply(best: Recommendation, deployment: Deployment, settings: Settings) -> int:
    """Try a recommendation on a deployment, and print what became of it."""
    from dynamo.cli.foresight.record import locate_record
    from dynamo.core.clock import SystemClock
    from dynamo.operations.planner.options import promise_of
    from dynamo.operations.tuner.rounds import run_round
    from dynamo.operations.tuner.verdict import TrialRules

    tuner, record = settings.tuner, Path(locate_record(deployment.id))
    trial = TrialRules(
        promise_of(settings), tuner.tuning_observation_period, tuner.min_improvement_threshold
    )

    async def try_values(kind: str, values: Mapping[str, Any]) -> TrialVerdict:
        print(f"a {kind} has them for {trial.period_s:g} s", flush=True)
        return await run_round(deployment.folder, record, kind, values, trial, SystemClock())

    from dynamo.operations.tuner.tuner import AutoTuner

    try:
        verdicts = asyncio.run(AutoTuner(tuner, run_round=try_values).apply(best))
    except KeyboardInterrupt:
        text = "the settings are taken back, unless all processes were getting them already"
        print(f"interrupted: {text}", file=sys.stderr)
        return 130
    for verdict in verdicts:
        print(f"{'kept' if verdict.keep else 'taken back'}: {verdict.why}")
    if all(verdict.keep for verdict in verdicts):
        lines = [f"{key}: {value}" for key, value in best.after.items()]
        print(f"write them into the settings file for later starts: {', '.join(lines)}")
    return 0


def make_search(args: argparse.Namespace, loaded: LoadedSettings) -> SettingSearch:
    """Return the search that the flags describe. Raises `ConfigError`."""
    from dynamo.cli.benchmark.replay import make_plan, read_trace_flags
    from dynamo.cli.foresight.record import locate_record
    from dynamo.operations.planner.options import promise_of
    from dynamo.operations.replay.trace import ArrivalOptions, read_trace
    from dynamo.operations.tuner.search import SettingSearch
    from dynamo.operations.tuner.trials import make_stages, tuned_ranges

    if args.trace and args.deployment:
        _check_models(args.trace, locate_record(args.deployment))
    args.trace = args.trace or locate_record(args.deployment)
    read_trace_flags(args)
    ours = ("planner.", "tuner.")
    origins = {key: what for key, what in loaded.origins.items() if not key.startswith(ours)}

    def plan_with(values: Mapping[str, Any]) -> ReplayPlan:
        settings = loaded.settings
        for key, value in values.items():
            settings = replace_setting(settings, key, value)
        return make_plan(args, replace(loaded, settings=settings, origins=origins))

    engine = plan_with({}).workers.groups[-1].engine
    start = {
        "engine.max_num_seqs": engine.max_num_seqs,
        "engine.max_num_batched_tokens": engine.max_num_batched_tokens,
        "router.policy": loaded.settings.router.policy,
    }
    requests = read_trace(args.trace, ArrivalOptions(args.speed), args.rows)
    stages = make_stages(requests, plan_with, promise_of(loaded.settings))
    safety = loaded.settings.tuner.min_safety_score
    return SettingSearch(tuned_ranges(loaded.settings), start, stages, safety)


def _check_models(trace: str, record: str) -> None:
    """Raise `ConfigError` if a trace is of other models than a deployment."""
    from dynamo.operations.bench.traces import trace_models

    models, own = trace_models(trace), trace_models(record)
    if models and own and not models & own:
        served, recorded = (", ".join(sorted(each)) for each in (own, models))
        raise ConfigError(
            f"{trace} has requests for {recorded}, and the deployment serves {served}",
            hint="name a trace of its model, or none for its own record",
        )


def _print(safe: Sequence[Recommendation], better: Sequence[Recommendation], replays: int) -> None:
    for number, each in enumerate(safe[:MOST_SHOWN], 1):
        print(f"{number}. {_sentence(each)}")
        print("\n".join(format_table(_rows(each))))
    if not safe:
        print(f"nothing better was found by {replays} replays")
    gain = safe[0].comparison.gain if safe else 0.0
    refused = [each for each in better if each not in safe and each.comparison.gain > gain]
    if refused:
        print(f"refused: {_sentence(refused[0])}")
        print("\n".join(format_table(_rows(refused[0]))))
        print("a promise by planner.ttft and planner.itl allows what keeps it")


def _sentence(advice: Recommendation) -> str:
    changes = [f"{key} {advice.before[key]} -> {advice.after[key]}" for key in sorted(advice.after)]
    seen = advice.comparison
    return (
        f"{', '.join(changes)}: {seen.gain:.0%} better ({seen.low:.0%} to {seen.high:.0%}), "
        f"safety {seen.safety_score:.2f}"
    )


def _rows(advice: Recommendation) -> list[tuple[str, str, str]]:
    old, new = advice.old, advice.new
    return [
        ("", "now", "then"),
        ("broken promises", f"{old.broken:.2%}", f"{new.broken:.2%}"),
        ("TTFT p99", f"{old.ttft_p99_s:.3g} s", f"{new.ttft_p99_s:.3g} s"),
        ("ITL p99", f"{old.itl_p99_ms:.3g} ms", f"{new.itl_p99_ms:.3g} ms"),
    ]
