"""`dynamo replay`: what a trace would do on a cluster, under virtual time."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.benchmark.report import ReplayProgress, format_replay_result
from dynamo.cli.parsing import Parser, check_writable
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
"""Of the engine's settings, where nobody says otherwise: a replay is of a cluster."""

UNSUPPORTED_SETTINGS = (
    "router.migration_limit",
    "router.replicas",
    "engine.labels",
    "engine.threads",
    "engine.speedup_ratio",
)
"""Of the flags of both sections, those of parts that a replay has not."""
SIMULATED_SETTINGS = ("router.", "engine.", "model.context_tokens")
"""What else can be said goes by nothing here."""

EXAMPLES = """\
  dynamo replay conversation.jsonl
  dynamo replay conversation.jsonl.gz --router-mode kv --speed 3 --json a.json
  dynamo replay agents.jsonl --trace-block-size 64 --workers 4 --num-blocks 8192 --plot a.png
  dynamo replay trace.jsonl --timing constant:0.02,5 --eviction lru --decisions placed.jsonl
  dynamo replay trace.jsonl --speed 3 --ttft-slo 2"""


def parser() -> Parser:
    """The trace, flags of the replay, and the settings of router and workers."""
    made = Parser(
        "dynamo replay",
        "What a trace would do on a cluster: router, caches and schedulers as they are, simulated "
        "engines, virtual time.\nA trace is in Mooncake's form: a line {timestamp (ms), "
        "input_length, output_length, hash_ids} a request; lines of one session_id run one after "
        "the other, each `delay` ms after the one before ended.\nThe default here is 8 workers "
        "and blocks of 64 tokens.",
        EXAMPLES,
        usage="TRACE [FLAGS]",
    )
    made.add_argument("trace", metavar="TRACE", help="JSON lines, plain or .gz")
    _add_arrival_flags(made.add_argument_group("replay"))
    _add_output_flags(made.add_argument_group("output"))
    add_settings_flags(made, shown=("router", "engine"))
    return made


def _add_arrival_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace-block-size",
        type=_positive_int,
        default=512,
        metavar="TOKENS",
        help="tokens that one of the trace's hash_ids stands for (default: 512)",
    )
    group.add_argument(
        "--speed",
        type=_positive_float,
        default=1.0,
        metavar="X",
        help="requests come so many times as fast (default: 1)",
    )
    group.add_argument(
        "--smear",
        type=_non_negative_float,
        default=0.0,
        metavar="SECONDS",
        help="each comes later by chance, by up to so much of the trace's time",
    )
    group.add_argument(
        "--rows", type=_positive_int, default=0, metavar="N", help="only the first N lines"
    )
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of all chance (default: 0)"
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", metavar="OUT", help="write the result there (-: print it)")
    group.add_argument(
        "--decisions", metavar="FILE", help="a line {request, worker, placed_ms} a request"
    )
    group.add_argument("--plot", metavar="PNG", help="draw it")


def run(arguments: Sequence[str]) -> int:
    """Replay; 1 if a request was not answered, though nobody asked to turn it away."""
    found = parser().parse(arguments)
    loaded = load_settings(found)

    from dynamo.operations.plotting import check_matplotlib
    from dynamo.operations.replay.replay import Replay
    from dynamo.operations.replay.replay_plot import draw_replay
    from dynamo.operations.replay.trace import ArrivalOptions, read_trace

    if found.plot:
        check_matplotlib()
    check_writable(found.json, found.decisions, found.plot)
    plan = _make_plan(found, loaded)
    arrivals = ArrivalOptions(found.speed, found.smear, found.seed)
    conversations = read_trace(found.trace, arrivals, found.rows)
    total = sum(len(one.requests) for one in conversations)
    with ProgressBar(sys.stderr) as bar:
        result, log = Replay(plan, ReplayProgress(bar, total)).run(conversations)
    if found.decisions:
        _write_lines(found.decisions, map(msgspec.json.encode, log.placements))
    if found.json:
        _write_lines(found.json, [msgspec.json.format(msgspec.json.encode(result), indent=1)])
    if found.plot:
        draw_replay(result, log, found.plot)
    if found.json != "-":
        print(format_replay_result(result))
    return 0 if result.completed + result.rejected == result.requests else 1


def _make_plan(found: argparse.Namespace, loaded: LoadedSettings) -> ReplayPlan:
    from dynamo.inference.mock.engine import make_mock_engine_info
    from dynamo.inference.mock.timing import parse_timing
    from dynamo.operations.replay.cluster import ReplayWorkers
    from dynamo.operations.replay.replay import ReplayPlan

    engine = _engine_settings(loaded)
    context_tokens = loaded.settings.model.context_tokens or sys.maxsize
    info = make_mock_engine_info(engine, context_tokens=context_tokens)
    routing = _router_settings(loaded)
    promise = _slo_limits(loaded, routing)
    workers = ReplayWorkers(
        engine.workers,
        info,
        parse_timing(engine.timing),
        engine.eviction,
        ranks=engine.data_parallel_size,
        prefix_caching=engine.prefix_caching,
    )
    return ReplayPlan(
        trace=Path(found.trace).name,
        workers=workers,
        router_settings=routing,
        trace_block_tokens=found.trace_block_size,
        seed=found.seed,
        slo=promise,
        settings=_settings_summary(found, loaded, engine, info) | _router_summary(routing, promise),
    )


def _router_settings(loaded: LoadedSettings) -> RouterSettings:
    routing = loaded.settings.router
    if loaded.origins["router.queue_bound"] == "default":
        return replace(routing, queue_bound=sys.maxsize)  # nothing is refused unless asked
    return routing


def _slo_limits(loaded: LoadedSettings, routing: RouterSettings) -> SloLimits | None:
    """What admission goes by; None where nobody asks for any."""
    from dynamo.scheduling.admission import SloLimits

    limited = loaded.origins["router.max_queue_wait"] != "default"
    if not (limited or routing.ttft_slo or routing.max_worker_requests):
        return None
    promise = SloLimits.from_settings(routing)
    return promise if limited else replace(promise, max_queue_wait_s=math.inf)


def _settings_summary(
    found: argparse.Namespace, loaded: LoadedSettings, engine: EngineSettings, info: EngineInfo
) -> dict[str, object]:
    return {
        "workers": engine.workers,
        "data_parallel_size": engine.data_parallel_size,
        "eviction": engine.eviction,
        "prefix_caching": engine.prefix_caching,
        "timing": engine.timing,
        "speed": found.speed,
        "smear_s": found.smear,
        "rows": found.rows or None,
        "trace_block_size": found.trace_block_size,
        "seed": found.seed,
        "num_blocks": info.num_blocks,
        "block_size": info.block_tokens,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "context_tokens": loaded.settings.model.context_tokens or None,
    }


def _router_summary(routing: RouterSettings, promise: SloLimits | None) -> dict[str, object]:
    """None: there is no such bound."""
    bounded = routing.queue_bound != sys.maxsize
    wait_s = promise.max_queue_wait_s if promise is not None else math.inf
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
    unsaid = {
        name: value
        for name, value in ENGINE_DEFAULTS.items()
        if loaded.origins.get(f"engine.{name}", "default") == "default"
    }
    engine = replace(engine, **unsaid)
    if engine.workers < 1:
        raise ConfigError("a replay wants at least one worker", hint="--workers N")
    for key, said in loaded.origins.items():
        if said.startswith("flag ") and (
            key in UNSUPPORTED_SETTINGS or not key.startswith(SIMULATED_SETTINGS)
        ):
            raise ConfigError(f"{said}: a replay has nothing that goes by it")
    return engine


def _write_lines(path: str, lines: Iterable[bytes]) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    if path == "-":
        print(whole.decode(), end="")
        return
    try:
        Path(path).write_bytes(whole)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("more than 0 is wanted")
    return value


def _positive_int(text: str) -> int:
    if int(text) <= 0:
        raise argparse.ArgumentTypeError("more than 0 is wanted")
    return int(text)


def _non_negative_float(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("a time that is not negative is wanted")
    return value
