"""`dynamo plan`: the decisions of a planner, or those that one would have made."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from dynamo.cli.benchmark.replay_flags import FLAGS as REPLAY_FLAGS
from dynamo.cli.benchmark.replay_flags import named_flags, set_replay_defaults
from dynamo.cli.parsing import Flag, Parser, check_writable, format_table
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.errors import ConfigError, NotFound
from dynamo.core.settings import LoadedSettings, Settings

if TYPE_CHECKING:
    from dynamo.operations.planner.simulation import Trial, TrialResult
    from dynamo.operations.planner.values import ScaleDecision

EXAMPLES = """\
  dynamo plan                                  the last decision of the only planner here
  dynamo plan http-8000 --explain              its last decisions, as sentences
  dynamo plan --dry-run http-8000 --planner.ttft 1s --planner.itl 40ms --timing timing.json
  dynamo plan --dry-run trace.jsonl --startup 60s --planner.budget 8 --plot sizes.png"""
SHARED_FLAGS = ("prompts computed by other workers",)
FLAGS: Mapping[str, Sequence[Flag]] = {
    "plan": (
        Flag("--dry-run", "play the policy on recorded requests, and order nothing", False),
        Flag("--explain", "print each decision as sentences", False),
        Flag("--last", "at most so many decisions", 20, "N"),
        Flag("--plot", "draw the sizes over time", metavar="PNG"),
        *named_flags("--rows", "--speed", "--startup"),
    )
}
START_S = 30.0


def parser() -> Parser:
    """Return the parser: the deployment or the trace, and the settings of the planner."""
    parser = Parser(
        "dynamo plan",
        "Show what the planner of a deployment has decided, and why. With --dry-run, play the "
        "policy of the settings on a record or a trace: the first half is history, the second is "
        "scored.",
        EXAMPLES,
        usage="[DEPLOYMENT|TRACE] [FLAGS]",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        default="",
        metavar="DEPLOYMENT|TRACE",
        help="default: the deployment that planned, or whose requests were recorded, last",
    )
    parser.add_flags({**FLAGS, **{title: REPLAY_FLAGS[title] for title in SHARED_FLAGS}})
    set_replay_defaults(parser, fast=True)
    add_settings_flags(parser, shown=("planner", "router", "engine", "workers"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Show decisions, or play a policy."""
    args = parser().parse(arguments)
    loaded = load_settings(args)
    if args.plot:
        from dynamo.operations.plotting import check_matplotlib

        check_matplotlib()
        check_writable(args.plot)
    return _dry_run(args, loaded) if args.dry_run else _show(args)


def _show(args: argparse.Namespace) -> int:
    from dynamo.operations.planner.decisions import find_planner_folder, read_decisions

    folder = find_planner_folder(args.trace)
    decisions = [] if folder is None else read_decisions(folder, max(1, args.last))
    if folder is None or not decisions:
        name = f"deployment {args.trace!r}" if args.trace else "deployment here"
        raise NotFound(
            f"no planner of a {name} has decided anything",
            hint="serve with --planner, or see `dynamo plan --dry-run`",
        )
    if not args.trace:
        print(f"deployment {folder.parent.name}, which was planned last:", file=sys.stderr)
    _print_decisions(decisions if args.explain else decisions[-1:])
    if args.plot:
        _draw(args.plot, decisions)
    return 0


def _print_decisions(decisions: Sequence[ScaleDecision], *, wall: bool = True) -> None:
    from dynamo.operations.planner.planner import describe

    def time_of(seconds: float) -> str:
        if not wall:
            return f"{seconds:.0f} s"
        return datetime.fromtimestamp(seconds, UTC).isoformat(sep=" ", timespec="seconds")

    for decision in decisions:
        print("\n".join(describe(decision, time_of)))


def _dry_run(args: argparse.Namespace, loaded: LoadedSettings) -> int:
    from dynamo.operations.planner.backtest import backtest, short_record
    from dynamo.operations.planner.options import make_planner
    from dynamo.operations.planner.simulation import play, play_static, with_size

    history, trial = _read_trials(args, loaded)
    settings, rows = loaded.settings, [("policy", "broken", "GPU-hours", "workers")]
    half_s = history.conversations[-1].start_s if history.conversations else 0.0
    missing = short_record(half_s, len(history.conversations))
    tested: dict[str, Any] = {"eta_missing": missing}
    if settings.planner.policy == "flow" and not missing and len(trial.plan.workers.groups) == 1:
        best = backtest(history, lambda eta, peak: make_planner(settings, eta=eta, peak=peak))
        tested = {"eta": best.eta, "peak": best.peak}
        trial = with_size(trial, best.peak)
        fixed = play_static(trial, best.peak)
        size = str(best.peak)
        rows.append((f"static {size}", f"{fixed.broken:.2%}", f"{fixed.gpu_hours:.2f}", size))
        print(f"backtest: forecast work may take {best.eta:g} of a worker's time", file=sys.stderr)
    result = play(trial, make_planner(settings, **tested))
    if args.explain:
        _print_decisions(result.decisions[-args.last :], wall=False)
    rows.append(_row(settings, result, trial.from_s))
    print("\n".join(format_table(rows)))
    notes = [note for each in result.decisions for note in each.notes]
    for note in {note.partition(":")[0]: note for note in notes}.values():
        print(f"note: {note}")
    if args.plot:
        _draw(args.plot, result.decisions)
    return 0


def _row(settings: Settings, result: TrialResult, from_s: float) -> tuple[str, str, str, str]:
    scored = [each.kinds.values() for each in result.decisions if each.now_s >= from_s]
    totals = [sum(kind.wanted for kind in kinds) for kinds in scored]
    sizes = f"{min(totals)}-{max(totals)}" if totals else "-"
    return settings.planner.policy, f"{result.broken:.2%}", f"{result.gpu_hours:.2f}", sizes


def _read_trials(args: argparse.Namespace, loaded: LoadedSettings) -> tuple[Trial, Trial]:
    """Return the first half of the requests, and all with the second half scored. Raises
    `ConfigError`."""
    from dynamo.cli.benchmark.replay import make_plan, read_trace_flags
    from dynamo.cli.foresight.record import locate_record
    from dynamo.operations.planner.options import promise_of
    from dynamo.operations.planner.simulation import Trial
    from dynamo.operations.replay.fleet import Startup
    from dynamo.operations.replay.trace import ArrivalOptions, read_trace

    args.trace = args.trace or locate_record("")
    read_trace_flags(args)
    startup, args.startup = args.startup, None
    origins = {key: what for key, what in loaded.origins.items() if not key.startswith("planner.")}
    plan = make_plan(args, replace(loaded, origins=origins))
    plan = replace(plan, startup=startup or Startup(START_S, START_S))
    requests = read_trace(args.trace, ArrivalOptions(args.speed), args.rows)
    half_s = (requests[0].start_s + requests[-1].start_s) / 2
    history = [each for each in requests if each.start_s < half_s]
    promise = promise_of(loaded.settings)
    if not (promise.ttft_s < 1e9 or promise.itl_ms < 1e9):
        raise ConfigError(
            "nothing is promised", hint="set planner.ttft and planner.itl, such as 1s and 40ms"
        )
    return Trial(plan, history, promise), Trial(plan, requests, promise, half_s)


def _draw(path: str, decisions: Sequence[ScaleDecision]) -> None:
    """Draw the wanted, ready and draining workers of each kind over time into a PNG file."""
    from dynamo.operations.plotting import make_panels

    kinds = sorted({kind for each in decisions for kind in each.kinds})
    figure, panels = make_panels(max(1, len(kinds)), 1)
    for kind, panel in zip(kinds, panels, strict=False):
        seen = [each for each in decisions if kind in each.kinds]
        times = [(each.now_s - decisions[0].now_s) / 60 for each in seen]
        for name, style in (("ready", "-"), ("wanted", "--"), ("draining", ":")):
            sizes = [getattr(each.kinds[kind], name) for each in seen]
            panel.step(times, sizes, style, where="post", label=name)
        panel.set(title=kind, xlabel="minutes", ylabel="workers", ylim=(0, None))
        panel.grid(visible=True, alpha=0.3)
        panel.legend(fontsize=8)
    figure.savefig(path, format="png")
