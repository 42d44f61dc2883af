"""`dynamo calibrate`: fit the timing of an engine to what its requests have measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.benchmark.replay_flags import FLAGS as REPLAY_FLAGS
from dynamo.cli.benchmark.replay_flags import numbers, set_replay_defaults
from dynamo.cli.parsing import Flag, Parser, check_writable, format_table, write_json
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.errors import ConfigError

if TYPE_CHECKING:
    from dynamo.operations.calibrate.fit import Calibration

EXAMPLES = """\
  dynamo calibrate http-8000 --workers 2 --router-mode kv --out timing.json
  dynamo calibrate requests.jsonl --workers 1 --max-num-seqs 128 --out timing.json
  dynamo calibrate c1.json c8.json c32.json --workers 1 --out timing.json
  dynamo replay http-8000 --timing timing.json --workers 4 --speed 2"""
FLAGS: Mapping[str, Sequence[Flag]] = {
    "calibration": (
        Flag("--out", "write the timing, for --timing", metavar="FILE"),
        Flag("--rows", "at most so many requests of each run", 1000, "N", numbers(int)),
        Flag("--json", "print the timing and its errors as JSON", False),
    )
}
SHARED_FLAGS = ("prompts computed by other workers", "tiers below the engines' blocks")


def parser() -> Parser:
    """Return the parser: the measured runs, and the settings of the cluster that served them."""
    parser = Parser(
        "dynamo calibrate",
        "Fit the time of an engine's steps to measured runs, by replaying these with the real "
        "router, caches and schedulers.\nOne half of the requests is fitted, the errors are those "
        "of the other half. Settings are those of `dynamo replay`, and must be those of the "
        "cluster that served the runs.",
        EXAMPLES,
        usage="RUN ... [FLAGS]",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a deployment or the folder of its record, rows of a trace with ttft_ms and e2e_ms, a "
        "result of `dynamo bench`, or vLLM's requests.jsonl",
    )
    parser.add_flags({**FLAGS, **{title: REPLAY_FLAGS[title] for title in SHARED_FLAGS}})
    set_replay_defaults(parser, trace="calibration")
    add_settings_flags(parser, shown=("router", "engine", "workers"))
    return parser


def run(arguments: Sequence[str]) -> int:
    """Calibrate, print how well, and write the timing."""
    args = parser().parse(arguments)
    loaded = load_settings(args)
    if args.rows < 1:
        raise ConfigError("--rows must be at least 1")

    from dynamo.cli.benchmark.replay import make_plan
    from dynamo.operations.calibrate.fit import calibrate
    from dynamo.operations.calibrate.measured import read_run
    from dynamo.services.planning.record import locate_trace

    check_writable(args.out)
    runs = [read_run(locate_trace(path), args.rows) for path in args.runs]
    plan = make_plan(args, loaded)
    groups = plan.workers.groups
    if loaded.origins["engine.workers"] == "default" and len(groups) == 1:
        count = max(1, *(measured.workers for measured in runs))
        groups = [replace(groups[0], count=count)]
        plan = replace(plan, workers=replace(plan.workers, groups=groups))
    calibration = calibrate(runs, plan, lambda line: print(line, file=sys.stderr))
    if args.out:
        write_json(args.out, calibration.timing)
    if args.json:
        print(msgspec.json.encode(calibration).decode())
    else:
        print(format_calibration(calibration))
    return 0


def format_calibration(calibration: Calibration) -> str:
    """Return the timing and its errors as text."""
    timing = calibration.timing
    rows = [("run", "requests", "metric", "mean", "p99")]
    for title, errors in (("fitted", calibration.fitted), ("tested", calibration.tested)):
        rows += [
            (name, title, metric, f"{mean:+.1%}", f"{p99:+.1%}")
            for name, metric, mean, p99 in errors
        ]
    note = "" if calibration.tested else "no request is known by itself: nothing is left to test\n"
    return (
        f"step = {timing.c0:.4g} ms + {timing.c1:.4g} a new prompt token + {timing.c2:.4g} a "
        f"sequence + {timing.c3:.4g} a token of decoded context"
        + (f" + {timing.c4:.4g} a pair of prompt tokens" if timing.c4 else "")
        + f"\n"
        f"{calibration.replays} replays, {calibration.cpu_s:.0f} s of CPU\n{note}\n"
        + "\n".join(format_table(rows))
    )
