"""What `dynamo bench` takes."""

from __future__ import annotations

import argparse
import os
from math import inf
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo.cli.parsing import Parser
from dynamo.core.errors import ConfigError
from dynamo.core.settings.units import parse_seconds

if TYPE_CHECKING:
    from dynamo.operations.bench.bench import BenchConfig

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY_VARIABLE = "DYNAMO_API_KEY"
PRESET_NAMES = ("benchmark_latency",)

EXAMPLES = """\
  dynamo bench -c 32 --isl 512 --osl 64 --duration 20s
  dynamo bench http://host:8000 --rate 5..50 --duration 2m --slo-ttft 200ms --slo-itl 20ms
  dynamo bench --trace conversation.jsonl.gz --speed 3 --out a.json --picture a.png
  dynamo bench --preset benchmark_latency
  dynamo bench compare a.json b.json"""


def parser() -> Parser:
    """URL or a verb with files, and the flags."""
    made = Parser(
        "dynamo bench",
        "Measure an OpenAI-compatible server: time to first token, between tokens, whole answers, "
        "throughput,\nand goodput under an objective. Prompts are made of words that are one token "
        "each.",
        EXAMPLES,
        usage="[URL] [FLAGS] | compare A.json B.json | draw A.json ... --picture FILE.png",
    )
    made.add_argument(
        "words", nargs="*", metavar="URL", help=f"the server (default: {DEFAULT_URL})"
    )
    _add_load_flags(made)
    _add_request_flags(made)
    _add_server_flags(made)
    _add_result_flags(made)
    return made


def _add_load_flags(made: Parser) -> None:
    group = made.add_argument_group("load")
    group.add_argument(
        "-c",
        "--concurrency",
        type=int,
        default=1,
        metavar="N",
        help="requests in flight, each followed by the next (default: 1)",
    )
    group.add_argument(
        "--rate",
        metavar="R|A..B",
        help="instead: requests a second, by chance (Poisson); A..B grows evenly",
    )
    group.add_argument("--even", action="store_true", help="a rate without chance")
    group.add_argument(
        "--duration", metavar="TIME", help="send for so long (default: 10s, without --requests)"
    )
    group.add_argument("--requests", type=int, default=0, metavar="N", help="send so many")
    group.add_argument("--warmup", type=int, default=0, metavar="N", help="unmeasured ones first")
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="the same prompts again (default: fresh ones, which no cache knows)",
    )
    _add_trace_flags(group)


def _add_trace_flags(group: Any) -> None:
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="a Mooncake trace, .jsonl or .gz: timestamp (ms), input_length, "
        "output_length, hash_ids; session_id and delay",
    )
    group.add_argument(
        "--block-tokens",
        type=int,
        default=512,
        metavar="N",
        help="tokens that a hash id stands for (default: 512)",
    )
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="a trace's times are divided by this"
    )
    group.add_argument(
        "--closed", action="store_true", help="not at the trace's times: -c sessions at a time"
    )
    group.add_argument("--sharegpt", metavar="FILE", help="conversations of a ShareGPT file")
    group.add_argument(
        "--preset",
        choices=PRESET_NAMES,
        help="single requests of 50/100, 200/200 and 500/300 tokens",
    )


def _add_request_flags(made: Parser) -> None:
    group = made.add_argument_group("requests")
    group.add_argument(
        "--isl",
        "--input-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens of a prompt, without the chat template (default: 128)",
    )
    group.add_argument(
        "--osl",
        "--output-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of an answer (default: 64)",
    )
    group.add_argument(
        "--prefix-share",
        type=float,
        default=0.0,
        metavar="X",
        help="share of a prompt that others have too",
    )
    group.add_argument(
        "--prefixes",
        type=int,
        default=1,
        metavar="N",
        help="different shared beginnings (default: 1)",
    )
    group.add_argument(
        "--turns",
        type=int,
        default=1,
        metavar="N",
        help="turns of a conversation (default: 1; with --sharegpt 0: all)",
    )
    group.add_argument(
        "--stop-at-eos",
        action="store_true",
        help="answers may end early (without: ignore_eos is asked for)",
    )
    group.add_argument("--extra", default="{}", metavar="JSON", help="merged into every body")


def _add_server_flags(made: Parser) -> None:
    group = made.add_argument_group("server")
    group.add_argument("--model", default="default", help="model (default: default)")
    group.add_argument("--completions", action="store_true", help="/v1/completions, not chat")
    group.add_argument("--api-key", metavar="KEY", help=f"else ${API_KEY_VARIABLE}")
    group.add_argument("--timeout", metavar="TIME", help="a request fails after (default: never)")
    group.add_argument(
        "--tokenizer",
        default="",
        metavar="FOLDER",
        help="with tokenizer.json, for servers without /tokenize",
    )


def _add_result_flags(made: Parser) -> None:
    group = made.add_argument_group("result")
    group.add_argument("--slo-ttft", metavar="TIME", help="good: first token within (ms, or units)")
    group.add_argument("--slo-itl", metavar="TIME", help="good: mean gap between tokens within")
    group.add_argument("--out", metavar="FILE", help="write all figures, JSON")
    group.add_argument("--picture", metavar="FILE", help="draw them, PNG")
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--name", default="", help="what the result is called")


def parse_bench_config(found: argparse.Namespace) -> BenchConfig:
    """The measurement asked for. Raises `ConfigError`."""
    from dynamo.operations.bench.bench import BenchConfig
    from dynamo.operations.bench.workload import LatencyObjectives, RequestShape

    if len(found.words) > 1:
        raise ConfigError(
            f"unknown argument {found.words[1]!r}", hint="one URL; or: compare A.json B.json"
        )
    _check_numbers(found)
    return BenchConfig(
        target=_parse_target(found),
        shape=RequestShape(found.isl, found.osl, found.prefix_share, found.prefixes, found.turns),
        load=_parse_load(found),
        objectives=LatencyObjectives(
            _parse_milliseconds(found.slo_ttft), _parse_milliseconds(found.slo_itl)
        ),
        trace=found.trace or "",
        block_tokens=found.block_tokens,
        speed=found.speed,
        closed=found.closed,
        sharegpt=found.sharegpt or "",
        tokenizer=found.tokenizer,
        name=found.name,
    )


def _parse_target(found: argparse.Namespace) -> Any:
    from dynamo.operations.bench.workload import BenchTarget

    try:
        extra = msgspec.json.decode(found.extra, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--extra {found.extra}: {error}", hint="wanted a JSON object") from None
    url = found.words[0] if found.words else DEFAULT_URL
    return BenchTarget(
        url=url if "//" in url else f"http://{url}",
        model=found.model,
        api_key=found.api_key or os.environ.get(API_KEY_VARIABLE, ""),
        completions=found.completions,
        ignore_eos=not found.stop_at_eos,
        timeout_s=_parse_seconds(found.timeout),
        extra=extra,
    )


def _parse_load(found: argparse.Namespace) -> Any:
    from dynamo.operations.bench.workload import LoadProfile

    rate, rate_to = _parse_rate(found.rate)
    duration_s = _parse_seconds(found.duration) if found.duration or found.requests else 10.0
    if rate_to and not duration_s:
        raise ConfigError("--rate A..B grows over a time", hint="say it with --duration")
    if not (duration_s or found.requests or found.trace):
        raise ConfigError("--duration 0 would never end", hint="say --requests, or a duration")
    return LoadProfile(
        concurrency=found.concurrency,
        rate=rate,
        rate_to=rate_to,
        even=found.even,
        duration_s=duration_s,
        requests=found.requests,
        warmup=found.warmup,
        seed=found.seed,
    )


def _parse_rate(text: str | None) -> tuple[float, float]:
    """The first and the last (0: there is none)."""
    if text is None:
        return 0.0, 0.0
    first, dots, last = text.partition("..")
    try:
        rates = [float(first), *([float(last)] if dots else [])]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < inf for rate in rates):
        raise ConfigError(f"--rate {text}", hint="wanted 20, or 5..50: above 0")
    return rates[0], rates[1] if dots else 0.0


def _check_numbers(found: argparse.Namespace) -> None:
    least = {"concurrency": 1, "isl": 1, "osl": 1, "requests": 0, "warmup": 0, "block_tokens": 1}
    for name, bound in least.items():
        if getattr(found, name) < bound:
            raise ConfigError(f"--{name.replace('_', '-')}: at least {bound}")
    if not 0 <= found.prefix_share <= 1 or found.prefixes < 1:
        raise ConfigError("--prefix-share is 0 to 1, --prefixes at least 1")
    if not 0 < found.speed < inf:
        raise ConfigError("--speed: above 0")


def _parse_seconds(text: str | None) -> float:
    if not text:
        return 0.0
    try:
        return parse_seconds(text)
    except ValueError as wanted:
        raise ConfigError(f"{text!r}: {wanted}") from None


def _parse_milliseconds(text: str | None) -> float:
    """A bare number is milliseconds."""
    if text and text.replace(".", "", 1).isdigit():
        return float(text)
    return _parse_seconds(text) * 1000
