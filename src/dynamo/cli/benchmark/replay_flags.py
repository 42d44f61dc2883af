"""The flags of `dynamo replay`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynamo.cli.parsing import Flag, Parser
from dynamo.cli.settings_flags import add_settings_flags
from dynamo.core.settings.units import parse_seconds

if TYPE_CHECKING:
    from dynamo.operations.arrivals import SyntheticLoad
    from dynamo.operations.bench.workload import LatencyObjectives
    from dynamo.operations.replay.fleet import Startup
    from dynamo.operations.replay.result import LatencyLimit

LATENCIES = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
PARETO_LOADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Default loads of a Pareto curve, as factors of the trace's rate."""

EXAMPLES = """\
  dynamo replay conversation.jsonl
  dynamo replay conversation.jsonl.gz --router-mode kv --speed 3 --json a.json
  dynamo replay agents.jsonl --trace-block-size 64 --workers 4 --num-blocks 8192 --plot a.png
  dynamo replay trace.jsonl --timing constant:0.02,5 --eviction lru --decisions placed.jsonl
  dynamo replay trace.jsonl --speed 3 --ttft-slo 2
  dynamo replay --synthetic isl=3000,osl=150,requests=3000,rate=40 --good ttft=2s,tpot=25ms
  dynamo replay trace.jsonl --smear 3 --capacity ttft_p90=1s,itl_p99=25ms --pareto a.png"""


def named_flags(*names: str) -> Sequence[Flag]:
    """Return the flags of these names, for other commands that replay."""
    return [flag for flags in FLAGS.values() for flag in flags if flag.names in names]


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
        usage="TRACE | --synthetic LOAD [FLAGS]",
    )
    parser.add_argument(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="JSON lines, plain or .gz; or a deployment, whose record is replayed",
    )
    parser.add_flags(FLAGS)
    add_settings_flags(parser, shown=("router", "engine", "workers"))
    return parser


def _tier_flags(name: str, place: str, gbps: float) -> Sequence[Flag]:
    return (
        Flag(
            f"--{name}-blocks",
            f"KV blocks in the {place} (default: 0)",
            0,
            "N",
            numbers(int, zero=True),
        ),
        Flag(
            f"--{name}-gbps",
            "speed of its loads, and of its stores",
            gbps,
            "GB/S",
            numbers(float),
        ),
    )


def numbers(
    kind: type[float], most: float = math.inf, *, zero: bool = False
) -> Callable[[str], float]:
    """Return a parser of finite numbers of `kind` up to `most`, above 0 unless with `zero`."""

    def number(text: str) -> float:
        value = kind(text)
        if not 0 <= value < math.inf or value > most or not (value or zero):
            limit = f" and at most {most:g}" if most < math.inf else ""
            least = "0 or more" if zero else "above 0"
            raise argparse.ArgumentTypeError(f"{text} is not {least}{limit}")
        return value

    return number


def _split_pairs(text: str, names: Sequence[str]) -> Mapping[str, str]:
    """Split `name=value,name=value`. Raises `ArgumentTypeError` for other names."""
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    for name, value in pairs:
        if name not in names or not value:
            raise argparse.ArgumentTypeError(
                f"{name}={value}: use NAME=VALUE,... with names of {', '.join(names)}"
            )
    if len(dict(pairs)) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text!r} gives a name twice")
    return dict(pairs)


def _parse_synthetic(text: str) -> SyntheticLoad:
    from dynamo.operations.arrivals import SyntheticLoad

    values = _split_pairs(text, SyntheticLoad.__struct_fields__)
    needed = ("requests", "rate", *(() if "windows" in values else ("isl", "osl")))
    missing = [name for name in needed if name not in values]
    if missing:
        raise argparse.ArgumentTypeError(f"{', '.join(missing)} missing")
    if ("peak" in values) != ("day" in values):
        raise argparse.ArgumentTypeError("peak and day go together, e.g. peak=40,day=1h")
    integer, number = numbers(int), numbers(float)
    parse: Mapping[str, Callable[[str], Any]] = {
        **dict.fromkeys(("isl", "osl", "requests"), lambda value: int(integer(value))),
        **dict.fromkeys(("rate", "peak"), number),
        "cv": numbers(float, zero=True),
        "day": lambda value: _milliseconds(value) / 1e3,
        "windows": str,
    }
    fields = {"isl": 0, "osl": 0} | {name: parse[name](text) for name, text in values.items()}
    return SyntheticLoad(**fields)


def parse_promise(text: str) -> LatencyObjectives:
    """Parse limits such as ttft=1s,tpot=30ms. A number without a unit is refused: some mean
    seconds, others milliseconds."""
    from dynamo.operations.bench.workload import LatencyObjectives

    times = _split_pairs(text, ("ttft", "tpot"))
    for name, time in times.items():
        if time[-1].isdigit():
            raise argparse.ArgumentTypeError(
                f"{name}={time} has no unit: write {name}={time}ms or {name}={time}s"
            )
    limits = {name: _milliseconds(time) for name, time in times.items()}
    return LatencyObjectives(limits.get("ttft", 0.0), limits.get("tpot", 0.0))


def _parse_startup(text: str) -> Startup:
    from dynamo.operations.replay.fleet import Startup

    low, _, high = text.partition("-")
    try:
        startup = Startup(parse_seconds(low), parse_seconds(high or low))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not startup.low_s <= startup.high_s < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: the first time must not be above the second")
    return startup


def _parse_limits(text: str) -> Sequence[LatencyLimit]:
    from dynamo.operations.replay.result import LatencyLimit

    names = [f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS]
    limits = []
    for name, time in _split_pairs(text, names).items():
        latency, _, statistic = name.partition("_")
        limits.append(LatencyLimit(f"{latency}_ms", statistic, _milliseconds(time)))
    return limits


def _parse_loads(text: str) -> Sequence[float]:
    return [numbers(float)(load) for load in text.split(",")]


def _milliseconds(text: str) -> float:
    """Parse a time above 0; a number without a unit is seconds."""
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r}: must be above 0")
    return seconds * 1e3


FLAGS: Mapping[str, Sequence[Flag]] = {
    "replay": (
        Flag(
            "--synthetic",
            "instead of a trace: isl=3000,osl=150,requests=3000,rate=40 are Poisson arrivals "
            "of 40 requests/s that share nothing, with lengths within 20 %% of isl and osl; "
            "cv=3: a gamma process; peak=80,day=1h: a rate that swings to 80 and back; "
            "windows=FILE.csv instead of isl and osl: rates and lengths of ServeGen",
            metavar="LOAD",
            parse=_parse_synthetic,
        ),
        Flag(
            "--trace-block-size",
            "tokens per hash id (default: what the trace tells, else 512)",
            0,
            "TOKENS",
            numbers(int),
        ),
        Flag("--speed", "divide the trace's times by X", 1.0, "X", numbers(float)),
        Flag(
            "--smear",
            "delay each conversation by a random time up to this, in trace time",
            0.0,
            "SECONDS",
            numbers(float, zero=True),
        ),
        Flag("--rows", "only the first N lines", 0, "N", numbers(int)),
        Flag("--seed", "random seed (default: 0)", 0, "N"),
        Flag(
            "--fast",
            "simulate workers as state machines: several times as fast, results nearly equal",
            False,
        ),
        Flag(
            "--lockstep",
            "the ranks of --data-parallel-size step together, as ranks do that share experts; with "
            "--fast",
            False,
        ),
    ),
    "prompts computed by other workers": (
        Flag("--kv-bytes-per-token", "size of a token's KV", 131_072, "BYTES", numbers(int)),
        Flag(
            "--transfer-gbps",
            "speed of each engine's link; 0: a transfer takes no time",
            64.0,
            "GB/S",
            numbers(float, zero=True),
        ),
        Flag(
            "--prefill-timing",
            "--timing of prefill workers (default: as the others)",
            "",
            "TIMING",
        ),
    ),
    "tiers below the engines' blocks": (
        *_tier_flags("host", "host memory of each engine", 25.0),
        *_tier_flags("disk", "disk of each engine", 6.0),
        *_tier_flags("shared", "one store that all engines share", 10.0),
    ),
    "workers that start and leave": (
        Flag(
            "--events",
            'lines such as {"time": 60, "action": "start", "kind": "worker", "count": 2}; '
            "others drain, die, or get a role",
            metavar="FILE",
        ),
        Flag(
            "--startup",
            "time from a worker's order until it serves: 30s, or 20s-40s for a spread (default: 0)",
            metavar="TIME",
            parse=_parse_startup,
        ),
    ),
    "several loads": (
        Flag(
            "--capacity",
            "find the highest --speed that keeps limits such as ttft_p90=1s,itl_p99=25ms",
            metavar="LIMITS",
            parse=_parse_limits,
        ),
        Flag(
            "--pareto",
            "plot tokens/s/GPU over tokens/s/user at all of --loads",
            metavar="PNG",
        ),
        Flag(
            "--loads",
            "values of --speed for --pareto "
            f"(default: {','.join(f'{load:g}' for load in PARETO_LOADS)})",
            PARETO_LOADS,
            "X,X,...",
            _parse_loads,
        ),
        Flag(
            "--gpus",
            "GPUs of the cluster (default: one an engine)",
            metavar="N",
            parse=numbers(int),
        ),
    ),
    "output": (
        Flag(
            "--good",
            "report the share of requests within limits such as ttft=2s,tpot=25ms; the others "
            "are broken promises, rejected ones too",
            metavar="LIMITS",
            parse=parse_promise,
        ),
        Flag("--json", "write the result as JSON (- prints it)", metavar="OUT"),
        Flag("--decisions", "write {request, worker, placed_ms} of each request", metavar="FILE"),
        Flag("--plot", "plot the result, and a timeline of the workers", metavar="PNG"),
    ),
}


def set_replay_defaults(parser: Parser, **values: object) -> None:
    """Set what `make_plan` reads of flags that a parser does not have: defaults, or `values`."""
    flags = (row for group in FLAGS.values() for row in group)
    missing = {
        flag.removeprefix("--").replace("-", "_"): row.default
        for row in flags
        if not parser.has(flag := row.names.split()[0])
    }
    parser.set_defaults(**{**missing, **values})
