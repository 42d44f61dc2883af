"""`dynamo replay`: replay a trace on a simulated cluster in virtual time."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from dynamo.cli.benchmark.replay_flags import parser
from dynamo.cli.benchmark.replay_settings import summarize_router, summarize_settings
from dynamo.cli.benchmark.report import ReplayProgress, format_capacity_step, format_replay_result
from dynamo.cli.parsing import check_writable, write_file, write_json
from dynamo.cli.progress_bar import ProgressBar
from dynamo.cli.settings_flags import load_settings
from dynamo.core.errors import ConfigError
from dynamo.core.settings import LoadedSettings, Settings
from dynamo.core.values import BOTH_ROLES, Tier

if TYPE_CHECKING:
    from dynamo.core.settings.schema_engine import EngineSettings
    from dynamo.core.settings.schema_router import RouterSettings
    from dynamo.operations.replay.events import FleetEvent
    from dynamo.operations.replay.replay import ReplayPlan
    from dynamo.operations.replay.request_log import ReplayLog
    from dynamo.operations.replay.result import LoadPoint, ReplayResult
    from dynamo.operations.replay.trace import TraceConversation
    from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers, SimulatedTier

ENGINE_DEFAULTS: dict[str, int] = {"workers": 8, "block_size": 64}
"""Defaults of a replay that differ from those of the engine's settings."""

UNSUPPORTED_SETTINGS = (
    "router.migration_limit",
    "router.replicas",
    "engine.labels",
    "engine.role",
    "engine.threads",
    "engine.speedup_ratio",
    "engine.startup",
)
"""Settings of the router and engine sections that a replay does not simulate."""
SIMULATED_SETTINGS = (
    "router.",
    "engine.",
    "workers.flexible",
    "workers.prefill.",
    "workers.decode.",
    "model.context_tokens",
)
"""Prefixes of the settings that have an effect on a replay."""


class ReplayRuns:
    """Replays of one workload at several speeds. Each speed is replayed once."""

    def __init__(self, args: argparse.Namespace, plan: ReplayPlan, bar: ProgressBar) -> None:
        self._args = args
        self._plan = plan
        self._bar = bar
        self._results: dict[float, tuple[ReplayResult, ReplayLog]] = {}

    def replay_at(self, speed: float) -> tuple[ReplayResult, ReplayLog]:
        """Return the result and log of the replay at `speed`."""
        from dynamo.operations.replay.fast.replay import FastReplay
        from dynamo.operations.replay.replay import Replay

        if speed not in self._results:
            conversations, total = self._read_conversations(speed)
            progress = ReplayProgress(self._bar, total, f"speed {speed:.4g} ")
            plan = replace(self._plan, settings={**self._plan.settings, "speed": speed})
            replay = FastReplay if self._args.fast else Replay
            self._results[speed] = replay(plan, progress).run(conversations)
        return self._results[speed]

    def find_capacity(self) -> tuple[ReplayResult, ReplayLog]:
        """Return the result and log of the highest speed within the limits of --capacity."""
        from dynamo.operations.replay.result import find_capacity, keeps_limits

        limits = self._args.capacity

        def replay_at(speed: float) -> ReplayResult:
            result, _ = self.replay_at(speed)
            within_limits = keeps_limits(result, limits)
            self._bar.write(
                format_capacity_step(result, speed, limits, within_limits=within_limits) + "\n"
            )
            return result

        speed, result = find_capacity(replay_at, limits, self.gpus, self._args.speed)
        return result, self._results[speed][1]

    def measure_pareto(self) -> Sequence[LoadPoint]:
        """Return the points of the Pareto curve, one for each of --loads."""
        from dynamo.operations.replay.result import measure_load_point

        loads = sorted(self._args.loads)
        return [measure_load_point(self.replay_at(load)[0], load, self.gpus) for load in loads]

    @property
    def gpus(self) -> int:
        """GPUs of the cluster; one for each engine unless --gpus says otherwise."""
        workers = self._plan.workers
        gpus: int = self._args.gpus or workers.count * workers.ranks
        return gpus

    def _read_conversations(self, speed: float) -> tuple[Iterable[TraceConversation], int]:
        """Return the conversations, and the number of their requests."""
        from dynamo.operations.replay.trace import ArrivalOptions, make_synthetic_trace, read_trace

        args = self._args
        arrivals = ArrivalOptions(speed, args.smear, args.seed)
        if args.synthetic is not None:
            return make_synthetic_trace(args.synthetic, arrivals), args.synthetic.requests
        conversations = read_trace(args.trace, arrivals, args.rows)
        return conversations, sum(len(each.requests) for each in conversations)


def run(arguments: Sequence[str]) -> int:
    """Replay a trace. Returns 1 if a request failed other than by rejection."""
    args = parser().parse(arguments)
    loaded = load_settings(args)
    _check_source(args)
    if args.trace:
        read_trace_flags(args)

    from dynamo.operations.plotting import check_matplotlib
    from dynamo.operations.replay.replay_plot import draw_pareto, draw_replay

    if args.plot or args.pareto:
        check_matplotlib()
    check_writable(args.json, args.decisions, args.plot, args.pareto)
    plan = make_plan(args, loaded)
    with ProgressBar(sys.stderr) as bar:
        runs = ReplayRuns(args, plan, bar)
        result, log = runs.find_capacity() if args.capacity else runs.replay_at(args.speed)
        if args.pareto:
            result = replace(result, pareto=runs.measure_pareto())
    if args.decisions:
        write_file(args.decisions, msgspec.json.Encoder().encode_lines(list(log.placements)))
    if args.json:
        write_json(args.json, result)
    if args.plot:
        draw_replay(result, log, args.plot)
    if args.pareto:
        draw_pareto({_cluster_name(result): result.pareto}, result.trace, args.pareto)
    if args.json != "-":
        print(format_replay_result(result))
    return 0 if result.completed + result.rejected == result.requests else 1


def read_trace_flags(args: argparse.Namespace) -> None:
    """Find the trace if it is the name of a deployment, and the size of its blocks unless a flag
    tells it. Raises `ConfigError`."""
    from dynamo.operations.bench.traces import trace_block_tokens
    from dynamo.services.planning.record import locate_trace

    args.trace = locate_trace(args.trace)
    args.trace_block_size = args.trace_block_size or trace_block_tokens(args.trace)


def _check_source(args: argparse.Namespace) -> None:
    """Raise `ConfigError` unless there is one source of requests, with flags that it takes."""
    if (args.trace is None) == (args.synthetic is None):
        raise ConfigError("a replay needs one source", hint="TRACE or --synthetic LOAD")
    if args.synthetic is not None and args.rows:
        raise ConfigError("--rows has no effect on --synthetic", hint="use requests=N in the load")


def _cluster_name(result: ReplayResult) -> str:
    settings = result.settings
    roles = ("prefill", "decode", "flexible")
    counts = [f"{count} {role}" for role in roles if (count := settings.get(f"{role}_workers"))]
    return f"{' + '.join(counts) or settings['workers']} workers, {settings['router_mode']}"


def _trace_name(args: argparse.Namespace) -> str:
    if args.synthetic is None:
        return Path(args.trace).name
    load = msgspec.to_builtins(args.synthetic)
    names = [name for name, value in load.items() if value]
    parts = (f"{load[name]:g}" if name != "windows" else Path(load[name]).name for name in names)
    return "synthetic " + ",".join(map("=".join, zip(names, parts, strict=True)))


def make_plan(args: argparse.Namespace, loaded: LoadedSettings) -> ReplayPlan:
    """Return the plan of a replay by its flags and settings. Raises `ConfigError`."""
    from dynamo.operations.bench.workload import LatencyObjectives
    from dynamo.operations.replay.events import check_events
    from dynamo.operations.replay.fleet import Startup
    from dynamo.operations.replay.replay import ReplayPlan

    _check_flags(loaded)
    settings = replace(loaded.settings, engine=_engine_settings(loaded))
    events = _read_events(args)
    changes_roles = any(event.action == "role" for event in events)
    workers = _make_workers(args, settings, changes_roles=changes_roles)
    check_events(events, workers)
    routing = _router_settings(loaded)
    return ReplayPlan(
        trace=_trace_name(args),
        workers=workers,
        router_settings=routing,
        trace_block_tokens=args.trace_block_size if args.trace else workers.block_tokens,
        seed=args.seed,
        admission=_has_limits(routing),
        objectives=args.good or LatencyObjectives(),
        settings=summarize_settings(args, settings, workers) | summarize_router(routing),
        startup=args.startup or Startup(),
        events=events,
        worker_gpus=(args.gpus or 0) / workers.count,
    )


def _read_events(args: argparse.Namespace) -> Sequence[FleetEvent]:
    """Return the script of --events. Raises `ConfigError`."""
    from dynamo.operations.replay.events import read_events

    if args.startup is not None and not args.events:
        raise ConfigError("--startup has no effect without --events", hint="add --events FILE")
    return read_events(args.events) if args.events else ()


def _make_workers(
    args: argparse.Namespace, settings: Settings, *, changes_roles: bool
) -> ReplayWorkers:
    """Return the groups of workers that the settings name. Raises `ConfigError`."""
    from dynamo.core.timing.model import parse_timing
    from dynamo.inference.mock.engine import make_mock_engine_info
    from dynamo.operations.replay.workers import ReplayGroup, ReplayWorkers
    from dynamo.services.deployment.model_groups import answering_groups

    if settings.models:
        raise ConfigError("a replay simulates one model", hint="name it instead of models")
    groups = []
    for group in answering_groups(settings):
        engine = group.settings.engine
        timing = args.prefill_timing if engine.role == "prefill" else None
        info = make_mock_engine_info(
            engine, context_tokens=settings.model.context_tokens or sys.maxsize
        )
        roles = BOTH_ROLES if engine.role == "both" else (engine.role,)
        groups.append(
            ReplayGroup(
                group.replicas,
                replace(info, roles=roles),
                parse_timing(timing or engine.timing),
                group.name,
            )
        )
    if not groups:
        raise ConfigError("a replay needs at least one worker", hint="--workers N")
    engine = settings.engine
    return ReplayWorkers(
        groups,
        engine.eviction,
        ranks=engine.data_parallel_size,
        lockstep=args.lockstep,
        prefix_caching=engine.prefix_caching,
        transfer=_kv_transfer(args, settings, groups, changes_roles=changes_roles),
        tiers=_tiers(args),
        kv_bytes_per_token=args.kv_bytes_per_token,
    )


def _kv_transfer(
    args: argparse.Namespace,
    settings: Settings,
    groups: Sequence[ReplayGroup],
    *,
    changes_roles: bool,
) -> float | None:
    """Return the speed of links in bytes/s; None if no worker computes prompts for others."""
    flexible = settings.router.disaggregation.mode == "flexible"
    if flexible or changes_roles or any(group.engine.roles == ("prefill",) for group in groups):
        return float(args.transfer_gbps * 1e9 or math.inf)
    return None


def _tiers(args: argparse.Namespace) -> Sequence[SimulatedTier]:
    """Return the tiers below each engine's blocks, fastest first."""
    from dynamo.operations.replay.workers import SimulatedTier

    sizes: Sequence[tuple[Tier, int, float]] = (
        ("host", args.host_blocks, args.host_gbps),
        ("disk", args.disk_blocks, args.disk_gbps),
        ("shared", args.shared_blocks, args.shared_gbps),
    )
    return [SimulatedTier(name, blocks, gbps * 1e9) for name, blocks, gbps in sizes if blocks]


def _router_settings(loaded: LoadedSettings) -> RouterSettings:
    routing = loaded.settings.router
    if loaded.origins["router.queue_bound"] == "default":
        routing = replace(routing, queue_bound=sys.maxsize)  # nothing is rejected by default
    if loaded.origins["router.max_queue_wait"] == "default":
        routing = replace(routing, max_queue_wait=math.inf)
    return routing


def _has_limits(routing: RouterSettings) -> bool:
    """Whether a setting asks for admission."""
    wait_s = routing.max_queue_wait
    return bool(wait_s < math.inf or routing.ttft_slo or routing.max_worker_requests)


def _engine_settings(loaded: LoadedSettings) -> EngineSettings:
    engine = loaded.settings.engine
    defaults = {
        name: value
        for name, value in ENGINE_DEFAULTS.items()
        if loaded.origins.get(f"engine.{name}", "default") == "default"
    }
    return replace(engine, **defaults)


def _check_flags(loaded: LoadedSettings) -> None:
    """Raise `ConfigError` for a flag without an effect on a replay."""
    for key, origin in loaded.origins.items():
        if origin.startswith("flag ") and (
            key in UNSUPPORTED_SETTINGS or not key.startswith(SIMULATED_SETTINGS)
        ):
            raise ConfigError(f"{origin} has no effect on a replay")
