"""`dynamo replay`: replay a trace on a simulated cluster in virtual time."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.benchmark.report import ReplayProgress, format_replay_result
from dynamo.cli.parsing import Parser, check_writable, write_file
from dynamo.cli.progress_bar import ProgressBar
from dynamo.cli.settings_flags import add_settings_flags, load_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings

if TYPE_CHECKING:
    from dynamo.core.settings.schema_engine import EngineSettings
    from dynamo.core.settings.schema_router import RouterSettings
    from dynamo.core.values import EngineInfo
    from dynamo.operations.replay.replay import ReplayPlan
    from dynamo.scheduling.admission import SloLimits

ENGINE_DEFAULTS: dict[str, int] = {"workers": 8, "block_size": 64}
"""Defaults of a replay that differ from those of the engine's settings."""

UNSUPPORTED_SETTINGS = (
    "router.migration_limit",
    "router.replicas",
    "engine.labels",
    "engine.threads",
    "engine.speedup_ratio",
)
"""Settings of the router and engine sections that a replay does not simulate."""
SIMULATED_SETTINGS = ("router.", "engine.", "model.context_tokens")
"""Prefixes of the settings that have an effect on a replay."""

EXAMPLES = """\
  dynamo replay conversation.jsonl
  dynamo replay conversation.jsonl.gz --router-mode kv --speed 3 --json a.json
  dynamo replay agents.jsonl --trace-block-size 64 --workers 4 --num-blocks 8192 --plot a.png
  dynamo replay trace.jsonl --timing constant:0.02,5 --eviction lru --decisions placed.jsonl
  dynamo replay trace.jsonl --speed 3 --ttft-slo 2"""


def parser() -> Parser:
    """Return the parser: the trace, the replay's flags, and the router and engine settings."""
    parser = Parser(
        "dynamo replay",
        "Replay a trace on a cluster with the real router, caches and schedulers, simulated "
        "engines and virtual time.\nEach line of a Mooncake trace is a request {timestamp (ms), "
        "input_length, output_length, hash_ids}. Lines of the same session_id run one after the "
        "other, each `delay` ms after the end of the previous one.\nDefaults: 8 workers and "
        "blocks of 64 tokens.",
        EXAMPLES,
        usage="TRACE [FLAGS]",
    )
    parser.add_argument("trace", metavar="TRACE", help="JSON lines, plain or .gz")
    _add_arrival_flags(parser.add_argument_group("replay"))
    _add_output_flags(parser.add_argument_group("output"))
    add_settings_flags(parser, shown=("router", "engine"))
    return parser


def _add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace-block-size",
        type=_number(int),
        default=512,
        metavar="TOKENS",
        help="tokens per hash id of the trace (default: 512)",
    )
    group.add_argument(
        "--speed",
        type=_number(float),
        default=1.0,
        metavar="X",
        help="divide the trace's times by X (default: 1)",
    )
    group.add_argument(
        "--smear",
        type=_number(float, allow_zero=True),
        default=0.0,
        metavar="SECONDS",
        help="delay each conversation by a random time up to this, in trace time",
    )
    rows = "only the first N lines"
    group.add_argument("--rows", type=_number(int), default=0, metavar="N", help=rows)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: 0)")


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="OUT", help="write the result as JSON (- prints it)")
    group.add_argument(
        "--decisions", metavar="FILE", help="write {request, worker, placed_ms} of each request"
    )
    group.add_argument("--plot", metavar="PNG", help="plot the result")


def run(arguments: Sequence[str]) -> int:
    """Replay a trace. Returns 1 if a request failed other than by rejection."""
    args = parser().parse(arguments)
    loaded = load_settings(args)

    from dynamo.operations.plotting import check_matplotlib
    from dynamo.operations.replay.replay import Replay
    from dynamo.operations.replay.replay_plot import draw_replay
    from dynamo.operations.replay.trace import ArrivalOptions, read_trace

    if args.plot:
        check_matplotlib()
    check_writable(args.json, args.decisions, args.plot)
    plan = _make_plan(args, loaded)
    arrivals = ArrivalOptions(args.speed, args.smear, args.seed)
    conversations = read_trace(args.trace, arrivals, args.rows)
    total = sum(len(conversation.requests) for conversation in conversations)
    with ProgressBar(sys.stderr) as bar:
        result, log = Replay(plan, ReplayProgress(bar, total)).run(conversations)
    if args.decisions:
        _write_lines(args.decisions, map(msgspec.json.encode, log.placements))
    if args.json:
        _write_lines(args.json, [msgspec.json.format(msgspec.json.encode(result), indent=1)])
    if args.plot:
        draw_replay(result, log, args.plot)
    if args.json != "-":
        print(format_replay_result(result))
    return 0 if result.completed + result.rejected == result.requests else 1


def _make_plan(args: argparse.Namespace, loaded: LoadedSettings) -> ReplayPlan:
    from dynamo.inference.mock.engine import make_mock_engine_info
    from dynamo.inference.mock.timing import parse_timing
    from dynamo.operations.replay.cluster import ReplayWorkers
    from dynamo.operations.replay.replay import ReplayPlan

    engine = _engine_settings(loaded)
    context_tokens = loaded.settings.model.context_tokens or sys.maxsize
    info = make_mock_engine_info(engine, context_tokens=context_tokens)
    routing = _router_settings(loaded)
    slo = _slo_limits(loaded, routing)
    workers = ReplayWorkers(
        engine.workers,
        info,
        parse_timing(engine.timing),
        engine.eviction,
        ranks=engine.data_parallel_size,
        prefix_caching=engine.prefix_caching,
    )
    return ReplayPlan(
        trace=Path(args.trace).name,
        workers=workers,
        router_settings=routing,
        trace_block_tokens=args.trace_block_size,
        seed=args.seed,
        slo=slo,
        settings=_settings_summary(args, loaded, engine, info) | _router_summary(routing, slo),
    )


def _router_settings(loaded: LoadedSettings) -> RouterSettings:
    routing = loaded.settings.router
    if loaded.origins["router.queue_bound"] == "default":
        return replace(routing, queue_bound=sys.maxsize)  # a replay rejects nothing by default
    return routing


def _slo_limits(loaded: LoadedSettings, routing: RouterSettings) -> SloLimits | None:
    """Return the limits of admission; None if no setting asks for admission."""
    from dynamo.scheduling.admission import SloLimits

    limited = loaded.origins["router.max_queue_wait"] != "default"
    if not (limited or routing.ttft_slo or routing.max_worker_requests):
        return None
    slo = SloLimits.from_settings(routing)
    return slo if limited else replace(slo, max_queue_wait_s=math.inf)


def _settings_summary(
    args: argparse.Namespace, loaded: LoadedSettings, engine: EngineSettings, info: EngineInfo
) -> dict[str, object]:
    return {
        "workers": engine.workers,
        "data_parallel_size": engine.data_parallel_size,
        "eviction": engine.eviction,
        "prefix_caching": engine.prefix_caching,
        "timing": engine.timing,
        "speed": args.speed,
        "smear_s": args.smear,
        "rows": args.rows or None,
        "trace_block_size": args.trace_block_size,
        "seed": args.seed,
        "num_blocks": info.num_blocks,
        "block_size": info.block_tokens,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "context_tokens": loaded.settings.model.context_tokens or None,
    }


def _router_summary(routing: RouterSettings, slo: SloLimits | None) -> dict[str, object]:
    """Return the router settings for the result; None stands for a limit that is not set."""
    bounded = routing.queue_bound != sys.maxsize
    wait_s = slo.max_queue_wait_s if slo is not None else math.inf
    return {
        "router_mode": routing.mode,
        "router_policy": routing.policy if routing.mode == "kv" else "",
        "router_selector": routing.selector,
        "router_temperature": routing.temperature,
        "router_queue_threshold": routing.queue_threshold,
        "router_queue_order": routing.queue_order,
        "router_queue_bound": routing.queue_bound if bounded else None,
        "routing_strategy": msgspec.to_builtins(routing.routing_strategy),
        "load_balancing_algorithm": routing.load_balancing.algorithm,
        "ttft_slo": routing.ttft_slo or None,
        "max_queue_wait": wait_s if wait_s < math.inf else None,
        "max_worker_requests": routing.max_worker_requests or None,
    }


def _engine_settings(loaded: LoadedSettings) -> EngineSettings:
    engine = loaded.settings.engine
    defaults = {
        name: value
        for name, value in ENGINE_DEFAULTS.items()
        if loaded.origins.get(f"engine.{name}", "default") == "default"
    }
    engine = replace(engine, **defaults)
    if engine.workers < 1:
        raise ConfigError("a replay needs at least one worker", hint="--workers N")
    for key, origin in loaded.origins.items():
        if origin.startswith("flag ") and (
            key in UNSUPPORTED_SETTINGS or not key.startswith(SIMULATED_SETTINGS)
        ):
            raise ConfigError(f"{origin} has no effect on a replay")
    return engine


def _write_lines(path: str, lines: Iterable[bytes]) -> None:
    content = b"".join(line + b"\n" for line in lines)
    if path == "-":
        print(content.decode(), end="")
    else:
        write_file(path, content)


def _number(kind: type[float], *, allow_zero: bool = False) -> Callable[[str], float]:
    """Return a parser of finite numbers of `kind` that are positive, or 0 if allowed."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 <= value < math.inf or not (value or allow_zero):
            error = "must not be negative" if allow_zero else "must be above 0"
            raise argparse.ArgumentTypeError(error)
        return value

    return number
