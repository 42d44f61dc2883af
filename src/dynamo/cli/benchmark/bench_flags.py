"""The flags of `dynamo bench`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import API_KEY_VARIABLE, DEPLOYMENT_HELP, Flag, Parser
from dynamo.core.errors import ConfigError
from dynamo.core.settings.units import parse_seconds

if TYPE_CHECKING:
    from dynamo.operations.bench.bench import BenchConfig

PRESET_NAMES = ("benchmark_latency",)

EXAMPLES = """\
  dynamo bench -c 32 --isl 512 --osl 64 --duration 20s
  dynamo bench http://host:8000 --rate 5..50 --duration 2m --slo-ttft 200ms --slo-itl 20ms
  dynamo bench --trace conversation.jsonl.gz --speed 3 --out a.json --picture a.png
  dynamo bench --preset benchmark_latency
  dynamo bench compare a.json b.json"""


FLAGS: Mapping[str, Sequence[Flag]] = {
    "load": (
        Flag("-c --concurrency", "requests in flight in a closed loop", 1, "N"),
        Flag(
            "--rate",
            "open loop with R requests per second (Poisson); A..B grows linearly",
            metavar="R|A..B",
        ),
        Flag("--even", "evenly spaced arrivals, not Poisson", False),
        Flag("--cv", "variation of the times between arrivals; not 1: a gamma process", 1.0, "X"),
        Flag("--day", "let --rate A..B swing from A to B and back in this time", metavar="TIME"),
        Flag("--duration", "time to send (default: 10s without --requests)", metavar="TIME"),
        Flag("--requests", "requests to send", 0, "N"),
        Flag("--warmup", "unmeasured requests first", 0, "N"),
        Flag("--seed", "seed of the prompts (default: random, so that no cache has them)", 0, "N"),
        Flag(
            "--trace",
            "Mooncake trace, .jsonl or .gz: timestamp (ms), input_length, "
            "output_length, hash_ids; optional session_id and delay; or a deployment, for its "
            "record",
            metavar="FILE",
        ),
        Flag(
            "--block-tokens", "tokens per hash id (default: what the trace tells, else 512)", 0, "N"
        ),
        Flag("--speed", "divide the trace's times by X", 1.0, "X"),
        Flag("--closed", "ignore the trace's times: -c sessions at a time", False),
        Flag("--sharegpt", "conversations from a ShareGPT file", metavar="FILE"),
        Flag(
            "--preset",
            "single requests of 50/100, 200/200 and 500/300 tokens",
            choices=PRESET_NAMES,
        ),
    ),
    "requests": (
        Flag("--isl --input-tokens", "prompt tokens without the chat template", 128, "N"),
        Flag("--osl --output-tokens", "output tokens", 64, "N"),
        Flag("--prefix-share", "share of each prompt that is a shared prefix", 0.0, "X"),
        Flag("--prefixes", "number of shared prefixes", 1, "N"),
        Flag("--turns", "turns per conversation; 0 takes all of --sharegpt", 1, "N"),
        Flag("--stop-at-eos", "do not send ignore_eos, so that answers may end early", False),
        Flag("--extra", "fields for every body", "{}", "JSON"),
    ),
    "server": (
        Flag("--model", "model (default: default)", "default"),
        Flag("--completions", "use /v1/completions, not chat", False),
        Flag("--api-key", f"default: ${API_KEY_VARIABLE}", metavar="KEY"),
        Flag("--timeout", "limit per request (default: none)", metavar="TIME"),
        Flag(
            "--tokenizer", "folder with tokenizer.json, for servers without /tokenize", "", "FOLDER"
        ),
    ),
    "result": (
        Flag("--slo-ttft", "goodput: limit of TTFT (ms, or units)", metavar="TIME"),
        Flag("--slo-itl", "goodput: limit of the mean ITL", metavar="TIME"),
        Flag("--out", "write the result as JSON", metavar="FILE"),
        Flag("--picture", "plot the result as PNG", metavar="FILE"),
        Flag("--json", "print JSON", False),
        Flag("--name", "name of the result", ""),
    ),
}


def parser() -> Parser:
    """Return the parser: a URL or a subcommand with files, and the flags."""
    parser = Parser(
        "dynamo bench",
        "Measure an OpenAI-compatible server: time to first token, inter-token latency, end-to-end "
        "latency,\nthroughput, and goodput under an objective. Prompts are made of words that are "
        "one token each.",
        EXAMPLES,
        usage="[URL] [FLAGS] | compare A.json B.json | draw A.json ... --picture FILE.png",
    )
    parser.add_argument(
        "words", nargs="*", metavar="URL", help="the server (default: the deployment here)"
    )
    parser.add_argument("--deployment", metavar="NAME", help=DEPLOYMENT_HELP)
    parser.add_flags(FLAGS)
    return parser


def parse_bench_config(args: argparse.Namespace) -> BenchConfig:
    """Return the benchmark that the flags describe. Raises `ConfigError`."""
    from dynamo.operations.bench.bench import BenchConfig
    from dynamo.operations.bench.workload import LatencyObjectives, RequestShape

    if len(args.words) > 1:
        raise ConfigError(
            f"unknown argument {args.words[1]!r}", hint="one URL; or: compare A.json B.json"
        )
    _check_numbers(args)
    if args.trace:
        from dynamo.services.planning.record import locate_trace

        args.trace = locate_trace(args.trace)
    return BenchConfig(
        shape=RequestShape(args.isl, args.osl, args.prefix_share, args.prefixes, args.turns),
        load=_parse_load(args),
        objectives=LatencyObjectives(
            _parse_milliseconds(args, "slo_ttft"), _parse_milliseconds(args, "slo_itl")
        ),
        trace=args.trace or "",
        block_tokens=args.block_tokens,
        speed=args.speed,
        closed=args.closed,
        sharegpt=args.sharegpt or "",
        tokenizer=args.tokenizer,
        name=args.name,
        target=_parse_target(args),
    )


def _parse_target(args: argparse.Namespace) -> Any:
    from dynamo.cli.stop import find_server_url
    from dynamo.operations.bench.workload import BenchTarget

    try:
        extra = msgspec.json.decode(args.extra, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--extra {args.extra}: {error}", hint="give a JSON object") from None
    url = args.words[0] if args.words else find_server_url(args.deployment)
    return BenchTarget(
        url=url if "//" in url else f"http://{url}",
        model=args.model,
        api_key=args.api_key or os.environ.get(API_KEY_VARIABLE, ""),
        completions=args.completions,
        ignore_eos=not args.stop_at_eos,
        timeout_s=_parse_seconds(args, "timeout"),
        extra=extra,
    )


def _parse_load(args: argparse.Namespace) -> Any:
    from dynamo.operations.bench.workload import LoadProfile

    rate, rate_to = _parse_rate(args.rate)
    duration_s = _parse_seconds(args, "duration") if args.duration or args.requests else 10.0
    day_s = _parse_seconds(args, "day")
    if day_s and not rate_to:
        raise ConfigError("--day needs two rates", hint="--rate 5..50 --day 1h")
    if rate_to and not (duration_s or day_s):
        raise ConfigError("--rate A..B needs a duration", hint="give --duration")
    if not (duration_s or args.requests or args.trace):
        raise ConfigError("--duration 0 would never end", hint="give --requests or a duration")
    return LoadProfile(
        concurrency=args.concurrency,
        rate=rate,
        rate_to=rate_to,
        even=args.even,
        duration_s=duration_s,
        requests=args.requests,
        warmup=args.warmup,
        seed=args.seed,
        cv=args.cv,
        day_s=day_s,
    )


def _parse_rate(text: str | None) -> tuple[float, float]:
    """Return the first rate and the last, 0 for a missing one."""
    if text is None:
        return 0.0, 0.0
    first, dots, last = text.partition("..")
    try:
        rates = [float(first), *([float(last)] if dots else [])]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < inf for rate in rates):
        raise ConfigError(f"--rate {text}", hint="give 20 or 5..50, above 0")
    return rates[0], rates[1] if dots else 0.0


def _check_numbers(args: argparse.Namespace) -> None:
    minimum = {"concurrency": 1, "isl": 1, "osl": 1, "requests": 0, "warmup": 0, "block_tokens": 0}
    for name, bound in minimum.items():
        if getattr(args, name) < bound:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {bound}")
    if not 0 <= args.prefix_share <= 1 or args.prefixes < 1:
        raise ConfigError("--prefix-share must be 0 to 1, --prefixes at least 1")
    if not 0 <= args.cv < inf:
        raise ConfigError("--cv must not be negative")
    if not 0 < args.speed < inf:
        raise ConfigError("--speed must be above 0")


def _parse_seconds(args: argparse.Namespace, name: str) -> float:
    text = getattr(args, name) or "0"
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')} {text}: {error}") from None


def _parse_milliseconds(args: argparse.Namespace, name: str) -> float:
    """Parse a time; a number without a unit is milliseconds."""
    text = getattr(args, name) or ""
    if text.replace(".", "", 1).isdigit():
        return float(text)
    return _parse_seconds(args, name) * 1000
